"""WebDataset shards as a source: tar files with an image and its label side by side.

A sample is the members that share a name up to its first dot: `n01440764_18.jpg` with the image, `n01440764_18.cls`
with the class number as text. Other members (.json and the like) are passed over.
Source: https://github.com/webdataset/webdataset, 'The WebDataset Format'.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Container
from pathlib import Path

from pipelines.errors import DataError
from pipelines.files import open_file
from pipelines.sources.base import IMAGE_SUFFIXES, check_label
from pipelines.sources.shards import Entry, ShardSource

_BLOCK = 512  # bytes, the unit of a tar file
_PIECE = 1 << 20  # bytes that are read at once
_COMPRESSED = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst")
_COMPRESSIONS = {rb"\x1f\x8b": "gzip", rb"BZh[1-9]1AY&SY": "bzip2", rb"\xfd7zXZ\0": "xz", rb"\(\xb5/\xfd": "zstd"}


class TarSource(ShardSource):
    """Images in tar shards."""

    INDEX_VERSION = 3

    @staticmethod
    def scan(file: Path) -> list[Entry]:
        images: dict[str, tuple[int, int]] = {}
        labels: dict[str, int] = {}
        try:
            check_not_compressed(file)
            with tarfile.open(file, "r:") as tar:
                for member in tar:
                    if not member.isfile():
                        continue
                    folder, _, name = member.name.rpartition("/")
                    stem, _, ending = name.partition(".")
                    key = f"{folder}/{stem}"
                    if ending == "tar":
                        raise DataError(f"{file}: holds tar files, as ILSVRC2012_img_train.tar does, no images; "
                                        "convert it with `python -m pipelines make-records`")
                    if ending == "cls":
                        _check_new(key, labels, "labels", file)
                        labels[key] = _parse_label(tar, member, file)
                    elif f".{ending.lower()}" in IMAGE_SUFFIXES:
                        _check_new(key, images, "images", file)
                        images[key] = member.offset_data, member.size
                check_end(file, tar.offset)
        except tarfile.TarError as error:
            raise DataError(f"{file}: is truncated or no tar file ({error}); download it again") from None
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}); check the disk and permissions") from None
        missing = ((images, labels, "an image but no .cls with its label"), (labels, images, "a label but no image"))
        for some, others, what in missing:
            if alone := next((key for key in some if key not in others), None):
                raise DataError(f"{file}: sample {alone.lstrip('/')} has {what}; write the shard anew")
        return [Entry(*place, labels[key]) for key, place in images.items()]

    def describe(self, file: Path, offset: int) -> str:
        with file.open("rb") as opened:
            opened.seek(offset - _BLOCK)  # a member's header, which begins with its name, is the block before its bytes
            name = opened.read(100).rstrip(b"\0")
        return f"{file}/{name.decode(errors='replace')}"


def is_tar(path: Path) -> bool:
    return path.suffix == ".tar" or path.name.endswith(_COMPRESSED)


def _check_new(key: str, found: Container[str], what: str, file: Path) -> None:
    """Raise DataError for a sample of which this has been found already."""
    if key in found:
        raise DataError(f"{file}: sample {key.lstrip('/')} has two {what}; write the shard anew, with a name of its "
                        "own for each sample")


def _parse_label(tar: tarfile.TarFile, member: tarfile.TarInfo, file: Path) -> int:
    content = tar.extractfile(member)
    text = content.read(32) if content else b""
    if not text.strip().isdigit():
        raise DataError(f"{file}/{member.name}: holds {text[:16]!r}, not a class number; write the shard anew")
    check_label(int(text), f"{file}/{member.name}")
    return int(text)


def check_not_compressed(file: Path) -> None:
    """Raise DataError for a compressed tar file, whatever its name is. Raises OSError."""
    with open_file(file) as opened:
        beginning = opened.read(16)
    for magic, name in _COMPRESSIONS.items():
        if re.match(magic, beginning):
            raise DataError(f"{file}: is compressed with {name}, and images are read from the middle of it; unpack it")


def check_end(file: Path, offset: int, end: int | None = None) -> None:
    """Raise ReadError unless only zeros, one block at least, lie between byte `offset`, where tarfile stopped to read,
    and the end of the tar file: byte `end`, or that of the whole file.

    tarfile takes the first block of zeros for the end, though it may be a damaged header, or the end of the first of
    several tar files joined with cat; and it ends without a word at a header that it does not understand."""
    with file.open("rb") as opened:
        left = (os.fstat(opened.fileno()).st_size if end is None else end) - offset
        opened.seek(offset)
        if left < _BLOCK:
            raise tarfile.ReadError("it has no end mark, as one that is cut off")
        if opened.read(_BLOCK).strip(b"\0"):
            raise tarfile.ReadError(f"there is no header of a file at byte {offset}")
        for start in range(_BLOCK, left, _PIECE):
            if opened.read(min(_PIECE, left - start)).strip(b"\0"):
                raise tarfile.ReadError(f"it goes on behind its end mark at byte {offset}, as one with a damaged block "
                                        "there, or several that are joined with cat and not with tar -A")
