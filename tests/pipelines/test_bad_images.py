"""Odd and broken images: the decodable ones just work, the broken ones are named, and skipped or refused."""

import re
import resource
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_records
from PIL import Image

from common.mxnet_compat import mx
from pipelines import DataError, ImageTransform, LoaderConfig, graph, open_files, open_loader
from pipelines.dali_loader import DaliLoader
from pipelines.inspect_image import inspect_image
from pipelines.make_records import Options, plan_files
from pipelines.make_records import write_records as write_image_records
from pipelines.transform import MAX_PIXELS
from pipelines.verify import verify_split


def colour_image(seed: int) -> Image.Image:
    return smooth_image(np.random.default_rng(seed), 80, 60)


def sixteen_bits(seed: int) -> Image.Image:
    return Image.fromarray(np.asarray(colour_image(seed).convert("L"), np.uint16) * 257)


DECODABLE = {
    "RGB JPEG": lambda seed: encode(colour_image(seed)),
    "progressive JPEG": lambda seed: encode(colour_image(seed), progressive=True),
    "CMYK JPEG": lambda seed: encode(colour_image(seed).convert("CMYK")),
    "grey JPEG": lambda seed: encode(colour_image(seed).convert("L")),
    "PNG": lambda seed: encode(colour_image(seed), "PNG"),
    "PNG with alpha": lambda seed: encode(colour_image(seed).convert("RGBA"), "PNG"),
    "PNG with palette": lambda seed: encode(colour_image(seed).convert("P"), "PNG"),
    "16-bit PNG": lambda seed: encode(sixteen_bits(seed), "PNG"),
    "TIFF of 1 bit": lambda seed: encode(colour_image(seed).convert("1"), "TIFF"),
    "BMP": lambda seed: encode(colour_image(seed), "BMP"),
    "one pixel": lambda seed: encode(Image.new("RGB", (1, 1), (seed, 100, 200))),
}
BROKEN = {
    "empty": lambda seed: b"",
    "text": lambda seed: b"<html>404 not found</html>",
    "zeros": lambda seed: bytes(3000),
    "truncated header": lambda seed: encode(colour_image(seed))[:100],
    "truncated JPEG": lambda seed: encode(colour_image(seed))[:-400],
    "truncated PNG": lambda seed: encode(colour_image(seed), "PNG")[:500],
    "GIF": lambda seed: encode(colour_image(seed), "GIF"),
    "TIFF of floating-point numbers": lambda seed: encode(colour_image(seed).convert("F"), "TIFF"),
}


def config(path, **options):
    return LoaderConfig(data=str(path), **{"batch_size": 8, "image_size": 16, "num_threads": 2, **options})


@pytest.mark.parametrize("kind", DECODABLE)
@pytest.mark.parametrize("split", ["train", "val"])
def test_decodable_images_just_work(tmp_path, kind, split):
    path = tmp_path / "data.rec"
    write_records(path, [DECODABLE[kind](seed) for seed in range(8)], [0.0] * 8)
    loader = open_loader(config(path, split=split))
    batch = next(iter(loader))
    assert batch.num_valid == 8 and not loader.bad_images
    assert np.isfinite(batch.data.asnumpy()).all()


def test_all_kinds_show_the_same_picture(tmp_path):
    others = ("one pixel", "TIFF of 1 bit", "16-bit PNG", "grey JPEG", "PNG with palette")
    kinds = [kind for kind in DECODABLE if kind not in others]
    path = tmp_path / "data.rec"
    write_records(path, [DECODABLE[kind](5) for kind in kinds], [0.0] * len(kinds))
    pixels = next(iter(open_loader(config(path, split="val")))).data.asnumpy()[: len(kinds)] * 57  # about 0 to 255
    for kind, image in zip(kinds, pixels, strict=True):
        assert np.abs(image - pixels[0]).mean() < 8, kind  # losses of JPEG at quality 75, and of CMYK


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("split", ["train", "val"])
def test_broken_images_are_named_and_skipped(tmp_path, kind, split):
    """Several broken images are in one batch and one in another; all other images still appear, and no broken one
    does."""
    images = [encode(colour_image(i)) for i in range(24)]
    broken = [3, 4, 17]
    for i in broken:
        images[i] = BROKEN[kind](i)
    path = tmp_path / "data.rec"
    write_records(path, images, [float(i) for i in range(24)])
    with open_loader(config(path, split=split, on_bad_image="skip")) as loader:
        for _ in range(2):
            batches = [(b.label.asnumpy()[: b.num_valid].astype(int).tolist(), list(b.indices)) for b in loader]
            assert loader.num_skipped == len(broken), "of this epoch alone"
            valid = [labels for labels, _ in batches]
            assert [indices for _, indices in batches] == valid, "each image has a class of its own here"
            seen = [label for labels in valid for label in labels]
            assert set(seen) == set(range(24)) - set(broken)
            assert len(seen) == (24 if split == "train" else 21)
        assert [name for name, _ in loader.bad_images] == [f"{path} record {i}" for i in broken]
        assert all(reason and "\n" not in reason for _, reason in loader.bad_images)
    with (
        pytest.raises(DataError, match=r"record (3|4|17): .+; replace it, .*--on-bad-image skip") as caught,
        open_loader(config(path, split=split)) as loader,
    ):
        list(loader)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", BROKEN)
def test_inspection_agrees_with_the_decoder(kind):
    finding = inspect_image(BROKEN[kind](1))
    assert finding is not None and not finding.usable
    for decodable in DECODABLE.values():
        finding = inspect_image(decodable(1))
        assert finding is None or finding.usable
    assert inspect_image(DECODABLE["CMYK JPEG"](1)).kind == "CMYK"
    assert inspect_image(DECODABLE["16-bit PNG"](1)).kind == "16-bit"


def test_broken_images_in_a_folder(folder):
    files = sorted(folder.rglob("*.JPEG"))
    files[2].write_bytes(b"")
    files[7].write_bytes(files[7].read_bytes()[:200])
    png = encode(Image.open(files[5]), "PNG")
    files[5].write_bytes(png)  # a PNG named .JPEG
    loader = open_loader(config(folder, batch_size=4, on_bad_image="skip"))
    list(loader)
    assert [name for name, _ in loader.bad_images] == [str(files[2]), str(files[7])]
    files[9].unlink()  # while the loader runs
    list(loader)
    assert (str(files[9]), "cannot be read (No such file or directory)") in loader.bad_images


def test_resuming_among_broken_images_gives_equal_bits(tmp_path):
    rng = np.random.default_rng(0)
    images = [encode(colour_image(i)) for i in range(40)]
    for i in rng.choice(40, 8, replace=False):
        images[i] = images[i][: int(rng.integers(0, len(images[i])))]
    path = tmp_path / "data.rec"
    write_records(path, images, [float(i) for i in range(40)])
    settings = config(path, on_bad_image="skip")
    unbroken = open_loader(settings)
    batches = [batch.data.asnumpy() for _ in range(2) for batch in unbroken]
    for stop in range(5):
        first = open_loader(settings)
        for _, _ in zip(range(stop), first, strict=False):
            pass
        second = open_loader(settings)
        second.restore(first.state())
        rest = [batch.data.asnumpy() for _ in range(2) for batch in second]
        for got, wanted in zip(rest, batches[stop:], strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_nothing_but_broken_images(tmp_path):
    path = tmp_path / "data.rec"
    write_records(path, [b"no image"] * 9, [0.0] * 9)
    reason = ("none of the 9 images can be decoded, for example .*data.rec record 0: not an image, begins with "
              "b'no image'")
    with pytest.raises(DataError, match=reason):
        list(open_loader(config(path, on_bad_image="skip")))


def test_images_of_which_all_have_too_many_pixels(tmp_path):
    """The message blames the limit, also if all images are decoded when the data are opened."""
    path = tmp_path / "data.rec"
    write_records(path, [encode(colour_image(seed)) for seed in range(9)], [0.0] * 9)
    with pytest.raises(DataError, match="more than --max-pixels 100"):
        list(open_loader(config(path, max_pixels=100, cache_gib=1.0)))


def test_a_record_that_the_index_misses(tmp_path):
    """In a big file, the spot check may miss a wrong line of the index; the error then comes with the record's
    batch."""
    path = tmp_path / "data.rec"
    write_records(path, [encode(colour_image(i)) for i in range(10)], [float(i) for i in range(10)])
    loader = open_loader(config(path, split="val", on_bad_image="skip"))
    loader._source._offsets[6] += 4
    loader._source._record.cache_clear()
    seen = [label for b in loader for label in b.label.asnumpy()[: b.num_valid].astype(int)]
    assert seen == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert loader.bad_images[0][1].startswith("no record begins at offset")


def test_many_broken_images_cost_few_new_pipelines(tmp_path, monkeypatch):
    """Each failure inspects twice as many batches ahead as the previous failure."""
    images = [encode(smooth_image(np.random.default_rng(i), 30, 40)) for i in range(200)]
    broken = list(range(0, 200, 5))
    for i in broken:
        images[i] = images[i][:-60]
    write_records(tmp_path / "train.rec", images, [float(i) for i in range(200)])
    starts = []
    start = DaliLoader._start
    monkeypatch.setattr(DaliLoader, "_start", lambda loader: (starts.append(loader.batch), start(loader)))
    with open_loader(config(tmp_path / "train.rec", batch_size=2, on_bad_image="skip")) as loader:
        labels = {int(label) for batch in loader for label in batch.label.asnumpy()}
        assert len(loader.bad_images) == len(broken)
    assert labels == set(range(200)) - set(broken)
    assert 3 <= len(starts) <= 9  # 1, 2, 4, ... 64 batches ahead; 40 broken images in 100 batches


def test_no_gpu_memory_left_is_no_bad_image(tmp_path, monkeypatch):
    """DALI's error, as in github.com/NVIDIA/DALI/issues/2525, must not start a search for a broken image, which would
    find none."""
    path = tmp_path / "data.rec"
    write_records(path, [DECODABLE["RGB JPEG"](seed) for seed in range(8)], [0.0] * 8)
    loader = open_loader(config(path))

    class FullGpu:
        def run(self):
            raise RuntimeError("Critical error in pipeline:\nError when executing Mixed operator decoders__ImageSlice\n"
                               "CUDA allocation failed\nCurrent pipeline object is no longer valid.")

    monkeypatch.setattr(loader, "_start", lambda: setattr(loader, "_pipeline", FullGpu()))
    with pytest.raises(DataError, match="the GPU has no memory left for the loader's batches of 8 images; use a small"):
        next(iter(loader))


def test_no_gpu_memory_left_for_the_kernels(tmp_path, monkeypatch):
    """MXNet's out-of-memory error becomes a DataError."""
    path = tmp_path / "data.rec"
    write_records(path, [DECODABLE["RGB JPEG"](seed) for seed in range(8)], [0.0] * 8)
    loader = open_loader(config(path, split="val"))

    def augmenter(*_):
        raise mx.base.MXNetError("cudaMalloc retry failed: out of memory")

    run = loader._run_pipeline
    monkeypatch.setattr(loader, "_run_pipeline", lambda: (*run(), *run()[:2]))
    monkeypatch.setattr(loader, "_augmenter", augmenter)
    with pytest.raises(DataError, match="the GPU has no memory left for the loader's batches of 8 images; use a small"):
        next(iter(loader))


@pytest.mark.parametrize("image_format, split, transform", [
    ("JPEG", "train", ImageTransform()),
    ("PNG", "train", ImageTransform(crop_padding=4)),
    ("WEBP", "val", ImageTransform()),
])
def test_images_of_too_many_pixels(tmp_path, image_format, split, transform):
    """An image with exactly the limit's number of pixels is accepted."""
    rng = np.random.default_rng(8)
    path = tmp_path / "data.rec"
    images = [encode(smooth_image(rng, width, 60), image_format) for width in (80, 81, 80, 79)]
    write_records(path, images, [0.0] * 4)
    options = config(path, split=split, transform=transform, batch_size=2, max_pixels=4800, on_bad_image="skip")
    sentence = "too large, has 81 x 60 pixels, more than --max-pixels 4800"
    for cache in (0.0, 1.0):
        with open_loader(replace(options, cache_gib=cache)) as loader:
            list(loader)
            assert [reason for _, reason in loader.bad_images] == [sentence]
    with open_loader(replace(options, on_bad_image="error")) as loader, pytest.raises(DataError, match=sentence):
        list(loader)
    findings = [finding for _, finding in verify_split(str(path), "train", max_pixels=4800).findings]
    assert [(finding.kind, finding.usable) for finding in findings] == [("too large", False)]


def test_a_very_large_image_is_not_decoded(tmp_path):
    """An image of 400 megapixels in a PNG of 50 kB is decoded neither by the loader, nor by predict's loader, nor by
    verify."""
    file = tmp_path / "c/large.png"
    file.parent.mkdir()
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 1, 0, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(99)))]
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (*chunks, (b"IEND", b""))
    ))
    sentence = f"{file}: too large, has 20,000 x 20,000 pixels, more than --max-pixels {MAX_PIXELS}; replace it"
    with pytest.raises(DataError, match=re.escape(sentence)):
        list(open_files([file], 16, 1))
    assert verify_split(str(tmp_path), "train").findings[0][1].kind == "too large"  # not "truncated"
    with pytest.raises(DataError, match="too large"):
        write_image_records(plan_files(tmp_path, "train"), tmp_path / "out", "train", Options())


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (3, 1000), (1000, 3), (60, 80)])
@pytest.mark.parametrize("cache", [0.0, 1.0])
def test_very_long_images_take_little_memory_in_validation(tmp_path, size, cache):
    """Without the limit for long images, the resize would make 256 x 5,120,000 pixels, of which the crop takes 256 x
    256. The limit does not change the picture."""
    width, height = size
    ramp = np.add.outer(np.arange(height), np.arange(width)) * 255 // (height + width)
    pixels = np.repeat(ramp[..., None], 3, axis=2).astype(np.uint8)
    write_records(tmp_path / "train.rec", [encode(Image.fromarray(pixels), "PNG")], [0.0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    transform = ImageTransform(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    options = {"split": "val", "batch_size": 1, "image_size": 224, "cache_gib": cache, "transform": transform}
    with open_loader(config(tmp_path / "train.rec", **options)) as loader:
        image = next(iter(loader)).data.asnumpy()[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB
    assert np.abs(image[112, 112] - pixels[height // 2, width // 2].astype(float)).max() < 3
    longer = 1 if width > height else 0
    assert np.abs(np.diff(image.mean(axis=(1 - longer, 2)))).max() < 3


def test_an_image_of_a_usual_shape_is_validated_whole(tmp_path, monkeypatch):
    """The limit for long images does not change its window, to the bit."""
    sizes = ((640, 10), (37, 53), (100, 100), (10, 640), (7, 400))
    images = [encode(smooth_image(np.random.default_rng(i), *size)) for i, size in enumerate(sizes)]
    write_records(tmp_path / "train.rec", images, [0.0] * 5)

    def batch(longest: float) -> np.ndarray:
        monkeypatch.setattr(graph, "LONGEST_SIDE", longest)
        with open_loader(config(tmp_path / "train.rec", split="val", batch_size=5, image_size=32)) as loader:
            return next(iter(loader)).data.asnumpy()

    np.testing.assert_array_equal(batch(64.0), batch(1e9))


def test_what_the_resize_makes_is_bounded_by_max_pixels():
    transform = ImageTransform(val_crop_fraction=1.0)
    options = {"training": False, "transform": transform, "dtype": "float32", "channels": 3, "device": "cpu"}
    for image_size, max_pixels, expected in ((224, MAX_PIXELS, 64), (1000, 10_000_000, 10), (1000, 100, 2)):
        found = graph.longest_side(graph.GraphConfig(image_size=image_size, max_pixels=max_pixels, **options))
        assert found == expected
