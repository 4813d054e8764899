"""Every readable kind of image gives Pillow's pixels: in training, validation and prediction, from records and from
files. `verify` reports what training does."""

import base64
import io
import os
import struct
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_records
from PIL import Image, ImageOps

from pipelines import DataError, ImageTransform, LoaderConfig, open_files, open_loader
from pipelines.by_pillow import PillowImages, reason_for_pillow, reason_for_pillow_of_file, upright_rgb
from pipelines.dali_loader import LOOK_AHEAD, DaliLoader
from pipelines.sources import open_source
from pipelines.verify import verify_split

WIDTH, HEIGHT = 64, 48
RNG = np.random.default_rng(4)
BASE = smooth_image(RNG, WIDTH, HEIGHT)
PIXELS = np.asarray(BASE)
GREY16 = np.asarray(BASE.convert("L"), np.uint16) * 257 - RNG.integers(0, 200, (HEIGHT, WIDTH)).astype(np.uint16)
# Sequential arithmetic-coded JPEGs written by libjpeg-turbo; Pillow cannot write them.
ARITHMETIC = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxOUlNSMj5aYVpQYEpR"
    "Ul//2wBDAQ4ODhMREyYVFSZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT0//yQARCAAMABADASIAAhEB"
    "AxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AGjgrdUy6T5/Enr9ZE3xbHmkbazJBM9ulkQXGeIz/9k=")


def without_adobe(jpeg: bytes) -> bytes:
    at = jpeg.index(b"\xff\xee")
    return jpeg[:at] + jpeg[at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big") :]


def as_ycck(jpeg: bytes) -> bytes:
    at = jpeg.index(b"Adobe") + 11
    return jpeg[:at] + b"\2" + jpeg[at + 1 :]


def png(depth: int, colours: int, rows: bytes, interlaced: bool = False) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, colours, 0, 0, interlaced)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def adam7(pixels: np.ndarray) -> bytes:
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    return b"".join(b"\0" + pixels[y, x0::dx].tobytes() for x0, y0, dx, dy in passes for y in range(y0, HEIGHT, dy))


def ppm(largest: int, kind: bytes = b"P6", comment: bytes = b"") -> bytes:
    values = (PIXELS.astype(np.int64) * largest // 255).astype(">u2" if largest > 255 else np.uint8)
    values = values[..., 0] if kind in (b"P5", b"P2") else values
    body = np.ascontiguousarray(values).tobytes() if kind in (b"P5", b"P6") else (
        b"\n".join(b" ".join(b"%d" % value for value in row.ravel()) for row in values) + b"\n")
    return b"%s\n%s%d %d\n%d\n%s" % (kind, comment, WIDTH, HEIGHT, largest, body)


def kinds() -> dict[str, bytes]:
    found = {f"JPEG {ratio}": encode(BASE, subsampling=ratio, quality=95)
             for ratio in ("4:4:4", "4:2:2", "4:2:0", "4:1:1")}
    found |= {
        "progressive JPEG": encode(BASE, progressive=True), "JPEG with restarts": encode(BASE, restart_marker_blocks=4),
        "grey JPEG": encode(BASE.convert("L")), "arithmetic JPEG": ARITHMETIC, "RGB JPEG": encode(BASE, keep_rgb=True),
        "one pixel": encode(BASE.resize((1, 1))), "JPEG with a profile": encode(BASE, icc_profile=b"x" * 70_000),
        "MPO": encode(BASE, "MPO", save_all=True, append_images=[BASE.rotate(180)]),
    }  # fmt: skip
    cmyk = encode(BASE.convert("CMYK"), quality=95)
    profiled = encode(BASE.convert("CMYK"), quality=95, icc_profile=b"x" * 70_000)
    found |= {"CMYK JPEG": cmyk, "bare CMYK JPEG": without_adobe(cmyk), "YCCK JPEG": as_ycck(cmyk),
              "bare CMYK JPEG with a profile": without_adobe(profiled)}
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x112] = orientation
        for kind, options in (("JPEG", {}), ("PNG", {}), ("WEBP", {}), ("WEBP", {"lossless": True}), ("TIFF", {})):
            found[f"{kind} {options} of orientation {orientation}"] = encode(BASE, kind, exif=exif, **options)
        found[f"bare CMYK of orientation {orientation}"] = without_adobe(encode(BASE.convert("CMYK"), exif=exif))
    alpha = BASE.copy()
    alpha.putalpha(Image.fromarray(RNG.integers(0, 256, (HEIGHT, WIDTH), np.uint8)))
    few = BASE.convert("P", palette=Image.Palette.ADAPTIVE, colors=17)
    deep = PIXELS.astype(">u2") * 257
    second = {"save_all": True, "append_images": [BASE.rotate(180)]}
    found |= {f"PNG {mode}": encode(image.convert(mode), "PNG") for mode, image in
              {"RGB": BASE, "L": BASE, "LA": alpha, "RGBA": alpha, "P": BASE, "1": BASE}.items()}
    found |= {f"PNG of {bits} bits": encode(BASE.convert("P", palette=Image.Palette.ADAPTIVE, colors=2**bits), "PNG",
                                            bits=bits) for bits in (1, 2, 4)}
    found |= {
        "PNG with a transparent colour of a palette": encode(few, "PNG", transparency=3),
        "PNG with transparent colours of a palette": encode(few, "PNG", transparency=bytes(range(0, 170, 10))),
        "PNG with a transparent colour": encode(BASE, "PNG", transparency=BASE.getpixel((3, 3))),
        "grey PNG with a transparent value": encode(BASE.convert("L"), "PNG", transparency=77),
        "16-bit PNG": encode(Image.fromarray(GREY16), "PNG"),
        "16-bit RGB PNG": png(16, 2, b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep)),
        "interlaced PNG": png(8, 2, adam7(PIXELS), interlaced=True), "APNG": encode(BASE, "PNG", **second),
        "WebP": encode(BASE, "WEBP"), "lossless WebP": encode(BASE, "WEBP", lossless=True),
        "WebP with alpha": encode(alpha, "WEBP"),
        "exact WebP with alpha": encode(alpha, "WEBP", lossless=True, exact=True),
        "animated WebP": encode(BASE, "WEBP", **second),
        "lossless animated WebP": encode(BASE, "WEBP", lossless=True, **second),
    }  # fmt: skip
    found |= {f"BMP {mode}": encode(alpha.convert(mode), "BMP") for mode in ("RGB", "L", "P", "1", "RGBA")}
    found |= {f"TIFF {mode}": encode(image.convert(mode), "TIFF") for mode, image in
              {"RGB": BASE, "L": BASE, "1": BASE, "RGBA": alpha, "CMYK": BASE, "LA": alpha, "LAB": BASE}.items()}
    found |= {f"TIFF {way}": encode(BASE, "TIFF", compression=way) for way in ("tiff_lzw", "tiff_deflate", "packbits")}
    found |= {"16-bit TIFF": encode(Image.fromarray(GREY16), "TIFF"), "TIFF of two": encode(BASE, "TIFF", **second)}
    found |= {f"{kind.decode()} of {largest}": ppm(largest, kind)
              for kind in (b"P6", b"P5", b"P3", b"P2") for largest in (1, 100, 254, 255, 256, 1000, 65535)}
    found |= {"P6 with comments": ppm(100, comment=b"# 255 1\n#\n"), "PBM": encode(BASE.convert("1"), "PPM")}
    return found


KINDS = kinds()
# Allowed difference in levels of 255; Pillow rounds differently when it converts TIFF palettes and YCbCr.
TOLERANCE = 1


def reference(encoded: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(encoded)) as image:
        if image.mode.startswith("I"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def write(folder: Path, feeds: str, images: list[bytes]) -> Path:
    """Write images whose class numbers tell them apart."""
    if feeds == "bytes":
        write_records(folder / "train.rec", images, [float(i) for i in range(len(images))])
        return folder / "train.rec"
    for i, image in enumerate(images):
        (folder / f"c{i:03}").mkdir(parents=True)
        (folder / f"c{i:03}/image").write_bytes(image)
    return folder


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("feeds", ["bytes", "paths"])
def test_decoded_pixels_are_those_of_pillow(tmp_path, caplog, feeds, split):
    data = write(tmp_path, feeds, list(KINDS.values()))
    # The training window is the whole image, unless EXIF rotates the image.
    whole = ImageTransform(random_area=(1, 1), random_ratio=(WIDTH / HEIGHT, WIDTH / HEIGHT), mirror=False)
    config = LoaderConfig(data=str(data), split=split, batch_size=len(KINDS), image_size=16, num_threads=2)
    config = replace(config, transform=whole)
    with DaliLoader(config, (0, 1), open_source(data, split), stage="decode") as loader:
        images, labels, _ = loader.run()
        numbers = np.asarray(labels.as_array()).astype(int).tolist()
        assert sorted(numbers) == list(range(len(KINDS))) and not loader.bad and not loader.damaged
        names = list(KINDS)
        for place, number in enumerate(numbers):
            expected, got = reference(KINDS[names[number]]), np.array(images.at(place))
            if split == "train" and expected.shape != (HEIGHT, WIDTH, 3):
                continue  # the window has another shape
            assert got.shape == expected.shape, names[number]
            assert np.abs(got.astype(int) - expected).max() <= TOLERANCE, names[number]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and warnings[0].endswith("decode correctly, once each")


@pytest.mark.long
def test_verify_calls_all_of_them_usable(tmp_path):
    report = verify_split(str(write(tmp_path, "bytes", list(KINDS.values()))), "train", num_threads=2)
    assert report.num_unusable == 0
    found = {list(KINDS)[int(name.split()[-1])]: finding.kind for name, finding in report.findings
             if finding.kind != "two labels"}  # some kinds are written as the same bytes
    assert set(found.values()) == {"CMYK", "16-bit", "by Pillow"}
    by_pillow = [name for name, kind in found.items() if kind == "by Pillow"]
    assert {name.split()[0] for name in by_pillow} == {"bare", "TIFF", "WEBP", "P6", "P5", "P3", "P2"}
    assert {"TIFF LA", "TIFF LAB", "TIFF 1", "P6 of 100", "bare CMYK JPEG"} <= set(by_pillow)
    assert not {"P6 of 255", "CMYK JPEG", "TIFF RGBA"} & set(by_pillow)


@pytest.mark.parametrize("feeds", ["bytes", "paths"])
def test_prediction_sees_what_validation_sees(tmp_path, feeds):
    names = ["bare CMYK JPEG", "P6 of 100", "TIFF LA", "CMYK JPEG"]
    images = [KINDS[name] for name in names]
    write(tmp_path, "paths", images)
    data = write(tmp_path / "records", "bytes", images) if feeds == "bytes" else tmp_path
    config = LoaderConfig(data=str(data), split="val", batch_size=4, image_size=32, num_threads=1)
    files = [tmp_path / f"c{i:03}/image" for i in range(4)]
    with (open_loader(config) as validation, open_loader(replace(config, cache_gib=1.0)) as kept,
          open_files(files, 32, 4, num_threads=1) as prediction):
        expected = next(iter(validation)).data.asnumpy()
        np.testing.assert_array_equal(next(iter(prediction)).data.asnumpy(), expected)
        np.testing.assert_array_equal(next(iter(kept)).data.asnumpy(), expected)


def twelve_bits(jpeg: bytes) -> bytes:
    at = jpeg.index(b"\xff\xc0") + 4
    return jpeg[:at] + b"\x0c" + jpeg[at + 1 :]


# Images that DALI refuses and Pillow reads, and images that neither reads.
VALID = {"PNG without its last byte": KINDS["PNG RGB"][:-1],
         "a letter for a blank in an ASCII PPM, which DALI decodes": b"q".join(KINDS["P3 of 255"].rsplit(b" ", 1)),
         "ASCII PGM of odd blanks": b"P2\t#x\n2\r2 #y\n255\n1 2\n3 4"}
INVALID = {"12-bit JPEG": twelve_bits(KINDS["JPEG 4:2:0"]), "half a PNG": KINDS["PNG RGB"][:300],
           "half a bare CMYK JPEG": KINDS["bare CMYK JPEG"][:-500], "half a PPM": KINDS["P6 of 100"][:-500],
           "a letter in an ASCII PPM of 100": KINDS["P3 of 100"][:-20] + b"q" + KINDS["P3 of 100"][-19:],
           "TIFF of numbers": encode(BASE.convert("F"), "TIFF")}


@pytest.mark.parametrize("feeds", ["bytes", "paths"])
@pytest.mark.parametrize("name", [*VALID, *INVALID])
def test_verify_and_training_are_one_judge(tmp_path, name, feeds):
    images = [encode(smooth_image(np.random.default_rng(i), 40, 30)) for i in range(8)]
    images[3] = (VALID | INVALID)[name]
    data = write(tmp_path, feeds, images)
    (_, finding), = verify_split(str(data), "train", num_threads=1).findings
    assert finding.usable == (name in VALID) and "\n" not in finding.detail
    for split in ("train", "val"):
        config = LoaderConfig(data=str(data), split=split, batch_size=4, image_size=16, num_threads=1)
        with open_loader(replace(config, on_bad_image="skip")) as loader:
            seen = {int(label) for batch in loader for label in batch.label.asnumpy()[: batch.num_valid]}
            assert (3 in seen) == (name in VALID) and len(loader.bad) == (name in INVALID)
            if name in INVALID:
                assert loader.bad[3] == f"{finding.kind}, {finding.detail}"
            if name in VALID and split == "val":
                list(loader)  # a second epoch, without converting again
    if name in INVALID:
        with (open_loader(LoaderConfig(data=str(data), split="val", batch_size=8, image_size=16)) as loader,
              pytest.raises(DataError, match="replace it, list all such images with")):
            list(loader)


@pytest.mark.parametrize("pixels", [np.ones((4, 4), np.float32), np.full((4, 4), 65536, np.int32),
                                    np.full((4, 4), -1, np.int32)])
def test_pixels_of_unknown_range_are_refused(pixels):
    """Pillow would make black or arbitrary ones of them."""
    with pytest.raises(ValueError, match="its pixels are .* convert it to 8 bits"):
        upright_rgb(Image.fromarray(pixels))


def test_the_files_of_conversions_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    data = write(tmp_path / "data", "paths", [KINDS["bare CMYK JPEG"]] * 4)
    with open_loader(LoaderConfig(data=str(data), split="val", batch_size=4, image_size=16)) as loader:
        list(loader)
        assert len(list((tmp_path / "temporary").rglob("*.png"))) == 4
    assert not list((tmp_path / "temporary").iterdir())


def test_several_threads_add_images(monkeypatch):
    """All threads must use one folder: a second folder would replace the first, and its files would be deleted."""
    created = tempfile.TemporaryDirectory

    def slow(**options):
        time.sleep(0.01)
        return created(**options)

    monkeypatch.setattr("tempfile.TemporaryDirectory", slow)
    images = PillowImages()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: images.add(i, KINDS["one pixel"]), range(16)))
    assert all(len(images.feed(i, "bytes")) for i in range(16))
    images.close()


def test_the_header_of_a_usual_image_is_read_in_a_few_pieces():
    """Headers are read for every image of a data set, so it must be cheap."""
    pieces: list[int] = []

    def read(at: int, size: int) -> bytes:
        pieces.append(size)
        return KINDS["JPEG 4:2:0"][at : at + size]

    assert reason_for_pillow(read) == "" and len(pieces) < 10 and sum(pieces) < 100


@pytest.mark.parametrize("name", list(KINDS))
def test_the_header_of_a_file_is_judged_as_that_of_its_bytes(tmp_path, name):
    path = tmp_path / "image"
    path.write_bytes(KINDS[name])
    of_bytes = reason_for_pillow(lambda at, size: KINDS[name][at : at + size])
    assert reason_for_pillow_of_file(os.fsencode(path)) == of_bytes


@pytest.mark.parametrize("feeds", ["bytes", "paths"])
def test_headers_are_looked_at_once_and_before_their_batch_is_planned(tmp_path, monkeypatch, feeds):
    asked: list[int] = []
    header = DaliLoader._header
    monkeypatch.setattr(DaliLoader, "_header", lambda self, i: asked.append(i) or header(self, i))
    images = [encode(BASE)] * 12 + [KINDS["bare CMYK JPEG"], encode(BASE)] * 3
    data = write(tmp_path, feeds, images)
    config = LoaderConfig(data=str(data), batch_size=3, image_size=16, num_threads=1)
    with DaliLoader(config, (0, 1), open_source(data, "train")) as loader:
        batches = iter(loader)
        seen = list(next(batches).indices)
        assert set(seen) < set(asked) < set(range(18))  # some batches ahead, not all
        seen += [i for batch in batches for i in batch.indices]
        assert sorted(seen) == list(range(18)) and len(loader._by_pillow) == 3
        again = len(asked) - 18  # images that the next epoch needs ahead were asked for twice
        assert set(asked) == set(range(18)) and again <= 3 * LOOK_AHEAD
        state = loader.state()
        list(loader)  # the next epoch
        loader.restore(state)
        assert len(list(loader)) == 6 and len(asked) == 18 + again


def test_an_image_that_fills_up_a_batch_is_looked_at_too(tmp_path):
    """A batch of broken images is filled with the first good image of all, whose own batch comes later."""
    whole = KINDS["bare CMYK JPEG"]
    data = write(tmp_path, "bytes", [b"broken"] * 4 + [whole] * 4)
    config = LoaderConfig(data=str(data), split="val", batch_size=4, image_size=16, num_threads=1, on_bad_image="skip")
    with DaliLoader(config, (0, 1), open_source(data, "val"), stage="decode") as loader:
        images, _, plan = loader.run()
        assert plan.num_valid == 0 and plan.indices[0] == 4
        assert np.abs(np.array(images.at(0)).astype(int) - reference(whole)).max() <= TOLERANCE
