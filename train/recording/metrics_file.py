"""A run's metrics.jsonl during the run: appends lines, and adds them to the record."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from train.errors import TrainError
from train.recording.log_file import LogFile
from train.recording.metrics import SCHEMA, UNITS, RunRecord


class MetricsFile(LogFile):
    """The file `path`, created or continued (a resumed run).

    Each event is added to `record`, and written immediately as one line, so that a killed run keeps the event. `clock`
    returns seconds. The file's folder is created if needed. The file is locked while it is open, so that no two
    processes write one run. Raises TrainError if the file is foreign, locked or cannot be written.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.record = RunRecord(config={}, command="", images_per_step=1)
        self._clock = clock
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(path, locked=True)
            _cut_unfinished_line(path)
            self.record = RunRecord.read_jsonl(path)
        except OSError as error:
            raise TrainError(f"cannot write {path} ({error.strerror}): give another --output folder") from None
        self._run_start = clock() - self.record.seconds
        if path.stat().st_size == 0:
            self.write("units", schema=SCHEMA, units=UNITS)

    def seconds(self) -> float:
        """Seconds since the start of the run, summed over its sessions."""
        return self._clock() - self._run_start

    def write(self, event: str, **fields: Any) -> None:
        """Append an event. Raises TrainError if the disk is full."""
        if self._file.closed:
            return
        line = _finite({"event": event, "time": round(self.seconds(), 3), **fields})
        self._append(json.dumps(line))
        self.record.apply(line)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _cut_unfinished_line(path: Path) -> None:
    """Remove an incomplete last line, which a killed process may leave, so that new lines start on a line of their own.
    """
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
