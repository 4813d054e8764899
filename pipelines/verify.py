"""Check every image of a data set: it must exist, be a complete image, have the label of an existing class, and not be
in both training and validation.

    python -m pipelines verify DATA                  lists what it finds
    python -m pipelines verify DATA --write-clean    and writes an index (RecordIO) or list (folders) of the good ones

Every image is decoded completely, twice. Pillow finds truncated files and files that are not images. The loader's own
decoder, on the CPU, decodes as much as it can of a JPEG that is damaged in its middle (parts come out grey or torn),
and writes a message. Damage that leaves a valid picture cannot be recognised, here or in training.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.files import check_place, expanded
from pipelines.decoder_messages import GROUP_SIZE, DecoderCheck
from pipelines.errors import DataError, check_not_negative, check_positive
from pipelines.files import link_beside, read_file, read_lines, write_text
from pipelines.inspect_image import Finding, inspect_image, verdict
from pipelines.near_copies import near_copies, thumbnail
from pipelines.options import AUTO, MAX_CLASSES, FirstLabel, Labels
from pipelines.progress import map_in_order
from pipelines.recordio import (
    BrokenRecordError,
    ChecksumError,
    RecordFile,
    index_path,
    read_index,
    record_names,
)
from pipelines.sources import (
    Classes,
    Source,
    beside,
    check_label_set,
    locate,
    open_source,
    read_classes,
    same_images,
)
from pipelines.sources.base import ONE_HOT_REMARK, is_one_hot, nfc
from pipelines.sources.folders import find_images, list_entry, list_remarks, some
from pipelines.sources.records import class_number, index_remarks
from pipelines.transform import MAX_PIXELS

_NO_CLASS = "its label is not one of the classes"
_NUM_SHOWN = 40  # findings listed one by one


class Item(NamedTuple):
    """One entry of a data set."""

    name: str
    line: str  # the entry's line in the clean index or list
    label: int | None  # None: not a class of the list
    read: Callable[[], bytes]
    problem: str = _NO_CLASS  # the finding if `label` is None


class Usable(NamedTuple):
    """An image that can be used."""

    name: str
    line: str  # the image's line in the clean index or list
    label: int | None
    digest: bytes  # digest of the encoded bytes
    thumbnail: bytes = b""  # see `near_copies`; empty if not requested


class Report(NamedTuple):
    """The result of `verify_split`."""

    where: str  # file or folder, with the split if the folder may hold files of both splits
    num_images: int
    findings: list[tuple[str, Finding]]  # (file or record, finding)
    # path for the index or list without the unusable images; None: the format has no index or list
    clean_path: Path | None
    usable: list[Usable]
    # whether validation reads the same folders, and so must read the list that is written for training
    is_shared: bool = False
    remarks: Sequence[str] = ()  # sentences about data that are left out
    classes: Mapping[int, str] = MappingProxyType({})  # label -> folder or synset, for classes that have images

    @property
    def lost_classes(self) -> list[str]:
        """The classes that have images but no usable image."""
        left = {image.label for image in self.usable}
        return [name for label, name in self.classes.items() if label not in left]

    @property
    def num_unusable(self) -> int:
        """The number of images that the loader would refuse or that are in validation too."""
        return self.num_images - len(self.usable)


def verify_split(
    data: str, split: str, num_threads: int = 0, num_classes: int | None = None, max_pixels: int = MAX_PIXELS,
    to_clean: bool = False, first_label: FirstLabel = AUTO, labels: Labels = AUTO, thumbnails: bool = False,
) -> Report:
    """Check all images of one split. Raises DataError if the split does not exist.

    `thumbnails`: keep the thumbnails that `name_near_copies` compares. With `to_clean`, first raises UserError if
    `write_clean` could not write its file.
    """
    check_not_negative(num_threads=num_threads)
    check_positive(max_pixels=max_pixels, num_classes=1 if num_classes is None else num_classes)
    found = locate(data, split)
    check_label_set(data, found.format, labels)
    path = found.path
    findings: list[tuple[str, Finding]] = []
    remarks: list[str] = []
    clean_path: Path | None = None
    if found.format == "RecordIO":
        classes = read_classes(path.parent)
        count = len(classes) or num_classes or MAX_CLASSES
        items, clean_path = _record_items(path, count, findings, remarks), index_path(path)
    elif found.format == "list":
        classes = read_classes(path.parent)
        items, clean_path = _list_items(path, len(classes) or MAX_CLASSES), path
        remarks = list_remarks(path, [item.name for item in items], [item.label for item in items])
    elif found.format == "folders":
        classes, files, remarks = find_images(path, split)
        items = _folder_items(classes, files)
        clean_path = expanded(data) / f"{split}.lst"
        items = [item._replace(line=_relative(item, clean_path.parent)) for item in items]
    else:
        source = open_source(data, split, num_classes, first_label=first_label, labels=labels)
        classes, items, remarks = source.classes, _source_items(source), list(source.remarks)
    if split == "train" and found.format in ("RecordIO", "list", "folders"):
        remarks += beside(found, data)
    if to_clean and clean_path:
        check_place(clean_path, "check permissions and space")
    usable = []
    num_images = len(items) + len(findings)  # so far, findings are index entries that point at no record
    title = f"verifying {path.name}"
    looked_at = list(map_in_order(partial(_look_at, max_pixels, thumbnails), items, len(items), title, num_threads))
    results = [finding for finding, *_ in looked_at]
    asked = [i for i, finding in enumerate(results) if finding is None or finding.usable or finding.doubtful]
    said = dict(_messages(items, asked, results, f"decoding {path.name}", num_threads, max_pixels))
    for i in asked:
        results[i] = verdict(results[i], said.get(i, ""))
    for item, finding, (_, digest, small) in zip(items, results, looked_at, strict=True):
        if finding:
            findings.append((item.name, finding))
        if not finding or finding.usable:
            usable.append(Usable(item.name, item.line, item.label, digest, small))
    is_shared = found.format == "folders" and split == "train" and same_images(data)
    folders = dict(enumerate(folder for folder, _ in classes))
    names = {item.label: folders.get(item.label, str(item.label)) for item in items if item.label is not None}
    where = str(path) if len(found.files) == 1 else f"{path} ({split})"
    if len(names) == 1:
        remarks.append(f"{where}: all images are of one class, {next(iter(names.values()))!r}")
    return name_two_labels(Report(where, num_images, findings, clean_path, usable, is_shared, remarks, names))


def name_two_labels(report: Report) -> Report:
    """Add a finding for each image whose bytes also occur under another label. The image stays usable, because only a
    person can decide which label is right.
    """
    of_bytes: dict[bytes, dict[int | None, str]] = defaultdict(dict)
    for image in report.usable:
        of_bytes[image.digest].setdefault(image.label, image.name)
    findings = []
    for image in report.usable:
        others = [(label, name) for label, name in of_bytes[image.digest].items() if label != image.label]
        if others and image.label is not None and others[0][0] is not None:
            own, other = report.classes[image.label], report.classes[others[0][0]]
            findings.append((image.name, Finding("two labels", f"is {own} here, and {other} as {others[0][1]}", True)))
    return report._replace(findings=[*report.findings, *findings])


def name_near_copies(reports: Sequence[Report]) -> list[Report]:
    """Add a finding for each image that is a near copy of an earlier image in its split, or of an image in an earlier
    report. Identical bytes are not reported again.
    """
    images = [(number, image) for number, report in enumerate(reports) for image in report.usable if image.thumbnail]
    thumbnails = np.frombuffer(b"".join(image.thumbnail for _, image in images), np.uint8).reshape(len(images), -1)
    findings: list[list[tuple[str, Finding]]] = [[] for _ in reports]
    for earlier, later in near_copies(thumbnails) if images else []:
        (whose, one), (number, other) = images[earlier], images[later]
        if one.digest == other.digest:
            continue
        of_class = "" if one.label is None else f" of {reports[whose].classes[one.label]}"
        where = ", which is for validation" if whose != number else ""
        findings[number].append((other.name, Finding("near copy", f"looks like {one.name}{of_class}{where}", True)))
    return [report._replace(findings=[*report.findings, *more]) for report, more in zip(reports, findings, strict=True)]


def class_remarks(train: Report, val: Report) -> list[str]:
    """Remarks about classes with images in only one of the two splits.

    No remark is made if one split has class names and the other has numbers, or if numbers may count from 0 or from 1,
    because a run resolves or refuses these cases.
    """
    in_train, in_val = (set(map(nfc, report.classes.values())) for report in (train, val))
    if len({all(name.isdecimal() for name in names) for names in (in_train, in_val)}) > 1:
        return []
    is_counted = [all(name == str(label) for label, name in report.classes.items()) for report in (train, val)]
    if is_counted[0] != is_counted[1] and "0" not in (in_val if is_counted[0] else in_train):
        return []
    remarks = []
    if unseen := sorted(in_train - in_val):
        remarks.append(f"{val.where}: no image is of these classes, which training has: {some(unseen)}")
    if untrained := sorted(in_val - in_train):
        remarks.append(f"{val.where}: has images of classes that no training image has: {some(untrained)}")
    return remarks


def leave_out_duplicates(train: Report, val: Sequence[Usable], val_classes: Mapping[int, str], is_part: bool) -> Report:
    """Turn training images that equal a validation image byte for byte into findings, and return the new report.

    `val_classes` names the labels of `val`. `is_part`: `val` is a part of the images in `train` (--val-split);
    otherwise a file may be listed for both.
    """
    of_bytes = {image.digest: image for image in val}
    own = {image.name for image in val} if is_part else set()
    twice = {image.name: (image, of_bytes[image.digest]) for image in train.usable
             if image.digest in of_bytes and image.name not in own}
    findings = []
    for image, other in twice.values():
        its, others = (None if one.label is None else classes.get(one.label)
                       for one, classes in ((image, train.classes), (other, val_classes)))
        conflict = "" if its == others else f" as {others}, and {its} here"
        what = f"the same image as {other.name}, which is for validation{conflict}"
        findings.append((image.name, Finding("duplicate", what, False)))
    usable = [image for image in train.usable if image.name not in twice]
    return train._replace(findings=[*train.findings, *findings], usable=usable)


def write_clean(report: Report) -> None:
    """Write the index or list of the usable images; an existing file is kept as NAME.orig."""
    if not report.usable:
        raise DataError(f"{report.where}: none of its {report.num_images} images is usable; nothing is written")
    path = report.clean_path
    if path is None:
        raise DataError(
            f"{report.where}: there is no index or list beside it that could leave images out; train with "
            f"--on-bad-image skip, or convert it with `python -m pipelines make-records --on-bad-image skip`"
        )
    lost = (image for image in report.usable if path.suffix == ".lst" and not _is_held(image, path.parent))
    if image := next(lost, None):
        raise DataError(
            f"{path}: a line cannot hold the name {image.name!a}, as its tab or line break would be lost; rename that "
            "file or folder"
        )
    try:
        original = path.with_name(path.name + ".orig")
        if path.exists() and not original.exists():
            shutil.copy2(path, original)
        write_text(path, "".join(image.line for image in report.usable))
        if report.is_shared:
            link_beside(path, "val.lst")
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); check permissions and space") from None


def _is_held(image: Usable, folder: Path) -> bool:
    """Whether the image's line in a list in `folder` reads back as one line that names the image's file."""
    try:
        (line,) = image.line.splitlines()
        return os.path.abspath(folder / list_entry(line)[1]) == os.path.abspath(image.name)
    except ValueError:  # too many lines or columns
        return False


def print_report(report: Report, console: Console) -> None:
    """Print findings and totals: on a terminal a table of the first findings, elsewhere a line for each finding."""
    if not console.is_terminal:
        for name, finding in report.findings:
            print(f"{name}: {finding.kind}, {finding.detail}" + (" (usable)" if finding.usable else ""))
    elif report.findings:
        table = Table(title=Text(report.where), title_justify="left")
        for column in ("image", "finding", "what", "usable"):
            table.add_column(column, overflow="fold")
        for name, finding in report.findings[:_NUM_SHOWN]:
            usable = Text("yes") if finding.usable else Text("no", "red")
            table.add_row(Text(name), Text(finding.kind), Text(finding.detail), usable)
        console.print(table)
        if len(report.findings) > _NUM_SHOWN:
            print(f"... and {len(report.findings) - _NUM_SHOWN:,} more; redirect the output to a file to see them all")
    for remark in report.remarks:
        print(remark)
    if lost := report.lost_classes:
        print(f"{report.where}: no image of these classes is usable: {some(lost)} (replace the images, or remove the "
              "classes)")
    faults, others = (Counter(finding.kind for _, finding in report.findings if finding.usable == is_usable)
                      for is_usable in (False, True))
    print(f"{report.where}: {report.num_images:,} images, {report.num_unusable:,} unusable"
          + (f": {_counts(faults)}" if faults else "")
          + (f"; usable, with a finding: {_counts(others)}" if others else ""))


def _counts(kinds: Counter[str]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())


def _look_at(max_pixels: int, thumbnails: bool, item: Item) -> tuple[Finding | None, bytes, bytes]:
    """Pillow's finding about an image, the digest of its bytes (b"" if they cannot be used), and its thumbnail (b"" if
    not requested).
    """
    try:
        encoded = item.read()
    except BrokenRecordError as error:
        return Finding("checksum" if isinstance(error, ChecksumError) else "index", str(error), False), b"", b""
    except OSError as error:
        return Finding("unreadable", error.strerror or str(error), False), b"", b""
    if item.label is None:
        return Finding("label", item.problem, False), b"", b""
    finding = inspect_image(encoded, max_pixels)
    small = thumbnail(encoded) if thumbnails and (finding is None or finding.usable) else b""
    return finding, hashlib.blake2b(encoded, digest_size=16).digest(), small


def _messages(
    items: list[Item], places: list[int], findings: list[Finding | None], title: str, num_threads: int, max_pixels: int
) -> Iterator[tuple[int, str]]:
    """Yield the place and the message of each image that the loader's decoder complains about."""
    check = DecoderCheck(lambda i: np.frombuffer(items[i].read(), np.uint8), num_threads, max_pixels)
    doubtful = {i for i in places if (finding := findings[i]) and finding.doubtful}
    groups = [places[start : start + GROUP_SIZE] for start in range(0, len(places), GROUP_SIZE)]
    judge = partial(check, alone=doubtful)
    # `judge` has its own threads
    for found in map_in_order(judge, groups, len(places), title, num_threads=1, size=len):
        yield from found.items()


def _record_items(path: Path, count: int, findings: list[tuple[str, Finding]], remarks: list[str]) -> list[Item]:
    """The records in the order of the index; if the index is missing or wrong, the records found in the file.

    `count` is the number of classes.
    """
    file = RecordFile(path)
    there = list(file.scan())
    try:
        keys, offsets = read_index(index_path(path))
        entries = list(zip(keys.tolist(), offsets.tolist(), strict=True))
    except DataError as error:
        findings.append((str(index_path(path)), Finding("index", str(error), False)))
        entries = []
    starts = set(there)
    wrong = [(key, offset) for key, offset in entries if offset not in starts]
    for key, offset in wrong:
        what = f"no record begins at offset {offset}"
        findings.append((f"{path} record {key}", Finding("index", what, False)))
    if wrong or not entries:
        entries = list(enumerate(there))
    else:
        remarks += index_remarks(path, offsets, len(there))

    name_of = record_names(path, *zip(*entries, strict=True)) if entries else str

    labels_of = [_labels(file, offset) for _, offset in entries]
    several = [labels for labels in labels_of if len(labels) > 1]
    num_labels = len(several[0]) if several and all(map(is_one_hot, several)) else 1
    if num_labels > 1:
        remarks.append(ONE_HOT_REMARK.format(path))

    def item(i: int, key: int, offset: int) -> Item:
        label, problem = -1.0, _NO_CLASS
        if labels := labels_of[i]:
            try:  # if any vector is not one-hot, all of them count as several labels
                label = class_number(labels, num_labels, lambda: name_of(i))
            except DataError as error:
                problem = str(error)
        known = label.is_integer() and 0 <= label < count

        def read() -> bytes:
            try:
                return file.read(offset).image.tobytes()
            finally:
                file.check()

        return Item(name_of(i), f"{key}\t{offset}\n", int(label) if known else None, read, problem)

    return [item(i, key, offset) for i, (key, offset) in enumerate(entries)]


def _labels(file: RecordFile, offset: int) -> tuple[float, ...]:
    """The labels of the record at `offset`; () if it is broken."""
    try:
        return file.read(offset).labels
    except BrokenRecordError:
        return ()


def _folder_items(classes: Classes, files: dict[str, list[Path]]) -> list[Item]:
    number = {nfc(key): label for label, (key, _) in enumerate(classes)}
    return [Item(str(file), "", number.get(nfc(folder)), partial(read_file, file))
            for folder, images in files.items() for file in images]


def _list_items(path: Path, count: int) -> list[Item]:
    items = []
    for line in filter(str.strip, read_lines(path)):
        try:
            label, name = list_entry(line)
        except ValueError:
            label, name = -1, line.rpartition("\t")[2]
        known = 0 <= label < count
        file = path.parent / name
        items.append(Item(str(file), line + "\n", label if known else None, partial(read_file, file)))
    return items


def _source_items(source: Source) -> list[Item]:
    def item(i: int) -> Item:
        def read() -> bytes:
            try:
                source.check_record(i)
                return source.read(i).tobytes()
            finally:
                source.check([i])

        return Item(source.name(i), "", _label(source, i), read)

    return [item(i) for i in range(len(source))]


def _label(source: Source, i: int) -> int | None:
    try:
        return source.label(i)
    except (DataError, BrokenRecordError):
        return None


def _relative(item: Item, folder: Path) -> str:
    return f"0\t{item.label}\t{os.path.relpath(item.name, folder)}\n"
