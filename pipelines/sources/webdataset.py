"""Source for WebDataset shards: tar files with each image and its label side by side.

A sample consists of the members whose names are equal up to the first dot: `n01440764_18.jpg` holds the image,
`n01440764_18.cls` the class number as text. Members whose names are equal up to the last dot form a sample, too,
because file names may contain dots (`photo.1.jpg`, `photo.1.cls`). Other members of a sample (such as .json) are
ignored. Other images (.mask.png) and members that belong to no sample are left out, and a remark says how many. Source:
https://github.com/webdataset/webdataset, 'The WebDataset Format'.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import tarfile
from collections import defaultdict
from collections.abc import Set
from pathlib import Path

import numpy as np

from pipelines.errors import DataError
from pipelines.files import open_file, understood
from pipelines.sources.base import IMAGE_SUFFIXES, check_label
from pipelines.sources.shards import Entry, ShardSource, shard_name
from pipelines.sources.system_files import is_system

_BLOCK = 512  # bytes, the unit of a tar file
_PIECE = 1 << 20  # bytes per read
_BESIDE = -1  # in the index, the label of a member that belongs to no sample
_COMPRESSED = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst")
_COMPRESSIONS = {rb"\x1f\x8b": "gzip", rb"BZh[1-9]1AY&SY": "bzip2", rb"\xfd7zXZ\0": "xz", rb"\(\xb5/\xfd": "zstd"}


class TarSource(ShardSource):
    """Images in tar shards."""

    INDEX_VERSION = 4

    @staticmethod
    def scan(file: Path) -> list[Entry]:
        try:
            check_not_compressed(file)
            with (understood(file, "is truncated or not a tar file", "download it again"),
                  tarfile.open(file, "r:") as tar):
                return _entries(tar, file)
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}); check the disk and permissions") from None

    def _index(self) -> tuple[np.ndarray, ...]:
        index = super()._index()
        file, offset, _, label, begin, _ = index
        is_beside = label == _BESIDE
        if number := int(is_beside.sum()):
            first = int(is_beside.argmax())
            shard = self.files[file[first]]
            with open_file(shard) as opened:
                opened.seek(int(begin[first]))
                name = f"{shard}/{_name_in(opened.read(int(offset[first] - begin[first])))}"
            those = f"files are left out, {name} and others" if number > 1 else f"file is left out: {name}"
            self.remarks = [f"{self.path}: beside the samples' images and labels {number:,} {those}"]
        if is_beside.all():
            raise DataError(f"{self.path}: the shards hold no image with a label in .cls; write them anew")
        return tuple(column[~is_beside] for column in index)

    def name(self, i: int) -> str:
        return f"{self.files[self._file[i]]}/{self._member(i)}"

    def identity(self, i: int, fully: bool = False) -> str:
        shard = shard_name(self.files[self._file[i]])
        return f"{shard}/{self._member(i)}" if fully else self._member(i)

    def group(self, i: int) -> str:
        return self._member(i).rpartition("/")[0]

    def _member(self, i: int) -> str:
        """The member's name in the tar file; a long name takes additional headers."""
        begin, end = int(self._begin[i]), int(self._offset[i])
        return _name_in(self._maps[self._file[i]].stretch(begin, end - begin).tobytes()) or f"image at byte {end}"


def is_tar(path: Path) -> bool:
    return path.name.lower().endswith((".tar", *_COMPRESSED))


def _name_in(headers: bytes) -> str:
    """The name of the member that begins with these headers; "" if these bytes are not headers, for example in a shard
    that was cut off later.
    """
    try:
        if len(headers) == _BLOCK:
            return tarfile.TarInfo.frombuf(headers, "utf-8", "surrogateescape").name
        with tarfile.open(fileobj=io.BytesIO(headers), mode="r:", encoding="utf-8") as tar:
            member = tar.next()
    except tarfile.TarError:
        return ""
    return member.name if member else ""


def _split(name: str) -> tuple[str, str]:
    """Split a member's name into the part before its last dot, and its suffix in lower case."""
    folder, _, name = name.rpartition("/")
    stem, _, ending = name.rpartition(".") if "." in name else (name, "", "")
    return f"{folder}/{stem}", ending.lower()


def _is_of(key: str, samples: Set[str]) -> bool:
    """Whether a member belongs to a sample: the member's key, perhaps without some of its last suffixes, is the key of
    a sample.

    For WebDataset, everything after a name's first dot is the suffix.
    """
    while key not in samples and "." in key.rpartition("/")[2]:
        key = key.rpartition(".")[0]
    return key in samples


def _is_of_a_system(name: str) -> bool:
    return name.rpartition("/")[2].startswith(".") or any(map(is_system, name.split("/")))


def _entries(tar: tarfile.TarFile, file: Path) -> list[Entry]:
    """The samples of a shard, followed by the members that belong to no sample, with the label _BESIDE."""
    images, labels, others = (defaultdict[str, list[tarfile.TarInfo]](list) for _ in range(3))
    beside: list[tarfile.TarInfo] = []
    for member in tar:
        key, ending = _split(member.name)
        if ending == "tar" and member.isfile():
            raise DataError(f"{file}: holds tar files, as ILSVRC2012_img_train.tar does, and no images; "
                            "convert it with `python -m pipelines make-records`")
        if not member.isfile() or _is_of_a_system(member.name):
            beside += [] if member.isdir() else [member]
        else:
            kind = labels if ending == "cls" else images if f".{ending}" in IMAGE_SUFFIXES else others
            kind[key].append(member)
    check_end(file, tar.offset)
    samples = images.keys() & labels.keys()
    for found, kinds, what in ((images, "images", "an image but no .cls with its label"),
                               (labels, "labels", "a label but no image")):
        if alone := next((key for key in found if not _is_of(key, samples)), None):
            raise DataError(f"{file}: sample {alone.lstrip('/')} has {what}; write the shard anew")
        if twice := next((key for key in found if len(found[key]) > 1 and key in samples), None):
            raise DataError(f"{file}: sample {twice.lstrip('/')} has two {kinds}; write the shard anew, with a "
                            "different name for each sample")
    beside += itertools.chain.from_iterable(found for key, found in images.items() if key not in samples)
    beside += itertools.chain.from_iterable(found for key, found in others.items() if not _is_of(key, samples))
    return [*(Entry(images[key][0].offset_data, images[key][0].size, _parse_label(tar, labels[key][0], file),
                    images[key][0].offset) for key in images if key in samples),
            *(Entry(member.offset_data, 0, _BESIDE, member.offset) for member in beside)]


def _parse_label(tar: tarfile.TarFile, member: tarfile.TarInfo, file: Path) -> int:
    content = tar.extractfile(member)
    text = content.read(32) if content else b""
    if not text.strip().isdigit():
        raise DataError(f"{file}/{member.name}: holds {text[:16]!r}, not a class number; write the shard anew")
    check_label(int(text), f"{file}/{member.name}")
    return int(text)


def check_not_compressed(file: Path) -> None:
    """Raise DataError for a compressed tar file, even if its name does not show the compression. Raises OSError if the
    file cannot be read.
    """
    with open_file(file) as opened:
        beginning = opened.read(16)
    for magic, name in _COMPRESSIONS.items():
        if re.match(magic, beginning):
            raise DataError(f"{file}: is compressed with {name}, but images must be read from its middle; unpack it")


def check_end(file: Path, offset: int, end: int | None = None) -> None:
    """Raise ReadError unless tarfile has read the whole tar file.

    From byte `offset`, where tarfile stopped, to byte `end` (default: the end of the file) there must be only zeros,
    and at least one block of zeros. tarfile takes the first block of zeros for the end. But this block may be a damaged
    header, or the end of the first of several tar files joined with cat. tarfile also stops silently at a header that
    it does not understand.
    """
    with file.open("rb") as opened:
        left = (os.fstat(opened.fileno()).st_size if end is None else end) - offset
        opened.seek(offset)
        if left < _BLOCK:
            raise tarfile.ReadError("it has no end mark, so it may be cut off")
        if opened.read(_BLOCK).strip(b"\0"):
            raise tarfile.ReadError(f"there is no header of a file at byte {offset}")
        for start in range(_BLOCK, left, _PIECE):
            if opened.read(min(_PIECE, left - start)).strip(b"\0"):
                raise tarfile.ReadError(f"it goes on after its end mark at byte {offset}: either a block there is "
                                        "damaged, or several tar files were joined with cat instead of tar -A")
