"""Write RecordIO from the ILSVRC2012 tar files as they are downloaded, from class folders, lists or shards.

A .rec file replaces a million small files, and is read in long stretches. Images are copied unchanged unless `resize`
asks for smaller ones. They are written in a fixed random order, so that readers that only shuffle within a window (such
as MXNet's ImageRecordIter) see all classes mixed.

The work can be interrupted at any time: a journal beside the unfinished file records how far the file is complete, and
the same command resumes there. The finished file appears under its name in one step.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from common.files import lock
from pipelines.errors import DataError, check_not_negative, check_positive
from pipelines.files import lines_of, link_beside, open_file, read_file, read_lines, understood, write_text
from pipelines.inspect_image import inspect_image
from pipelines.progress import map_in_order
from pipelines.recordio import BrokenRecordError, index_path, pack_record
from pipelines.sources import Chosen, Classes, FileSource, ShardSource, open_source
from pipelines.sources.base import nfc, parse_classes
from pipelines.sources.folders import some
from pipelines.sources.webdataset import check_end, check_not_compressed
from pipelines.transform import MAX_PIXELS

_COMMIT_EVERY = 1024  # images between two entries in the journal


class Entry(NamedTuple):
    """One image to be written: a byte range of a tar file or shard, or a whole image file."""

    label: int
    file: Path
    offset: int  # bytes
    size: int  # bytes
    name: str  # name for messages


class Plan(NamedTuple):
    """The content of one .rec file, before the shuffle."""

    entries: list[Entry]
    classes: Classes
    remarks: Sequence[str] = ()  # sentences about data that are left out


def plan_files(path: Path, split: str, **reading: Any) -> Plan:
    """Plan all images of one split of class folders, a list or shards; `reading` is passed to `open_source`."""
    source = open_source(path, split, **reading)
    source, chosen = (source.source, source.indices) if isinstance(source, Chosen) else (source, range(len(source)))
    if not isinstance(source, FileSource | ShardSource):
        raise DataError(
            f"{source.path}: RecordIO files and CIFAR's own files need no conversion; give class folders, a .lst file, "
            "shards or a tar file, or train on this data as it is"
        )
    try:
        entries = [Entry(source.label(i), *source.location(i), source.name(i)) for i in chosen]
    except BrokenRecordError as error:
        raise DataError(f"{source.path}: has a damaged record: {error}; list all such records with `python -m "
                        "pipelines verify`, and replace them") from None
    return Plan(entries, source.classes, source.remarks)


def with_classes(plan: Plan, known: Classes, where: str) -> Plan:
    """Renumber a plan's labels by the classes of the training images. The plan may lack some of these classes.

    Raises DataError if the plan has images of a class that training does not have.
    """
    number = {nfc(key): label for label, (key, _) in enumerate(known)}
    _check_numbers(plan.classes, known, where)
    labels = [number.get(nfc(key), -1) for key, _ in plan.classes]
    if lost := sorted({plan.classes[entry.label][0] for entry in plan.entries if labels[entry.label] < 0}):
        raise DataError(f"{where} has images of classes without training images: {some(lost)}; remove them, or add "
                        "training images of these classes")
    return plan._replace(entries=[entry._replace(label=labels[entry.label]) for entry in plan.entries], classes=known)


def _check_numbers(found: Classes, known: Classes, where: str) -> None:
    """Raise DataError if one split has class numbers, and the other has folders of numbers that may count from 1."""
    keys = [[key for key, _ in classes] for classes in (found, known)]
    unnamed = [texts == list(map(str, range(len(texts)))) for texts in keys]
    named = keys[unnamed[0]]
    if unnamed[0] != unnamed[1] and all(map(str.isdecimal, named)) and 0 not in map(int, named):
        raise DataError(f"{where}: the classes of one split are numbered from 0, but the names in the other split, "
                        f"{some(named)}, may count from 0 or from 1: write a classes.txt beside the images of both "
                        "splits, or convert each split into a folder of its own")


def plan_train_tar(path: Path, classes: Classes) -> Plan:
    """Plan ILSVRC2012_img_train.tar, which holds one tar file for each synset: n01440764.tar and so on."""
    entries: list[Entry] = []
    with _open_tar(path) as outer:
        members = sorted((member for member in outer if member.name.endswith(".tar")), key=lambda member: member.name)
        check_end(path, outer.offset)
        classes = classes or [(Path(member.name).stem, Path(member.name).stem) for member in members]
        number = {key: label for label, (key, _) in enumerate(classes)}
        for member in members:
            synset = Path(member.name).stem
            if synset not in number:
                raise DataError(
                    f"{path}: synset {synset} is not among the {len(classes)} classes of the list; give a complete "
                    f"list with --classes"
                )
            entries += _inner_tar(path, outer, member, number[synset])
    return Plan(entries, classes)


def _inner_tar(path: Path, outer: tarfile.TarFile, member: tarfile.TarInfo, label: int) -> list[Entry]:
    """The images in one synset's tar file, which lies inside the outer tar file. Raises ReadError."""
    start = member.offset_data
    try:
        with tarfile.open(fileobj=outer.extractfile(member), mode="r:") as inner:
            entries = list(_members(path, inner, start, {"": label}, f"{path}/{member.name}"))
            check_end(path, start + inner.offset, start + member.size)
            return entries
    except tarfile.TarError as error:
        raise tarfile.ReadError(f"in its member {member.name}, which begins at byte {start}: {error}") from None


def plan_val_tar(path: Path, labels: Path | None, classes: Classes) -> Plan:
    """Plan ILSVRC2012_img_val.tar, whose labels come from a second file."""
    if labels is None:
        raise DataError(f"{path}: the validation tar contains no labels; give a file of labels with --labels")
    if not classes:
        raise DataError(
            f"{path}: the order of the classes is not known; convert the training set into the same folder first, or "
            f"give a list of synsets with --classes"
        )
    with _open_tar(path) as tar:
        names = sorted(member.name for member in tar if member.isfile())
        check_end(path, tar.offset)
        label_of = read_labels(labels, names, classes)
        return Plan(list(_members(path, tar, 0, label_of, str(path))), classes)


@contextlib.contextmanager
def _open_tar(path: Path) -> Iterator[tarfile.TarFile]:
    """Open an uncompressed tar file. Raises DataError, also inside the block if the file turns out to be truncated."""
    try:
        check_not_compressed(path)
        with understood(path, "not a tar file that can be read", "download it again"), tarfile.open(path, "r:") as tar:
            yield tar
    except OSError as error:
        raise DataError(f"{path}: not a tar file that can be read ({error}); download it again") from None


def _members(file: Path, tar: tarfile.TarFile, start: int, label_of: dict[str, int], where: str) -> Iterator[Entry]:
    """Yield the files of an uncompressed tar that begins at byte `start` of `file`.

    `label_of` maps a file's stem to its label; its key "" holds the label of all other files.
    """
    for member in tar:
        if member.isfile():
            label = label_of.get(Path(member.name).stem, label_of.get("", -1))
            yield Entry(label, file, start + member.offset_data, member.size, f"{where}/{member.name}")


def read_labels(path: Path, names: list[str], classes: Classes) -> dict[str, int]:
    """Read the labels of the validation images, keyed by file name without its suffix.

    There are three forms of lines: `n01751748`, one for each image in the order of their names;
    `ILSVRC2012_val_00000001.JPEG 65`; or `ILSVRC2012_val_00000001,n01751748 ...` after a header (Kaggle's
    LOC_val_solution.csv).
    """
    number = {key: label for label, (key, _) in enumerate(classes)}
    lines = [line.replace(",", " ").split() for line in read_lines(path) if line.strip()]
    lines = [fields for fields in lines if fields[0] != "ImageId"]
    if all(len(fields) == 1 for fields in lines):
        if lines and lines[0][0].isdigit():
            raise DataError(
                f"{path}: bare numbers are ILSVRC2012 ids, which are not in the order of the synsets; give a synset "
                f"(n01751748) on each line, or a file name and a label"
            )
        if len(lines) != len(names):
            raise DataError(f"{path}: has {len(lines)} labels for {len(names)} images; give the file for these images")
        lines = [[name, *fields] for name, fields in zip(names, lines, strict=True)]
    label_of: dict[str, int] = {}
    for fields in lines:
        if len(fields) < 2:
            raise DataError(f"{path}: {fields[0]!r} has no label in its line, as the other lines do; add its label")
        value = fields[1]
        label = int(value) if value.isdigit() else number.get(value, -1)
        if not 0 <= label < len(classes):
            raise DataError(f"{path}: label {value} of {fields[0]} is outside the {len(classes)} classes; correct it")
        if label_of.setdefault(Path(fields[0]).stem, label) != label:
            raise DataError(f"{path}: {fields[0]} is in two lines, with the labels "
                            f"{label_of[Path(fields[0]).stem]} and {label}; correct it")
    missing = [name for name in names if Path(name).stem not in label_of]
    if missing:
        raise DataError(f"{path}: has no label for {missing[0]} and {len(missing) - 1} others; give a complete file")
    return label_of


@dataclass(frozen=True)
class Options:
    """How images are written; raises DataError for an invalid value."""

    resize: int = 0  # a longer shorter side is shrunk to this many pixels; 0: images are copied unchanged
    quality: int = 95  # JPEG quality of resized images
    seed: int = 0  # seed of the shuffle
    num_threads: int = 0
    skip_bad: bool = False
    max_pixels: int = MAX_PIXELS  # images with more pixels count as bad

    def __post_init__(self) -> None:
        check_not_negative(resize=self.resize, seed=self.seed, num_threads=self.num_threads)
        check_positive(max_pixels=self.max_pixels)
        if not 1 <= self.quality <= 100:
            raise DataError(f"quality is {self.quality}; it goes from 1 to 100")


def new_record_path(output: Path, split: str) -> Path:
    """The .rec file that a split's images will be written to. Raises DataError if it exists."""
    path = output / f"{split}.rec"
    if path.exists():
        raise DataError(f"{path} exists; remove it or choose another output folder")
    return path


def write_records(plan: Plan, output: Path, split: str, options: Options) -> tuple[int, list[tuple[str, str]]]:
    """Write output/SPLIT.rec, SPLIT.idx and classes.txt.

    Returns the number of images, and (name, reason) of each skipped image. Raises DataError; finished records stay, and
    the next call resumes after them.
    """
    record_path = new_record_path(output, split)
    order = np.random.default_rng(options.seed).permutation(len(plan.entries))
    entries = [plan.entries[i] for i in order]
    try:
        output.mkdir(parents=True, exist_ok=True)
        _write_classes(output / "classes.txt", plan.classes)
        with _Journal(output, split, _fingerprint(entries, options)) as journal:
            skipped = _append(journal, entries, options, f"writing {record_path.name}")
            return journal.finish(record_path), skipped
    except OSError as error:
        raise DataError(
            f"{error.filename or output}: cannot be written ({error.strerror}); fix that, then resume with the same "
            "command"
        ) from None


def share_records(output: Path) -> None:
    """Link val.rec and val.idx to the training records, for data without splits, where validation uses the training
    images. Raises DataError."""
    try:
        for ending in ("idx", "rec"):
            link_beside(output / f"train.{ending}", f"val.{ending}")
    except OSError as error:
        raise DataError(
            f"{output}/val.rec: cannot be written ({error.strerror}); check permissions and space"
        ) from None


def _append(journal: _Journal, entries: list[Entry], options: Options, title: str) -> list[tuple[str, str]]:
    def encode(numbered: tuple[int, Entry]) -> tuple[int, Entry, bytes, str]:
        key, entry = numbered
        image, problem = _read(entry, options)
        return key, entry, b"" if problem else pack_record(entry.label, image, key), problem

    skipped = []
    left: Iterable[tuple[int, Entry]] = list(enumerate(entries))[journal.num_done :]
    if journal.num_done:
        title += f" (resuming after {journal.num_done:,})"
    for key, entry, record, problem in map_in_order(
        encode, left, len(entries) - journal.num_done, title, options.num_threads
    ):
        if not problem:
            journal.append(key, record)
        elif options.skip_bad:
            skipped.append((entry.name, problem))
        else:
            raise DataError(f"{entry.name}: {problem}; replace it, or leave such images out with --on-bad-image skip")
    return skipped


def _read(entry: Entry, options: Options) -> tuple[bytes, str]:
    """Read an image. Returns the bytes to be written, and the fault of the image in words ("" if it has none)."""
    try:
        with open_file(entry.file) as file:
            file.seek(entry.offset)
            image = file.read(entry.size)
    except OSError as error:
        return b"", f"cannot be read ({error.strerror})"
    if len(image) < entry.size:
        return b"", f"{entry.file} ends before it"
    finding = inspect_image(image, options.max_pixels, decode=options.resize > 0)
    if finding and not finding.usable:
        return b"", f"{finding.kind}, {finding.detail}"
    try:
        return (_shrink(image, options) if options.resize else image), ""
    except Exception as error:  # a fault in its metadata: Pillow documents no complete list of exceptions
        return b"", f"cannot be resized ({error})"


def _shrink(encoded: bytes, options: Options) -> bytes:
    """Shrink an image to a shorter side of `resize` pixels, as a JPEG; a small enough image stays unchanged."""
    with Image.open(io.BytesIO(encoded)) as image:
        scale = options.resize / min(image.size)
        if scale >= 1:
            return encoded
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        # The JPEG decoder shrinks quickly but without a good filter, so it only shrinks to twice the final size.
        image.draft("RGB", (2 * size[0], 2 * size[1]))
        buffer = io.BytesIO()
        exif = image.getexif()  # EXIF data are kept, because decoders apply the orientation in them
        # 16 bits (modes I;16 and I): Pillow itself would clip values at 255.
        eight_bits = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if image.mode.startswith("I") else image
        eight_bits.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(
            buffer, "JPEG", quality=options.quality, exif=exif
        )
        return buffer.getvalue()


def journal_path(output: Path, split: str) -> Path:
    """The journal, which exists while the records of a split are unfinished."""
    return output / f".{split}.journal"


class _Journal:
    """The unfinished .rec file and its journal, which has a line `key offset end` for each complete record.

    A line is written after its record.
    """

    def __init__(self, output: Path, split: str, fingerprint: str):
        self._records_path = output / f".{split}.rec.partial"
        self._path = journal_path(output, split)
        self._records = open_file(self._records_path, "ab")
        if not lock(self._records):
            raise DataError(f"{self._records_path}: another process is writing this file; wait until it is done")
        finished = output / f"{split}.rec"
        # another process has just finished the file: our open file is that file, or a new file beside it
        if finished.exists():
            if not os.path.samestat(os.fstat(self._records.fileno()), finished.stat()):
                self._records_path.unlink()
            self._records.close()
            raise DataError(f"{finished}: another process has just written this file; use it, or remove it first")
        self._lines: list[tuple[int, int, int]] = []
        done = 0
        if self._path.exists():
            remedy = f"remove .{split}.journal and .{split}.rec.partial"
            first, *lines = read_file(self._path).decode(errors="replace").splitlines(keepends=True) or [""]
            if first.strip() != fingerprint:
                raise DataError(
                    f"{self._path}: belongs to an interrupted conversion with other images or options; repeat that "
                    f"command, or {remedy}"
                )
            try:
                for line in lines:
                    if line.endswith("\n"):  # a line without its end was interrupted
                        key, offset, end = map(int, line.split())
                        self._lines.append((key, offset, end))
            except ValueError:
                raise DataError(f"{self._path}: line {line[:60]!r} is not `key offset end`; {remedy}") from None
            done = self._lines[-1][2] if self._lines else 0
            if (size := self._records_path.stat().st_size) < done:  # truncate() would fill the gap with zeros
                raise DataError(f"{self._records_path}: has {size:,} of the {done:,} bytes that were written; {remedy}")
        self._records.truncate(done)  # bytes after the journal's last line may be incomplete
        self._end = done
        self._committed = len(self._lines)
        self._rewrite(fingerprint)

    @property
    def num_done(self) -> int:
        """The number of entries of the plan that are done."""
        return self._lines[-1][0] + 1 if self._lines else 0

    def append(self, key: int, record: bytes) -> None:
        self._records.write(record)
        self._lines.append((key, self._end, self._end + len(record)))
        self._end += len(record)
        if len(self._lines) - self._committed >= _COMMIT_EVERY:
            self._commit()

    def finish(self, record_path: Path) -> int:
        """Give the finished files their final names; returns the number of records."""
        if not self._lines:
            raise DataError(f"{record_path}: none of the images is usable; see why with `python -m pipelines verify`")
        self._commit()
        index = index_path(record_path)
        write_text(index, "".join(f"{key}\t{offset}\n" for key, offset, _ in self._lines))
        self._path.unlink()  # the journal is removed first, because it must not outlive the records that it describes
        os.replace(self._records_path, record_path)
        return len(self._lines)

    def __enter__(self) -> _Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._path.exists():
            self._commit()
        self._records.close()
        self._journal.close()

    def _rewrite(self, fingerprint: str) -> None:
        lines = "".join(f"{key} {offset} {end}\n" for key, offset, end in self._lines)
        write_text(self._path, f"{fingerprint}\n{lines}")
        self._journal = self._path.open("a")

    def _commit(self) -> None:
        self._records.flush()
        os.fsync(self._records.fileno())
        self._journal.write("".join(f"{key} {offset} {end}\n" for key, offset, end in self._lines[self._committed :]))
        self._journal.flush()
        self._committed = len(self._lines)


def _fingerprint(entries: list[Entry], options: Options) -> str:
    """A digest of the values that must not change for an interrupted conversion to resume."""
    digest = hashlib.sha256(json.dumps([options.resize, options.quality, options.seed]).encode())
    for entry in entries:
        # The size is left out, because an image that stopped the conversion may be replaced.
        digest.update(f"{entry.label} {entry.name}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _write_classes(path: Path, classes: Classes) -> None:
    lines = [f"{key}\n" if key == shown else f"{key}\t{shown}\n" for key, shown in classes]
    for line, of_class in zip(lines, classes, strict=True):
        if parse_classes(lines_of(line), separator="\t") != [of_class]:
            raise DataError(f"{path}: cannot hold the class name {of_class[0]!r}, as a line break, a tab, or a blank "
                            "at its start or end would be lost; rename its folder")
    text = "".join(lines)
    if path.exists():
        if read_file(path).decode(errors="replace").splitlines() != text.splitlines():
            raise DataError(f"{path}: lists other classes than those of the images; choose another output folder")
        return
    write_text(path, text)


def tar_kind(path: Path) -> str:
    """The kind of a tar file: ILSVRC2012's "train" (holds tar files) or "val" (holds images), or a WebDataset "shard".
    Raises DataError."""
    with _open_tar(path) as tar:
        names = [member.name for member in itertools.islice((member for member in tar if member.isfile()), 16)]
    if not names:
        raise DataError(f"{path}: the tar file is empty; download it again")
    if names[0].endswith(".tar"):
        return "train"
    return "shard" if any(name.endswith(".cls") for name in names) else "val"
