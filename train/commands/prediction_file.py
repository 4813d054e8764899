"""The file of many predictions, one image a record: CSV, or JSON lines. It grows batch by batch, and a later run goes
on where it ends.

Of CSV the columns are `file`, then `class`, `index` and `probability` of the most likely class, `class_2`, `index_2`,
`probability_2` of the next one and so on, and `error`. A JSON line has the form that `predict --json` prints. An image
that cannot be read has no classes, but the reason in `error`. What the predictions were made with is in a file of JSON
beside it, by which a run knows whether it may go on.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from common import files
from train.errors import TrainError

ABOUT = ".about.json"  # ends the name of the file beside it
MOST_PASSES = 100  # over the probabilities: one takes 0.3 us for 1,000 classes, and to sort them takes 72 us (one core)
COPIED_AT_ONCE = 2**24  # bytes
ENCODING, ERRORS = "utf-8", "surrogateescape"  # names of files are bytes, which come out as they were


class Found(NamedTuple):
    """What a file has: records, and how many of them are of images that cannot be read."""

    records: int
    bad: int


class Form(ABC):
    """How a record is written. `names` are the classes, in the network's order; `top`: how many each record has."""

    def __init__(self, names: Sequence[str], top: int) -> None:
        self.names, self.top = names, top
        self.beginnings = [self._beginning(name, index) for index, name in enumerate(names)]  # all but a probability

    header = b""

    def prediction(self, file: str, classes: Sequence[int], probabilities: Sequence[float]) -> str:
        """The record of an image, the most likely class first."""
        beginnings = self.beginnings
        return self._record(file, [f"{beginnings[index]}{probability:.6g}"
                                   for index, probability in zip(classes, probabilities, strict=True)])

    @abstractmethod
    def failure(self, file: str, reason: str) -> str:
        """The record of an image that cannot be read."""

    @abstractmethod
    def records(self, lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
        """The file of each record, and whether that file cannot be read. Reads no line beyond the record. Raises any
        exception for a record that is not whole, or not as this program writes it."""

    @abstractmethod
    def _beginning(self, name: str, index: int) -> str: ...

    @abstractmethod
    def _record(self, file: str, guesses: Sequence[str]) -> str: ...


class Csv(Form):
    def __init__(self, names: Sequence[str], top: int) -> None:
        super().__init__(names, top)
        ranks = ["", *(f"_{rank}" for rank in range(2, top + 1))]
        self.columns = ["file", *(f"{name}{rank}" for rank in ranks for name in ("class", "index", "probability")),
                        "error"]
        self.header = (",".join(self.columns) + "\n").encode()

    def failure(self, file: str, reason: str) -> str:
        return f"{_quoted(file)}{',' * (3 * self.top + 1)}{_quoted(reason)}\n"

    def records(self, lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
        for record in csv.reader(lines, strict=True):
            file, *fields, error = record
            guesses = [[self.names[index := _number(text)], str(index), f"{float(probability):.6g}"]
                       for text, probability in zip(fields[1::3], fields[2::3], strict=True) if not error]
            if fields != (["" for _ in self.columns[1:-1]] if error else list(itertools.chain(*guesses))) or (
                    len(record) != len(self.columns)):
                raise ValueError("it is not as it was written")
            yield file, error != ""

    def _beginning(self, name: str, index: int) -> str:
        return f",{_quoted(name)},{index},"

    def _record(self, file: str, guesses: Sequence[str]) -> str:
        return f"{_quoted(file)}{''.join(guesses)},\n"


class JsonLines(Form):
    def failure(self, file: str, reason: str) -> str:
        return json.dumps({"file": file, "predictions": [], "error": reason}) + "\n"

    def records(self, lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
        for line in lines:
            record = json.loads(line)
            file, guesses, error = record["file"], record["predictions"], record.get("error", "")
            indices = [_number(str(guess["index"])) for guess in guesses]
            written = self.failure(file, error) if error else self.prediction(
                file, indices, [guess["probability"] for guess in guesses])
            if written != line or len(guesses) != (0 if error else self.top):
                raise ValueError("it is not as it was written")
            yield file, error != ""

    def _beginning(self, name: str, index: int) -> str:
        return f'{{"class": {json.dumps(name)}, "index": {index}, "probability": '

    def _record(self, file: str, guesses: Sequence[str]) -> str:
        return f'{{"file": {json.dumps(file)}, "predictions": [{"}, ".join(guesses)}}}]}}\n'


FORMS: dict[str, type[Form]] = {".csv": Csv, ".jsonl": JsonLines}  # by the ending of the file


def check_name(path: Path) -> None:
    """Raise TrainError for a file whose name does not tell its form."""
    if path.suffix not in FORMS:
        raise TrainError(f"--output {path} must end in {' or '.join(FORMS)}, which says how it is written")


class PredictionFile:
    """Begins the file, or goes on with the one that is there; locked while it is open, so that no two write to it.

    Args:
        path: whose ending is one of `FORMS`.
        names: of the classes, in the network's order.
        top: classes a record.
        about: what the predictions are made with, JSON values.
        same: those names in `about` that must be equal where a file is gone on with, and their words in a message.

    Raises TrainError where the file is foreign, locked or cannot be written; it is left as it is then.
    """

    def __init__(self, path: Path, names: Sequence[str], top: int, about: Mapping[str, Any],
                 same: Mapping[str, str]) -> None:
        self.path = path
        self.form = FORMS[path.suffix](names, top)
        about_path = path.with_name(path.name + ABOUT)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():  # a folder, a pipe, a device
                raise TrainError(f"{path} is no regular file, so that nothing could go on where it ends: give another "
                                 "--output")
            self._file: BinaryIO = path.open("a+b", buffering=0)
        except OSError as error:
            raise TrainError(f"cannot write {path} ({error.strerror}): "
                             f"{files.way_out(error, 'give another --output')}") from None
        try:
            self._lock()
            if path.stat().st_size:
                self._check(about_path, about, same)
            else:
                with self._writing(about_path):
                    files.write_bytes(about_path, json.dumps(about, indent=2).encode() + b"\n")
        except BaseException:
            self._file.close()
            raise

    def go_on(self, images: Sequence[str]) -> Found:
        """What the file has, which is of the first ones of the images. An unfinished record at its end, as a kill
        leaves it, is cut off. Raises TrainError where it has others, or is damaged before its end."""
        header, end, found = self.form.header, 0, Found(0, 0)
        self._file.seek(0)
        if (beginning := self._file.read(len(header))) == header:
            found, end = self._read(images)
        elif not header.startswith(beginning):
            raise TrainError(f"{self.path} has other columns than these predictions: give another --output")
        with self._writing(self.path):
            self._file.truncate(end)
            if not end:
                self._write(header)
        return found

    def _read(self, images: Sequence[str]) -> tuple[Found, int]:
        """What the file has, and the byte where its last whole record ends. Raises TrainError."""
        end, done, bad = len(self.form.header), 0, 0
        with self.path.open("rb") as reading:
            reading.seek(end)
            lines = _Lines(reading, end)
            line = first = 1 + bool(end)  # of the next record, counted from 1
            try:
                for file, is_bad in self.form.records(lines):
                    if done == len(images) or file != images[done]:
                        wanted = repr(images[done]) if done < len(images) else "none"
                        raise TrainError(f"image {done + 1:,} in {self.path} is {file!r}, and of this command "
                                         f"{wanted}: give the same images in the same order, or another --output")
                    done, bad = done + 1, bad + is_bad
                    end, line = lines.end, first + lines.number
            except TrainError:
                raise
            except Exception:  # as `refused_as` says
                # A name may have line breaks, and be cut after one of them.
                name = _quoted(images[done]).encode(ENCODING, ERRORS) if done < len(images) else b""
                reading.seek(end)
                if not name.startswith(reading.read(lines.end - end)):
                    raise TrainError(f"{self.path} is damaged in line {line:,}, after {done:,} images: repair that "
                                     "line, or remove it and all that follow, whose images are then predicted again, "
                                     "or give another --output") from None
        return Found(done, bad), end

    def write(self, records: Iterable[str]) -> None:
        """Append records. Raises TrainError where that fails: what is whole remains, and nothing more is written, which
        would come behind a gap."""
        with self._writing(self.path):
            try:
                self._write("".join(records).encode(ENCODING, ERRORS))
            except OSError:
                self._file.close()
                raise

    def take_over(self, parts: Sequence[Path]) -> None:
        """Append the records of other such files, all of them or none, and remove these. Raises TrainError.

        The file is then another one of that name: nothing more is to be written.
        """
        parts = [part for part in parts if part.exists()]
        if not parts:
            return
        with self._writing(self.path), files.replacing(self.path) as partial, partial.open("wb") as whole:
            for path in (self.path, *parts):
                with path.open("rb") as file:
                    file.seek(len(self.form.header) if path in parts else 0)
                    shutil.copyfileobj(file, whole, COPIED_AT_ONCE)
            whole.flush()
            os.fsync(whole.fileno())
        for path in parts:
            path.unlink()
            path.with_name(path.name + ABOUT).unlink(missing_ok=True)

    def close(self) -> None:
        if not self._file.closed:
            with contextlib.suppress(OSError):  # of a file system that does not know it
                os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> PredictionFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, content: bytes) -> None:
        """All of it; a disk that is nearly full takes a part first."""
        view = memoryview(content)
        while view:
            view = view[self._file.write(view) :]

    @contextlib.contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainError(f"cannot write {path} ({error.strerror}): "
                             f"{files.way_out(error, 'see that it can be written')} and give the same command again, "
                             "which goes on from there") from None

    def _check(self, path: Path, about: Mapping[str, Any], same: Mapping[str, str]) -> None:
        """Raise TrainError where the file cannot be resumed."""
        try:
            found = json.loads(path.read_bytes())
            before = {name: found[name] for name in same}
        except FileNotFoundError:
            raise TrainError(f"{self.path} is there already, and was not begun by this command (no {path.name} beside "
                             "it says so): give another --output") from None
        except OSError as error:
            raise TrainError(f"cannot read {path}, which says what {self.path.name} was begun with ({error.strerror}): "
                             "see that it can be read, or give another --output") from None
        except Exception:  # as `refused_as` says
            raise TrainError(f"{path}, which says what {self.path.name} was begun with, is damaged: put back a copy of "
                             "it, or give another --output") from None
        for name, words in same.items():
            if before[name] != about[name]:
                raise TrainError(f"{self.path} was begun with another {words}: {before[name]}, now {about[name]}; give "
                                 "another --output")

    def _lock(self) -> None:
        """Until the file is closed, which the end of the process does too."""
        if not files.lock(self._file):
            raise TrainError(f"another process is writing {self.path}: wait for its end, or give another --output")


class _Lines:
    """The whole lines of a file from where it stands: the `number` of those taken so far, and the byte where the last
    one of them ends."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        self._file, self.end, self.number = file, start, 0

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            if not line.endswith(b"\n"):
                return
            self.end += len(line)
            self.number += 1
            yield line.decode(ENCODING, ERRORS)


def most_likely(probabilities: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """The classes (N, top) of the largest of the probabilities (N, classes), the largest first and of equal ones the
    first, and these (N, top)."""
    if top > MOST_PASSES:
        classes = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
        return classes, np.take_along_axis(probabilities, classes, axis=1)
    left, images = probabilities.copy(), np.arange(len(probabilities))
    classes = np.empty((len(left), top), np.int64)
    for rank in range(top):
        classes[:, rank] = left.argmax(axis=1)
        left[images, classes[:, rank]] = -np.inf
    return classes, np.take_along_axis(probabilities, classes, axis=1)


def _number(text: str) -> int:
    """The number of a class. Raises ValueError for other text."""
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{text!r} is no number of a class")
    return int(text)


def _quoted(text: str) -> str:
    """A field of CSV (RFC 4180)."""
    if any(letter in text for letter in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text
