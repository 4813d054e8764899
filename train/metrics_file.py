"""A run's metrics.jsonl while the run lasts: lines appended to it, and the record that they add up to."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from train.errors import TrainError
from train.metrics import SCHEMA, UNITS, RunRecord


class MetricsFile:
    """Begins the file `path`, or continues the one that is there (a resumed run).

    Each event becomes one line at once, so that a killed run keeps what it has logged, and goes into `record`.
    `clock` tells seconds. Raises TrainError where the file is foreign or cannot be written.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.record = RunRecord(config={}, command="", images_per_step=1)
        self._path, self._clock = path, clock
        is_new = not path.is_file()
        try:
            if not is_new:
                _cut_unfinished_line(path)
                self.record = RunRecord.read_jsonl(path)
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise TrainError(f"cannot write {path} ({error.strerror}): give another --output folder") from None
        self._run_start = clock() - self.record.seconds
        if is_new:
            self.write("units", schema=SCHEMA, units=UNITS)

    def seconds(self) -> float:
        """Since the start of the run, over its sessions."""
        return self._clock() - self._run_start

    def write(self, event: str, **fields: Any) -> None:
        """Append an event. Raises TrainError where the disk is full."""
        if self._file.closed:
            return
        line = _finite({"event": event, "time": round(self.seconds(), 3), **fields})
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise TrainError(f"cannot write {self._path}: {error.strerror}; make room and use --resume") from None
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


def _cut_unfinished_line(path: Path) -> None:
    """Cut off a last line that a kill left without its end, so that appending starts on a new line."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
