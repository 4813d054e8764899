"""Identical files and near copies: verify's findings, and the remarks at the start of a run."""

from __future__ import annotations

import io
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_folder, write_records
from PIL import Image, ImageEnhance

from pipelines import LoaderConfig, open_loader, same_images
from pipelines.__main__ import main
from pipelines.near_copies import near_copies, thumbnail
from pipelines.sources import open_source


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two splits of two classes, without identical images."""
    for split, seed in (("train", 3), ("val", 4)):
        write_folder(tmp_path / "data" / split, 8, 2, seed)
    return tmp_path / "data"


def verify(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["verify", *map(str, arguments)])
    return code, capsys.readouterr().out


def told(data: Path) -> list[str]:
    train, val = (open_source(str(data), split) for split in ("train", "val"))
    return same_images.remarks_on_same_images(train, val, str(data))


# --- equal bytes ---


def test_the_same_file_in_two_classes(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verify reports both, and they stay usable; a run reports them, too."""
    assert told(data) == []
    one, other = data / "train/c00/000.JPEG", data / "train/c01/copy.JPEG"
    shutil.copy(one, other)
    code, out = verify(capsys, data)
    assert code == 0, "which label is right, only a person can say"
    assert f"{one}: two labels, is c00 here, and c01 as {other} (usable)\n" in out
    assert f"{other}: two labels, is c01 here, and c00 as {one} (usable)\n" in out
    assert f"{data / 'train'}: 9 images, 0 unusable; usable, with a finding: 2 two labels\n" in out
    (sentence,) = told(data)
    start, end = sentence.split(": ", 1)
    assert start == "an image has two labels, as the same file is in the folders of two classes"
    assert end in {f"{first} and {second} (python -m pipelines verify {data} lists all of them)"
                   for first, second in ((one, other), (other, one))}
    shutil.copy(one, data / "train/c00/again.JPEG")  # in the same class: no fault
    assert len(told(data)) == 1


def test_the_same_file_in_training_and_validation(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, split in ((0, "c00"), (1, "c00")):
        name = f"{number:03}.JPEG"
        shutil.copy(data / "train" / f"c{number:02}" / name, data / "val" / split / f"copy-{name}")
    code, out = verify(capsys, data)
    train, val = data / "train", data / "val/c00"
    assert code == 1
    assert f"000.JPEG: duplicate, the same image as {val / 'copy-000.JPEG'}, which is for validation\n" in out
    assert f"as {val / 'copy-001.JPEG'}, which is for validation as c00, and c01 here\n" in out
    assert told(data) == [
        f"2 training images are also in validation, which makes its accuracy too high: {train / 'c00/000.JPEG'} and "
        f"{val / 'copy-000.JPEG'} (python -m pipelines verify {data} lists all of them)"]


def test_files_of_equal_size_or_end_are_no_copies(data: Path) -> None:
    one, other = data / "train/c00/000.JPEG", data / "train/c01/other.JPEG"
    content = bytearray(one.read_bytes())
    content[20] ^= 1  # in the header
    other.write_bytes(content)
    assert told(data) == []


def test_only_what_is_cheap_is_looked_for(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a small number of images, only files, and only on a disk that responds."""
    shutil.copy(data / "train/c00/000.JPEG", data / "train/c01/copy.JPEG")
    assert told(data)
    monkeypatch.setattr(same_images, "MOST_IMAGES", 16)
    assert told(data) == []
    monkeypatch.setattr(same_images, "MOST_IMAGES", 17)
    with monkeypatch.context() as slow:
        slow.setattr(same_images, "SECONDS", 0.01)
        slow.setattr(same_images, "_size", lambda path: (time.sleep(0.02), os.stat(path).st_size)[1])
        assert told(data) == []
    write_records(tmp_path / "train.rec", [encode(smooth_image(np.random.default_rng(1), 40, 40))] * 2, [0.0, 1.0])
    assert same_images.remarks_on_same_images(open_source(str(tmp_path / "train.rec"), "train"), None, "") == []


def test_loaders_tell_it(data: Path) -> None:
    shutil.copy(data / "train/c00/000.JPEG", data / "val/c00/copy.JPEG")
    train, val = (open_loader(LoaderConfig(data=str(data), split=split, batch_size=2, image_size=16))
                  for split in ("train", "val"))
    (sentence,) = train.remarks_on_same_images(val)
    assert sentence.startswith("a training image is also in validation")
    assert train.remarks_on_same_images(None) == []


def test_an_image_that_cannot_be_decoded_hides_no_other(data: Path) -> None:
    """A decoded image that stays in memory has no known label."""
    (data / "train/c00/002.JPEG").write_bytes(b"no image")
    shutil.copy(data / "train/c00/000.JPEG", data / "val/c00/copy.JPEG")
    train, val = (open_loader(LoaderConfig(data=str(data), split=split, batch_size=2, image_size=16, cache_gib=1.0,
                                           on_bad_image="skip")) for split in ("train", "val"))
    (sentence,) = train.remarks_on_same_images(val)
    assert sentence.startswith("a training image is also in validation")


# --- near copies ---


def photo(rng: np.random.Generator) -> Image.Image:
    return smooth_image(rng, 300, 220)


CHANGES = {
    "smaller": lambda image: image.resize((150, 110)),
    "of low quality": lambda image: Image.open(io.BytesIO(encode(image, quality=20))),
    "PNG": lambda image: Image.open(io.BytesIO(encode(image, "PNG"))),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.04),
}


@pytest.mark.parametrize("change", CHANGES)
def test_near_copies_are_found(change: str, rng: np.random.Generator) -> None:
    images = [photo(rng) for _ in range(40)]
    changed = [CHANGES[change](image) for image in images]
    thumbnails = np.array([list(thumbnail(encode(image, quality=90))) for image in [*images, *changed]], np.uint8)
    found = near_copies(thumbnails)
    assert {pair for pair in found if pair[1] - pair[0] != 40} == set(), "different images"
    assert len(found) >= 36


def test_flat_images_of_other_colours_are_no_copies() -> None:
    """Their hashes are equal. Each image is reported once, with the first one that it equals."""
    thumbnails = np.repeat(np.array([[10], [100], [200], [101]], np.uint8), 81, axis=1)
    assert near_copies(thumbnails) == [(1, 3)]
    assert near_copies(thumbnails[:1]) == [] and thumbnail(b"no image") == b""


def test_many_images_with_equal_hashes_take_no_square_of_time() -> None:
    thumbnails = np.repeat(np.arange(0, 250, 10, dtype=np.uint8).repeat(800)[:, None], 81, axis=1)
    start = time.process_time()
    assert near_copies(thumbnails)
    assert time.process_time() - start < 30, "all pairs of 20,000 images would take minutes"


def test_verify_names_near_copies_as_an_option(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = data / "train/c00/000.JPEG"
    Image.open(one).save(data / "val/c01/copy.png")
    shutil.copy(one, data / "train/c00/equal.JPEG")  # identical files of one class are no finding
    assert "near copy" not in verify(capsys, data)[1]
    code, out = verify(capsys, data, "--near-copies")
    assert code == 0
    assert f"{one}: near copy, looks like {data / 'val/c01/copy.png'} of c01, which is for validation (usable)\n" in out
    assert "0 unusable; usable, with a finding: 2 near copy\n" in out
