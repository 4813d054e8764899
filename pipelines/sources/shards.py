"""Base of the sources that read shards: large files that hold many images each (WebDataset's tar files, TFRecord).

When a data set is first opened, its shards are scanned once for an index of (file, offset, size, label), which is kept
on disk. From then on each image is a byte range of a mapped file, as in RecordIO. So any batch of any epoch can be put
together directly, and the shuffle covers all images. DALI's own readers of these formats only shuffle within a buffer,
and their position cannot be set.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import resource
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.disk_cache import Cache
from pipelines.errors import DataError
from pipelines.files import MappedFile, open_file
from pipelines.progress import map_in_order
from pipelines.sources.base import Source, place_of, read_classes
from pipelines.sources.folders import class_folders, some
from pipelines.sources.split_names import SPLITS, by_split, splits_in

_DIGEST_BYTES = 16  # size of an index's digest
# the digest covers this many images per shard, and this many bytes before and after each image
_NUM_DIGESTED, _AROUND = 16, 4096


class Entry(NamedTuple):
    """One image of a shard."""

    offset: int  # byte of the shard at which the encoded image begins
    size: int  # bytes
    label: int
    begin: int = 0  # byte of the shard at which the image's first header begins
    kind: int = 0  # how the label is written, if the format has several ways


class ShardSource(Source):
    """The images of some shards; each format defines `scan` and `name`."""

    feeds = "bytes"
    INDEX_VERSION = 3  # must be raised when the results of `scan` change

    def __init__(self, files: list[Path], num_classes: int | None = None) -> None:
        self.path = place_of(files)
        self.files = files
        self._file, self._offset, self._size, self._label, self._begin, self._kind = self._index()
        _allow_open_files(len(files))
        self._maps = [MappedFile(file) for file in files]
        self.classes = read_classes(files[0].parent)
        self._label = self.count_from_zero(self._label)
        if not self.classes:
            count = max(num_classes or 1, 1 + int(self._label.max()))
            self.classes = [(str(label), str(label)) for label in range(count)]
        self.remarks = [*self.remarks, *self._copies()]

    @staticmethod
    @abstractmethod
    def scan(file: Path) -> list[Entry]:
        """Find the images of one shard, in its order; raises DataError."""

    def count_from_zero(self, labels: np.ndarray) -> np.ndarray:
        """Convert the labels that `scan` found to class numbers from 0 on."""
        return labels

    def __len__(self) -> int:
        return len(self._offset)

    def label(self, i: int) -> int:
        label = int(self._label[i])
        if label >= len(self.classes):
            raise DataError(
                f"{self.name(i)}: label {label} is outside the {len(self.classes)} classes (0 to "
                f"{len(self.classes) - 1}); check classes.txt"
            )
        return label

    def feed(self, i: int) -> np.ndarray:
        return self._bytes(i)

    def _bytes(self, i: int) -> np.ndarray:
        return self._maps[self._file[i]].stretch(int(self._offset[i]), int(self._size[i]))

    def read(self, i: int) -> np.ndarray:
        return self.feed(i)

    def check(self, indices: Iterable[int]) -> None:
        for number in {int(self._file[i]) for i in indices}:
            self._maps[number].check()

    def read_ahead(self, indices: Iterable[int]) -> None:
        for i in indices:
            self._maps[self._file[i]].read_ahead(int(self._offset[i]), int(self._size[i]))

    def location(self, i: int) -> tuple[Path, int, int]:
        """File, offset and size of image `i`, in bytes."""
        return self.files[self._file[i]], int(self._offset[i]), int(self._size[i])

    def _copies(self) -> list[str]:
        """Remarks about shards that hold the images of another shard, such as a copy `train-0 (1).tar`."""
        remarks, first_with = [], dict[bytes, int]()
        ends = np.searchsorted(self._file, range(len(self.files) + 1)).tolist()
        for number, (begin, end) in enumerate(itertools.pairwise(ends)):
            columns = np.stack([column[begin:end] for column in (self._offset, self._size, self._label)])
            first = first_with.setdefault(hashlib.blake2b(columns.tobytes()).digest(), number)
            if first == number or begin == end:
                continue
            some_of = (begin, (begin + end) // 2, end - 1)
            if all(np.array_equal(self._bytes(ends[first] + i - begin), self._bytes(i)) for i in some_of):
                remarks.append(f"{self.files[number]}: has the same images as {self.files[first].name}, which come "
                               "twice (remove one of them)")
        return remarks

    def _index(self) -> tuple[np.ndarray, ...]:
        """The index, from the cache or by a scan: for each image, the number of its file and the fields of Entry.

        Shape (1 + fields, images), int64.
        """
        key = self._key()
        cache = Cache("indexes of shards")
        if saved := cache.read(key):
            index = np.load(io.BytesIO(saved[_DIGEST_BYTES:]))
            if saved[:_DIGEST_BYTES] == self._digest(index):
                return tuple(index)
        title = f"indexing {self.path.name}"
        shards = list(map_in_order(self.scan, self.files, len(self.files), title, unit="shards", transient=True))
        rows = [(number, *entry) for number, entries in enumerate(shards) for entry in entries]
        if not rows:
            raise DataError(f"{self.path}: the {len(self.files)} shards hold no image; write them anew")
        index = np.array(rows, np.int64).T
        buffer = io.BytesIO()
        np.save(buffer, index)
        cache.write(key, self._digest(index) + buffer.getvalue())
        return tuple(index)

    def _key(self) -> str:
        """The key of the index in the cache: a hash of the files' paths, sizes, times and inodes."""
        stats = [file.stat() for file in self.files]
        identity = [type(self).__name__, self.INDEX_VERSION] + [
            [str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            for file, stat in zip(self.files, stats, strict=True)
        ]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def _digest(self, index: np.ndarray) -> bytes:
        """A digest of the headers and labels around some images of each shard.

        It detects a shard that was rewritten with unchanged size and times, for which the file system shows no
        difference.
        """
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        numbers, offsets, sizes = index[:3]
        ends = np.searchsorted(numbers, range(len(self.files) + 1)).tolist()
        for file, begin, end in zip(self.files, ends, ends[1:], strict=False):
            with open_file(file) as opened:
                for i in range(begin, end, -(-(end - begin) // _NUM_DIGESTED) or 1):
                    for place in (offsets[i] - _AROUND, offsets[i] + sizes[i]):
                        digest.update(os.pread(opened.fileno(), _AROUND, max(0, int(place))))
        return digest.digest()


def find(is_shard: Callable[[Path], bool]) -> Callable[[Path, str], list[Path]]:
    """A function that finds the shards of a split at a data path, sorted by name.

    The shards are PATH itself; or all shards in the split's folder; or the shards in PATH with the split in their
    names; or all shards in PATH if no name contains a split. The function raises DataError for a name that contains
    several splits, and if several folders have shards of one split.
    """

    def find_shards(path: Path, split: str) -> list[Path]:
        if path.is_file():
            return [path] if is_shard(path) else []
        folders = {name: those for name, those in _folders(path).items() if those[0].name in SPLITS or _hold(those)}
        if twice := [those for those in folders.values() if len(those) > 1]:
            raise DataError(f"{path}: {some([folder.name for folder in twice[0]])} are several folders of shards for "
                            f"one split; move all shards of the split into {path / 'train'} or {path / 'val'}")
        if folders:
            return _all(folders[split][0]) if split in folders else []
        shards = _all(path)
        named = {name: [file for file in shards if name in splits_in(file.name)] for name in SPLITS}
        if both := sorted(set.intersection(*map(set, named.values()))):
            raise DataError(f"{both[0]}: its name holds the words of several splits ({', '.join(SPLITS)}), so it "
                            f"would be in each of them; move the shards into {path / 'train'} and {path / 'val'}")
        return named[split] if any(named.values()) else shards

    def _folders(path: Path) -> dict[str, list[Path]]:
        names = class_folders(path) if path.is_dir() else []
        return {split: [path / name for name in those] for split, those in by_split(names).items()}

    def _hold(folders: list[Path]) -> bool:
        return any(map(_all, folders))

    def _all(folder: Path) -> list[Path]:
        return sorted(file for file in folder.iterdir() if is_shard(file)) if folder.is_dir() else []

    return find_shards


def check_complete(files: list[Path]) -> None:
    """Raise DataError if shards are missing, by names such as train-00001-of-00003 or train-00001-of-00003.tar."""
    there: dict[tuple[str, str, str], set[str]] = defaultdict(set)  # (before, after, count) -> numbers in names
    for file in files:
        if match := re.fullmatch(r"(.*-)(\d{5})(-of-(\d{5}).*)", file.name):
            before, number, after, count = match.groups()
            there[before, after, count].add(number)
    for (before, after, count), numbers in there.items():
        first = int(count in numbers)  # some data sets number their shards from 1
        wanted = (f"{number:05}" for number in range(first, first + int(count)))
        if missing := [f"{before}{number}{after}" for number in wanted if number not in numbers]:
            raise DataError(f"{files[0].parent}: {some(missing)} should be there by the numbers in the names of the "
                            "other shards; add the missing ones, or rename the others")


def shard_name(file: Path) -> str:
    """A shard's name without the total number of shards, which changes when shards are added."""
    return re.sub(r"-of-\d{5}", "", file.name)


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files if the limit is too low for `count` shards; the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        if most < count + 64:
            raise DataError(f"{count} shards are more than the {most} files that a process may open here; raise "
                            "`ulimit -n`, or convert them with `python -m pipelines make-records`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
