"""Files of data with damaged content: whatever the damage, a reader ends with one sentence or returns images.

A mutation is one to three small damages at random places of a file. `make test` tries some for each reader, `make
test-faults` 20,000 (RESNET_FAULT_MUTATIONS) over all of them; RESNET_TEST_SEED repeats them.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from faulty import TRIES, tries
from PIL import Image
from tfrecord_files import example, write_tfrecord

from common.errors import UserError
from pipelines import make_records
from pipelines.inspect_image import inspect_image
from pipelines.make_records import Options, plan_files, plan_train_tar, read_labels
from pipelines.recordio import BrokenRecordError, pack_record
from pipelines.sources import open_source
from pipelines.text import read_words
from pipelines.verify import verify_split
from train.image_paths import image_paths

FEW = 60
MUTATIONS = int(os.environ.get("RESNET_FAULT_MUTATIONS", "20000"))
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def encode(kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


JPEG = encode("JPEG")
IMAGES = {
    "JPEG": JPEG, "PNG": encode("PNG"), "WebP": encode("WEBP"), "BMP": encode("BMP"), "TIFF": encode("TIFF"),
    "deflated TIFF": encode("TIFF", compression="tiff_deflate"), "PPM": encode("PPM"), "GIF": encode("GIF"),
    "ASCII PPM": b"P3\n# a comment\n2 1\n100\n1 2 3 100 5 6\n", "JPEG 2000": encode("JPEG2000"), "MPO": encode("MPO"),
}  # fmt: skip


def write_image_list(folder: Path) -> Path:
    for name in "ab":
        (folder / f"{name}.jpg").write_bytes(JPEG)
    path = folder / "train.lst"
    path.write_text("".join(f"{i}\t{i % 2}\t{'ab'[i % 2]}.jpg\n" for i in range(4)))
    return path


def write_rec(folder: Path) -> Path:
    path, offset, lines = folder / "train.rec", 0, []
    with path.open("wb") as file:
        for key in range(4):
            lines.append(f"{key}\t{offset}\n")
            offset += file.write(pack_record(key % 2, JPEG, key))
    (folder / "train.idx").write_text("".join(lines))
    return path


def write_idx(folder: Path) -> Path:
    return write_rec(folder).with_suffix(".idx")


def write_class_list(folder: Path) -> Path:
    write_rec(folder)
    path = folder / "classes.txt"
    path.write_text("n01440764\ta fish\nn01443537\tanother\n")
    return path


def tar_of(members: dict[str, bytes], **options: object) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as tar:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def write_shard(folder: Path) -> Path:
    path = folder / "train.tar"
    members = {f"{'ä' * (i % 2)}{i}{end}": JPEG if end == ".jpg" else b"%d" % (i % 2)
               for i in range(3) for end in (".jpg", ".cls", ".json")}
    path.write_bytes(tar_of(members, format=tarfile.PAX_FORMAT))
    return path


def write_ilsvrc(folder: Path) -> Path:
    path = folder / "train.tar"
    path.write_bytes(tar_of({f"n0144076{i}.tar": tar_of({"1.JPEG": JPEG, "2.JPEG": JPEG}) for i in (4, 5)}))
    return path


def write_examples(folder: Path) -> Path:
    path = folder / "train.tfrecord"
    write_tfrecord(path, [example(JPEG, 1 + i % 2) for i in range(4)])
    return path


def write_cifar(folder: Path, binary: bool, protocol: int = 2) -> Path:
    rng = np.random.default_rng(0)
    for number in range(1, 6):
        images, labels = rng.integers(0, 256, (2, 3072), np.uint8), [number, 1]
        path = folder / f"data_batch_{number}"
        if binary:
            rows = [bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True)]
            path = path.with_suffix(".bin")
            path.write_bytes(b"".join(rows))
        else:
            path.write_bytes(pickle.dumps({b"data": images, b"labels": labels}, protocol=protocol))
    return path


def write_cifar_meta(folder: Path) -> Path:
    write_cifar(folder, binary=False)
    path = folder / "batches.meta"
    meta = {b"label_names": [f"class {i}".encode() for i in range(6)], b"num_cases_per_batch": 2, b"num_vis": 3072}
    path.write_bytes(pickle.dumps(meta, protocol=2))
    return path


def write_cifar100(folder: Path, name: str) -> Path:
    """Write two images with both labels, and the lists of classes; the file `name` is the one to damage."""
    images = np.random.default_rng(0).integers(0, 256, (2, 3072), np.uint8)
    if name.endswith((".bin", ".txt")):
        (folder / "train.bin").write_bytes(b"".join(bytes([3, 70]) + image.tobytes() for image in images))
        (folder / "fine_label_names.txt").write_text("".join(f"class {i}\n" for i in range(100)))
    else:
        batch = {b"data": images, b"fine_labels": [70, 1], b"coarse_labels": [3, 1]}
        names = {f"{kind}_label_names": [f"class {i}" for i in range(count)] for kind, count in
                 (("fine", 100), ("coarse", 20))}
        for file, content in (("train", batch), ("meta", names)):
            (folder / file).write_bytes(pickle.dumps(content, protocol=2))
    return folder / name


def write_labels(folder: Path) -> Path:
    path = folder / "labels.txt"
    path.write_text("ImageId,PredictionString\na,n1 1 2 3 4\nb,n2 1 2 3 4\n")
    return path


def write_words(folder: Path) -> Path:
    path = folder / "words.txt"
    path.write_text("a few words\nand a few ünusual ones\n")
    return path


def read_data(path: Path) -> None:
    """Read like a training run: places and labels of all images, their bytes, and Pillow's findings."""
    source = open_source(path.parent, "train")
    for i in range(len(source)):
        try:
            source.name(i)
            source.label(i)
            source.feed(i)
            inspect_image(source.read(i).tobytes())
        except (OSError, BrokenRecordError):
            pass  # a bad image, which is reported
    source.read_ahead(range(len(source)))


def read_image(path: Path) -> None:
    finding = inspect_image(path.read_bytes(), max_pixels=10**6)
    assert finding is None or (finding.detail and "\n" not in finding.detail)


# Functions that write the file to damage, and functions that read it.
READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "list": (write_image_list, read_data),
    "list for verify": (write_image_list, lambda path: verify_split(str(path.parent), "train", num_threads=1)),
    "list for make-records": (write_image_list, lambda path: plan_files(path.parent, "train")),
    "records": (write_rec, read_data),
    "records for verify": (write_rec, lambda path: verify_split(str(path.parent), "train", num_threads=1)),
    "index": (write_idx, read_data),
    "list of classes": (write_class_list, read_data),
    "WebDataset": (write_shard, read_data),
    "ILSVRC": (write_ilsvrc, lambda path: plan_train_tar(path, [])),
    "TFRecord": (write_examples, read_data),
    "CIFAR-10 pickle": (lambda folder: write_cifar(folder, binary=False), read_data),
    "CIFAR-10 pickle of protocol 5": (lambda folder: write_cifar(folder, binary=False, protocol=5), read_data),
    "CIFAR-10 binary": (lambda folder: write_cifar(folder, binary=True), read_data),
    "batches.meta": (write_cifar_meta, read_data),
    **{f"CIFAR-100 {name}": (partial(write_cifar100, name=name), read_data)
       for name in ("train", "meta", "train.bin", "fine_label_names.txt")},
    "labels of ILSVRC": (write_labels, lambda path: read_labels(path, ["a", "b"], [("n1", "x"), ("n2", "y")])),
    "text": (write_words, read_words),
    "list to predict": (write_words, lambda path: image_paths([path])),
}


def write_photo(folder: Path) -> Path:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    (folder / "b/1.jpg").write_bytes(JPEG)
    path = folder / "a/1.jpg"
    exif = Image.Exif()
    exif[0x112] = 6
    path.write_bytes(encode("JPEG", exif=exif))
    return path


def shrink(path: Path) -> None:
    """Shrink images like make-records --resize."""
    for entry in plan_files(path.parents[1], "train").entries:
        make_records._read(entry, Options(resize=4))


READERS["photograph to be shrunk"] = (write_photo, shrink)


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """The content with one to three small damages, each at a random place."""
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(len(content) + 1))
        if rng.random() < 0.5:  # most formats begin with their type
            place = int(place * rng.random() ** 3)
        size = int(rng.choice((1, 2, 4, 8, 64, 512)))
        before, after = content[:place], content[place + size :]
        match int(rng.integers(8)):
            case 0:
                content = before
            case 1:
                content = before + bytes(size) + after
            case 2:
                content = before + rng.bytes(size) + after
            case 3:
                content = before + after
            case 4:
                content = before + content[place : place + size] + content[place:]
            case 5:
                number = int(rng.choice(NUMBERS))
                packed = struct.pack(str(rng.choice(("<I", ">I"))), number)
                content = before + packed + content[place + 4 :]
            case 6:
                content = before + rng.bytes(size) + content[place:]
            case _:
                flipped = bytes([content[place] ^ 1 << int(rng.integers(8))]) if place < len(content) else b"\xff"
                content = before + flipped + content[place + 1 :]
    return content


def try_mutations(name: str, folder: Path, rng: np.random.Generator, count: int) -> None:
    write, read = READERS[name]
    count = -(-count // 10) if "verify" in name else count  # verify starts a decoder each time
    path = write(folder)
    whole = path.read_bytes()
    read(path)
    for number in range(count):
        content = damaged(whole, rng)
        path.unlink(missing_ok=True)  # a shard's cached index depends on the file's time, too
        path.write_bytes(content)
        try:
            read(path)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, str(error)
        except Exception as error:
            kept = folder.parent / f"{number}{path.suffix}"
            kept.write_bytes(content)
            raise AssertionError(f"{name}: {type(error).__name__} of {kept}") from error


for kind, content in IMAGES.items():
    def write_one(folder: Path, content: bytes = content) -> Path:
        path = folder / "image"
        path.write_bytes(content)
        return path

    READERS[kind] = (write_one, read_image)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_gets_a_sentence(folder: Path, rng: np.random.Generator, name: str) -> None:
    try_mutations(name, folder, rng, FEW)


@tries()
@pytest.mark.parametrize("name", READERS)
def test_many_damages(folder: Path, rng: np.random.Generator, name: str, number: int) -> None:
    """Content of a file of data changed at random places."""
    try_mutations(name, folder, rng, -(-MUTATIONS // len(READERS) // max(TRIES, 1)))
