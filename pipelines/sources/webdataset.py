"""WebDataset shards as a source: tar files with an image and its label side by side.

A sample is the members that share a name up to its first dot: `n01440764_18.jpg` with the image, `n01440764_18.cls`
with the class number as text. Other members (.json and the like) are passed over.
Source: https://github.com/webdataset/webdataset, 'The WebDataset Format'.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Container
from pathlib import Path

from pipelines.errors import DataError
from pipelines.files import open_file
from pipelines.sources.base import IMAGE_SUFFIXES, check_label
from pipelines.sources.shards import Entry, ShardSource, shard_name

_BLOCK = 512  # bytes, the unit of a tar file
_COMPRESSED = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst")
_COMPRESSIONS = {rb"\x1f\x8b": "gzip", rb"BZh[1-9]1AY&SY": "bzip2", rb"\xfd7zXZ\0": "xz", rb"\(\xb5/\xfd": "zstd"}


class TarSource(ShardSource):
    """Images in tar shards."""

    @staticmethod
    def scan(file: Path) -> list[Entry]:
        images: dict[str, tuple[int, int, int]] = {}  # offset, size, begin of the headers
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
                        images[key] = member.offset_data, member.size, member.offset
                check_end(file, tar.offset)
        except tarfile.TarError as error:
            raise DataError(f"{file}: is truncated or no tar file ({error}); download it again") from None
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}); check the disk and permissions") from None
        missing = ((images, labels, "an image but no .cls with its label"), (labels, images, "a label but no image"))
        for some, others, what in missing:
            if alone := next((key for key in some if key not in others), None):
                raise DataError(f"{file}: sample {alone.lstrip('/')} has {what}; write the shard anew")
        return [Entry(offset, size, labels[key], begin) for key, (offset, size, begin) in images.items()]

    def name(self, i: int) -> str:
        return f"{self.files[self._file[i]]}/{self._member(i)}"

    def identity(self, i: int, fully: bool = False) -> str:
        shard = shard_name(self.files[self._file[i]])
        return f"{shard}/{self._member(i)}" if fully else self._member(i)

    def group(self, i: int) -> str:
        return self._member(i).rpartition("/")[0]

    def _member(self, i: int) -> str:
        """The name in the tar file, of any length: it may stand in headers of its own."""
        begin, end = int(self._begin[i]), int(self._offset[i])
        headers = self._maps[self._file[i]].stretch(begin, end - begin).tobytes()
        try:
            if len(headers) == _BLOCK:
                return tarfile.TarInfo.frombuf(headers, "utf-8", "surrogateescape").name
            with tarfile.open(fileobj=io.BytesIO(headers), mode="r:", encoding="utf-8") as tar:
                member = tar.next()
        except tarfile.TarError:  # the shard has become shorter
            member = None
        return member.name if member else f"image at byte {end}"


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


def check_end(file: Path, offset: int) -> None:
    """Raise ReadError for a tar file that does not end at `offset`, where tarfile stopped to read: the end is zeros, or
    that of the file, and tarfile takes a header that is cut off for it."""
    with file.open("rb") as opened:
        opened.seek(offset)
        if opened.read(_BLOCK).strip(b"\0"):
            raise tarfile.ReadError("it ends in the middle of a header")
