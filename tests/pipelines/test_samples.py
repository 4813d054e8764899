"""The built-in sample set."""

import zlib

import numpy as np
import pytest

from pipelines import DataError
from pipelines.samples import PATTERNS, _angle, draw, make_samples


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_made_once_and_the_same_for_the_same_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert make_samples(tmp_path / name, 2, 1, seed)
    first = contents(tmp_path / "a")
    assert first == contents(tmp_path / "b")
    assert len(first) == 3 * len(PATTERNS) + 1 and len(PATTERNS) >= 10
    other = contents(tmp_path / "c")
    assert all(first[name] != other[name] for name in first)
    assert len(set(first.values())) == len(first)  # all pictures differ
    assert not make_samples(tmp_path / "a", 2, 1, 0)
    with pytest.raises(DataError, match="holds something other than this sample set"):
        make_samples(tmp_path / "a", 3, 1, 0)
    assert contents(tmp_path / "a") == first


def test_angles():
    """Our arctan2 is as exact as a C library's, in units of the last place."""
    u, v = np.random.default_rng(0).normal(0, 3, (2, 100_000)).astype(np.float32)
    u[:10], v[5:15] = 0, 1
    angle, exact = _angle(v, u), np.arctan2(v, u, dtype=np.float64)
    assert angle.dtype == np.float32
    assert np.all(np.abs(angle - exact) <= 1.5 * np.spacing(np.abs(angle)))


def test_the_same_pixels_with_every_numpy():
    """The pixels are those of NumPy 1.26.4, which published accuracies use. NumPy 2 promotes float32 with its own
    scalars to float64, which changed 78 of the first ten images of each class."""
    x = np.linspace(-20, 20, 10_001).astype(np.float32)
    if zlib.crc32(np.stack([np.sin(x), np.hypot(x, np.roll(x, 3_000))]).tobytes()) != 0xF8B3B4E5:
        pytest.skip("NumPy's sin or hypot has other last bits on this CPU")

    def digest(label, pattern):
        images = [draw(pattern, np.random.default_rng([0, False, label, i])).tobytes() for i in range(5)]
        return f"{zlib.crc32(b''.join(images)):08x}"

    assert {pattern: digest(label, pattern) for label, pattern in enumerate(PATTERNS)} == {
        "bricks": "77e2dc32", "checkerboard": "4e3c9394", "chevrons": "7dbcf4e8", "clouds": "7736cd21",
        "crosses": "d706ff60", "dots": "2e55dd61", "honeycomb": "d41337c9", "rays": "f2f83c2f", "rings": "c24abdc2",
        "spiral": "c03a8906", "stripes": "9a9cd86f", "triangles": "a10495bb",
    }


def test_a_set_of_another_version_is_named_and_kept(tmp_path):
    assert make_samples(tmp_path / "a", 1, 1)
    marker = tmp_path / "a" / "samples.json"
    marker.write_text(marker.read_text().replace('"version": 3', '"version": 2'))
    before = contents(tmp_path / "a")
    with pytest.raises(DataError, match="holds the sample set of another version of this program: remove that folder"):
        make_samples(tmp_path / "a", 1, 1)
    marker.write_text("{")
    with pytest.raises(DataError, match="holds something other than this sample set"):
        make_samples(tmp_path / "a", 1, 1)
    assert contents(tmp_path / "a").keys() == before.keys()


def test_two_processes_draw_it_at_once(tmp_path, monkeypatch):
    """The later process uses the first one's set; in containers, both may have the same process id."""
    other = [lambda: make_samples(tmp_path / "a", 1, 1)]

    def draw_late(*arguments):
        if other:
            other.pop()()
        return draw(*arguments)

    monkeypatch.setattr("pipelines.samples.draw", draw_late)
    assert not make_samples(tmp_path / "a", 1, 1, num_threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert len(contents(tmp_path / "a")) == 2 * len(PATTERNS) + 1


def test_interrupted_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipelines.samples.draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_samples(tmp_path / "a", 2, 1, num_threads=1)
    assert not list(tmp_path.iterdir())


def test_pictures_have_realistic_sizes():
    rng = np.random.default_rng(1)
    sizes = np.array([draw(pattern, rng).size for pattern in PATTERNS for _ in range(3)])
    assert sizes.min() >= 90 and sizes.max() <= 256
    ratios = sizes[:, 0] / sizes[:, 1]
    assert ratios.min() < 0.9 and ratios.max() > 1.2


@pytest.mark.long
def test_colour_does_not_give_the_class_away():
    """Classifying by the nearest class mean, of each colour's mean and deviation, is hardly better than chance (1 in 12
    = 0.083)."""
    rng = np.random.default_rng(7)

    def features(pattern):
        pixels = np.asarray(draw(pattern, rng).resize((48, 48)), np.float64)
        return np.concatenate([pixels.mean((0, 1)), pixels.std((0, 1))])

    train, val = ({pattern: np.array([features(pattern) for _ in range(n)]) for pattern in PATTERNS} for n in (12, 8))
    means = np.array([train[pattern].mean(0) for pattern in PATTERNS])
    hits = [
        int(((row - means) ** 2).sum(1).argmin()) == label
        for label, pattern in enumerate(PATTERNS)
        for row in val[pattern]
    ]
    assert np.mean(hits) < 0.3


def test_no_place_to_write(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"cannot be written|holds something other"):
        make_samples(tmp_path / "file" / "set", 1, 1)
    with pytest.raises(DataError, match="holds something other"):
        make_samples(tmp_path / "file", 1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
