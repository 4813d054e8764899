"""Images that are decoded once give the same batches, to the bit, as images that are decoded in every epoch."""

import io
import itertools
import logging

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_records
from PIL import Image

from pipelines import DataError, ImageTransform, LoaderConfig, decoded, open_loader
from pipelines.decoded import SMALL_GIB, DecodedSource, decode_once
from pipelines.sources import open_source


def config(data, **options):
    return LoaderConfig(data=str(data), **{"batch_size": 5, "image_size": 24, "num_threads": 2, **options})


def images_of(loader):
    return [(b.data.asnumpy()[: b.num_valid], b.label.asnumpy()[: b.num_valid], b.num_valid) for b in loader]


def assert_equal_bits(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        for array, wanted_array in zip(one, other, strict=True):
            np.testing.assert_array_equal(array, wanted_array)


@pytest.fixture
def thumbnails(tmp_path, rng):
    """22 images of one size: half-size colour, full-size colour and grey JPEGs, and PNGs with alpha."""
    images = [smooth_image(rng, 31, 33) for _ in range(22)]
    ways = [lambda x: encode(x, quality=75), lambda x: encode(x, subsampling=0), lambda x: encode(x.convert("L")),
            lambda x: encode(x.convert("RGBA"), "PNG")]
    write_records(tmp_path / "train.rec", [ways[i % 4](x) for i, x in enumerate(images)], [float(i) for i in range(22)])
    return tmp_path / "train.rec"


@pytest.mark.long(but=["0-*-train", "3-folder-val"])
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("kind", ["numbered", "thumbnails", "folder"])  # images of many sizes, of one size, in files
@pytest.mark.parametrize("padding", [0, 3])
def test_the_same_batches_to_the_bit(kind, split, padding, request):
    data = request.getfixturevalue(kind)
    options = {"split": split, "seed": 7, "transform": ImageTransform(crop_padding=padding)}
    plain, cached = (open_loader(config(data, **options, cache_gib=gib)) for gib in (0.0, 1.0))
    source = open_source(data, "train")
    assert plain.cache_bytes == 0
    sizes = [Image.open(io.BytesIO(source.read(i).tobytes())).size for i in range(len(source))]
    assert cached.cache_bytes == sum(3 * width * height for width, height in sizes)
    expected = [images_of(plain) for _ in range(2)]
    for epoch in expected:
        assert_equal_bits(images_of(cached), epoch)

    stopped = open_loader(config(data, **options))
    list(itertools.islice(stopped, 1))
    cached.restore(stopped.state())
    assert_equal_bits(images_of(cached), expected[0][1:])


def test_each_image_is_decoded_once_and_equal_sizes_are_one_array(thumbnails, monkeypatch):
    settings = config(thumbnails, cache_gib=1.0)
    source = open_source(thumbnails, "train")
    fed = []
    feed = source.feed
    monkeypatch.setattr(source, "feed", lambda i: (fed.append(i), feed(i))[1])
    cached = decode_once(settings, source)
    assert sorted(set(fed)) == list(range(22))
    fed.clear()
    with decoded.DaliLoader(settings, (0, 1), cached) as loader:
        assert loader._plan_next().image.shape == (5, 33, 31, 3)
        assert len(images_of(loader)) == 4
    assert not fed


def test_two_processes_see_what_one_with_twice_the_batch_sees(numbered):
    whole = images_of(open_loader(config(numbered, batch_size=8)))
    halves = [images_of(open_loader(config(numbered, batch_size=4, cache_gib=1.0), (rank, 2))) for rank in range(2)]
    for (pixels, labels, _), *parts in zip(whole, *halves, strict=True):
        np.testing.assert_array_equal(labels, np.concatenate([part[1] for part in parts]))
        np.testing.assert_array_equal(pixels, np.concatenate([part[0] for part in parts]))


@pytest.mark.parametrize("split", ["train", "val"])
def test_broken_images_are_met_as_without_the_cache(tmp_path, split, rng):
    images = [encode(smooth_image(rng, 40, 30)) for _ in range(40)]
    for i, broken in ((17, b""), (18, b"text"), (33, images[33][:200])):
        images[i] = broken
    write_records(tmp_path / "data.rec", images, [float(i) for i in range(40)])
    loaders = [open_loader(config(tmp_path / "data.rec", split=split, on_bad_image="skip", cache_gib=gib))
               for gib in (0.0, 1.0)]
    assert not loaders[1].bad_images  # bad images are reported when they are met
    for _ in range(2):
        assert_equal_bits(*(images_of(loader) for loader in reversed(loaders)))
        assert loaders[0].bad_images == loaders[1].bad_images
    assert [name.rsplit(" ", 1)[1] for name, _ in loaders[1].bad_images] == ["17", "18", "33"]

    messages = []
    for gib in (0.0, 1.0):
        loader = open_loader(config(tmp_path / "data.rec", split=split, batch_size=1, cache_gib=gib, prefetch=1))
        with pytest.raises(DataError, match=r"data.rec record \d+: .*; replace it") as caught:
            images_of(loader)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_what_does_not_fit_is_decoded_in_every_epoch(numbered, monkeypatch, caplog):
    source = open_source(numbered, "train")
    size = open_loader(config(numbered, cache_gib=None)).cache_bytes
    assert 0 < size <= SMALL_GIB * 2**30

    def kept(gib):
        caplog.clear()
        return isinstance(decode_once(config(numbered, cache_gib=gib), source), DecodedSource)

    with caplog.at_level(logging.WARNING):
        assert kept(size / 2**30) and not caplog.text
        assert not kept((size - 1) / 2**30)
        assert "the decoded train images take about" in caplog.text
        assert not kept(0.0) and not caplog.text
        # With the default limit, a split that is too large is not kept, without a warning.
        monkeypatch.setattr(decoded, "SMALL_GIB", (size - 1) / 2**30)
        assert not kept(None) and not caplog.text
        # If the estimate is too low, decoding stops at the limit.
        monkeypatch.setattr(decoded, "_mean_decoded_bytes", lambda source: 1.0)
        assert not kept((size - 1) / 2**30) and caplog.text
        assert kept(size / 2**30)
