"""The file of many predictions, one record per image, as CSV or JSON lines. The file grows batch by batch, and a later
run can resume it.

The CSV columns are `file`; `true`, the true class, if folders determine it; then `class`, `index` and `probability` of
the most likely class; `class_2`, `index_2` and `probability_2` of the second, and so on; in a file of `validate` the
`loss`; and `error`. A JSON line has the form that `predict --json` prints, with the same further fields. The record of
an image that cannot be read has no classes, and the reason in `error`. A JSON file beside the predictions records how
they were made, so that a later run can check whether it may resume the file.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from common import files
from train.errors import TrainError
from train.recording.log_file import writing

ABOUT = ".about.json"  # suffix of the JSON file beside the predictions
ENCODING, ERRORS = "utf-8", "surrogateescape"  # file names are bytes, which are written unchanged


class Found(NamedTuple):
    """The number of a file's records, and the number of records whose image cannot be read."""

    records: int
    bad: int


def _csv_field(text: str | None) -> str:
    """The text as a CSV field (RFC 4180); None becomes an empty field."""
    text = text or ""
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',"\r\n') else text


class Form(ABC):
    """A file format: how a record is written and read. `names`: the classes, in the network's order; `top`: classes in
    a record; `has_true`, `has_loss`: whether a record has the true class, and whether it has the loss (records with a
    loss are never read).
    """

    header = b""
    quote: Callable[[str | None], str]
    guess: str  # template, filled with (class, index); the probability follows
    between: str  # separator of two guesses
    true, loss = "", ""  # templates, filled with the true class and with the loss; empty if records have none
    image: str  # template, filled with (file, true class, guesses, loss)
    bad_image: str  # template, filled with (file, true class, reason)

    def __init__(self, names: Sequence[str], top: int, has_true: bool = False, has_loss: bool = False) -> None:
        self.top = top
        self.true, self.loss = self.true if has_true else "", self.loss if has_loss else ""
        self._beginnings = [self.guess % (self.quote(name), index) for index, name in enumerate(names)]

    def prediction(self, file: str, classes: Sequence[int], probabilities: Sequence[float], true: str | None = None,
                   loss: float = 0.0) -> str:
        """The record of an image, with the most likely class first. `true`: the image's true class; None: not known."""
        guesses = self.between.join(f"{self._beginnings[index]}{probability:.6g}"
                                    for index, probability in zip(classes, probabilities, strict=True))
        return self.image % (self.quote(file), self._true(true), guesses, self.loss % loss if self.loss else "")

    def failure(self, file: str, reason: str, true: str | None = None) -> str:
        """The record of an image that cannot be read."""
        return self.bad_image % (self.quote(file), self._true(true), self.quote(reason))

    def _true(self, name: str | None) -> str:
        return self.true % self.quote(name) if self.true else ""

    def records(self, lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
        """The image file of each record, and whether that image was unreadable. Reads no line beyond the current
        record. May raise any exception if a record is incomplete, or not written by this program.
        """
        taken: list[str] = []

        def taking() -> Iterator[str]:
            for line in lines:
                taken.append(line)
                yield line

        for file, true, classes, probabilities, error in self.parsed(taking()):
            written = self.failure(file, error, true) if error else self.prediction(file, classes, probabilities, true)
            if "".join(taken) != written or len(classes) != (0 if error else self.top):
                raise ValueError("it is not as it was written")
            taken.clear()
            yield file, error != ""

    @abstractmethod
    def parsed(self, lines: Iterable[str]) -> Iterator[tuple[str, str | None, list[int], list[float], str]]:
        """Yield for each record: file, true class, classes, probabilities, and the reason why the image cannot be read
        ("" if it can be read).
        """


class Csv(Form):
    quote, guess, between, image = staticmethod(_csv_field), ",%s,%d,", "", "%s%s%s%s,\n"
    true, loss = ",%s", ",%.6g"

    def __init__(self, names: Sequence[str], top: int, has_true: bool = False, has_loss: bool = False) -> None:
        super().__init__(names, top, has_true, has_loss)
        self.bad_image = f"%s%s{',' * (3 * top + has_loss + 1)}%s\n"
        ranks = ["", *(f"_{rank}" for rank in range(2, top + 1))]
        guesses = [f"{field}{rank}" for rank in ranks for field in ("class", "index", "probability")]
        columns = ["file", *["true"] * has_true, *guesses, *["loss"] * has_loss, "error"]
        self.header = f"{','.join(columns)}\n".encode()

    def parsed(self, lines: Iterable[str]) -> Iterator[tuple[str, str | None, list[int], list[float], str]]:
        for file, *fields, error in csv.reader(lines, strict=True):
            true = fields.pop(0) or None if self.true else None
            fields = [] if error else fields
            yield file, true, [*map(int, fields[1::3])], [*map(float, fields[2::3])], error


class JsonLines(Form):
    quote, between = staticmethod(json.dumps), "}, "
    guess, image = '{"class": %s, "index": %d, "probability": ', '{"file": %s%s, "predictions": [%s}]%s}\n'
    bad_image = '{"file": %s%s, "predictions": [], "error": %s}\n'
    true, loss = ', "true": %s', ', "loss": %.6g'

    def parsed(self, lines: Iterable[str]) -> Iterator[tuple[str, str | None, list[int], list[float], str]]:
        for record in map(json.loads, lines):
            classes, values = ([guess[key] for guess in record["predictions"]] for key in ("index", "probability"))
            yield record["file"], record["true"] if self.true else None, classes, values, record.get("error", "")


_COLUMNS = {False: "without true classes", True: "with true classes"}  # the value of "columns" in the JSON file
FORMS: dict[str, type[Form]] = {".csv": Csv, ".jsonl": JsonLines}  # by the suffix of the file


def check_name(path: Path) -> None:
    """Raise TrainError for a file whose name does not determine its format."""
    if path.suffix not in FORMS:
        raise TrainError(f"--output {path} must end in {' or '.join(FORMS)}, which determines the format")


class PredictionFile(AbstractContextManager["PredictionFile"]):
    """Creates the file, or resumes an existing file. The file is locked while it is open, so only one process writes to
    it.

    Args: path: its suffix is one of `FORMS`. names: the classes, in the network's order. top: classes in a record.
        about: how the predictions are made, as JSON values. same: the keys of `about` whose values must be equal to
        resume a file, and the names of these keys in a message. has_true: whether the records have the true class.

    Raises TrainError if the file is foreign, locked or cannot be written; the file is then unchanged.
    """

    def __init__(self, path: Path, names: Sequence[str], top: int, about: Mapping[str, Any], same: Mapping[str, str],
                 has_true: bool = False) -> None:
        self.path, self.form = path, FORMS[path.suffix](names, top, has_true)
        about, same = {**about, "columns": _COLUMNS[has_true]}, {**same, "columns": "set of columns"}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():  # the path is a folder, a pipe or a device
                raise TrainError(f"{path} is not a regular file, so it cannot be continued after an "
                                 "interruption: give another --output")
            self._file: BinaryIO = path.open("a+b", buffering=0)
        except OSError as error:
            raise TrainError(f"cannot write {path} ({error.strerror}): "
                             f"{files.way_out(error, 'give another --output')}") from None
        about_path = path.with_name(path.name + ABOUT)
        try:
            if not files.lock(self._file):  # the lock lasts until the file is closed or the process ends
                raise TrainError(f"another process is writing {path}: wait for its end, or give another --output")
            if path.stat().st_size:
                self._check(about_path, about, same)
            else:
                with _writing(about_path):
                    files.write_bytes(about_path, json.dumps(about, indent=2).encode() + b"\n")
        except BaseException:
            self._file.close()
            raise

    def _check(self, path: Path, about: Mapping[str, Any], same: Mapping[str, str]) -> None:
        """Raise TrainError if the file cannot be resumed."""
        try:
            # earlier versions wrote no true classes, and no key "columns"
            found = {"columns": _COLUMNS[False]} | json.loads(path.read_bytes())
            changed = [(words, found[name], about[name]) for name, words in same.items() if found[name] != about[name]]
        except FileNotFoundError:
            raise TrainError(f"{self.path} exists already and was not begun by this command (there is no {path.name} "
                             "beside it): give another --output") from None
        except OSError as error:
            raise TrainError(f"cannot read {path}, which records how {self.path.name} was begun ({error.strerror}): "
                             "check its permissions, or give another --output") from None
        except Exception:  # as in `refused_as`
            raise TrainError(f"{path}, which records how {self.path.name} was begun, is damaged: restore it from "
                             "a copy, or give another --output") from None
        for words, before, now in changed:
            raise TrainError(f"{self.path} was begun with another {words}: {before}, now {now}; give another --output")

    def resume(self, images: Sequence[str]) -> Found:
        """Check that the file's records belong to the first images, and count them. Removes an incomplete record at the
        end, which a killed process may leave. Raises TrainError if the file has other images, or is damaged before its
        end.
        """
        header, end, found = self.form.header, 0, Found(0, 0)
        with self.path.open("rb") as reading:
            if (beginning := reading.read(len(header))) == header:
                found, end = self._read(reading, images)
            elif not header.startswith(beginning):
                raise TrainError(f"{self.path} has other columns than these predictions: give another --output")
        with _writing(self.path):
            self._file.truncate(end)
            if not end:
                self._write(header)
        return found

    def changed(self, images: Sequence[str]) -> list[str]:
        """The images that have changed or been replaced since the file was begun."""
        begun = self.path.with_name(self.path.name + ABOUT).stat().st_mtime_ns

        def changed_at(image: str) -> int:
            try:
                # st_mtime may have any value after a copy or a move, so st_ctime is used
                return os.stat(image).st_ctime_ns
            except OSError:  # the image was removed, but its prediction is still right
                return 0

        return [image for image in images if changed_at(image) > begun]

    def _read(self, reading: BinaryIO, images: Sequence[str]) -> tuple[Found, int]:
        """The records after the header, and the byte at which the last complete record ends. Raises TrainError."""
        end, done, bad = reading.tell(), 0, 0
        lines = (line.decode(ENCODING, ERRORS) for line in reading if line.endswith(b"\n"))
        try:
            for file, is_bad in self.form.records(lines):
                wanted = repr(images[done]) if done < len(images) else "none"
                if repr(file) != wanted:
                    raise TrainError(f"image {done + 1:,} in {self.path} is {file!r}, but this command has {wanted}: "
                                     "give the same images in the same order, or another --output")
                done, bad, end = done + 1, bad + is_bad, reading.tell()
        except TrainError:
            raise
        except Exception:  # as in `refused_as`
            # A file name may contain line breaks, and the file may end after one of them.
            name = _csv_field(images[done]).encode(ENCODING, ERRORS) if done < len(images) else b""
            length = reading.tell() - end
            reading.seek(end)
            if not name.startswith(b"".join(reading.read(length).rpartition(b"\n")[:2])):
                reading.seek(0)
                line = 1 + sum(reading.tell() <= end for _ in reading)
                raise TrainError(f"{self.path} is damaged in line {line:,}, after {done:,} images: repair that line, "
                                 "or delete it and all lines after it to predict their images again, or give another "
                                 "--output") from None
        return Found(done, bad), end

    def write(self, records: Iterable[str]) -> None:
        """Append records. Raises TrainError if that fails. After a failure, complete records remain in the file, and
        nothing more is written, because it would follow a gap.
        """
        with _writing(self.path):
            try:
                self._write("".join(records).encode(ENCODING, ERRORS))
            except OSError:
                self._file.close()
                raise

    def _write(self, content: bytes) -> None:
        """Write all of `content`; a nearly full disk may take only a part at first."""
        view = memoryview(content)
        while view:
            view = view[self._file.write(view) :]

    def take_over(self, parts: Sequence[Path]) -> None:
        """Append the records of all files `parts` and remove these files; after an error no record is appended. Raises
        TrainError.

        A new file replaces this file, so `write` must not be called afterwards.
        """
        parts = [part for part in parts if part.exists()]
        if not parts:
            return
        with _writing(self.path), files.replacing(self.path) as partial, partial.open("wb") as whole:
            for path in (self.path, *parts):
                with path.open("rb") as file:
                    file.seek(len(self.form.header) if path in parts else 0)
                    shutil.copyfileobj(file, whole)
            whole.flush()
            os.fsync(whole.fileno())
        for path in parts:
            path.unlink()
            path.with_name(path.name + ABOUT).unlink(missing_ok=True)

    def close(self) -> None:
        if not self._file.closed:
            with contextlib.suppress(OSError):  # the file system may lack this operation
                os.fsync(self._file.fileno())
            self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _writing(path: Path) -> AbstractContextManager[None]:
    return writing(path, "give the same command again, which goes on from there")
