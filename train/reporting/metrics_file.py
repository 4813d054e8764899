"""A run's metrics.jsonl while the run lasts: lines appended to it, and the record that they add up to."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TextIO

from common.files import lock, way_out, write_bytes
from train.errors import TrainError
from train.reporting.metrics import SCHEMA, UNITS, RunRecord


@contextlib.contextmanager
def log_of_run(path: Path) -> Iterator[None]:
    """Inside, `path` in a run's folder is written to. Raises TrainError where that fails."""
    try:
        yield
    except OSError as error:
        raise TrainError(f"cannot write {path} ({error.strerror}): {way_out(error, 'see that it can be written')} and "
                         f"start again, with --resume {path.parent} where that has a checkpoint") from None


def content_of(file: IO[Any]) -> bytes:
    """What an open file holds, which somebody has removed: it is there as long as it is open."""
    return Path(f"/proc/self/fd/{file.fileno()}").read_bytes()


class MetricsFile:
    """Begins the file `path`, or continues the one that is there (a resumed run).

    Each event becomes one line at once, so that a killed run keeps what it has logged, and goes into `record`.
    `clock` tells seconds. The file's folder is made if need be. While it is open it is locked, so that no two processes
    write into one run. Raises TrainError where the file is foreign, locked or cannot be written.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.record = RunRecord(config={}, command="", images_per_step=1)
        self._path, self._clock = path, clock
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8", buffering=1)
            _lock(self._file, path)
            _cut_unfinished_line(path)
            self.record = RunRecord.read_jsonl(path)
        except OSError as error:
            raise TrainError(f"cannot write {path} ({error.strerror}): give another --output folder") from None
        self._run_start = clock() - self.record.seconds
        if path.stat().st_size == 0:
            self.write("units", schema=SCHEMA, units=UNITS)

    def seconds(self) -> float:
        """Since the start of the run, over its sessions."""
        return self._clock() - self._run_start

    @property
    def is_gone(self) -> bool:
        """Whether somebody has removed it, or put another file in its place."""
        try:
            return not (self._file.closed or os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())))
        except OSError:
            return True

    def write_anew(self) -> None:
        """Put it back with all that it held. Raises TrainError where that fails."""
        with log_of_run(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self._path, content_of(self._file))
            self._file.close()
            self._file = self._path.open("a+", encoding="utf-8", buffering=1)
            _lock(self._file, self._path)

    def write(self, event: str, **fields: Any) -> None:
        """Append an event. Raises TrainError where the disk is full."""
        if self._file.closed:
            return
        line = _finite({"event": event, "time": round(self.seconds(), 3), **fields})
        with log_of_run(self._path):
            self._file.write(json.dumps(line) + "\n")
        self.record.apply(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: both become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _lock(file: TextIO, path: Path) -> None:
    """Until the file is closed, which the end of the process does too."""
    if not lock(file):
        raise TrainError(f"another process is at work on the run in {path.parent}: wait for its end, or give another "
                         "--output folder")


def _cut_unfinished_line(path: Path) -> None:
    """Cut off a last line that a kill left without its end, so that appending starts on a new line."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
