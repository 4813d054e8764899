"""MLPerf log lines: `:::MLLOG {"namespace": "", "time_ms": ..., "event_type": ..., "key": ..., "value": ..., ...}`.

Format and keys are those of MLCommons' logging package (github.com/mlcommons/logging, mlperf_logging/mllog), so that
its tools read the file.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PREFIX = ":::MLLOG"


class MLPerfLog:
    """Appends one line per event to a file; every line is flushed, so that a killed run keeps what it logged."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def start(self, key: str, value: Any = None, **metadata: Any) -> None:
        """The start of an interval; `key` ends in `_start`."""
        self._write("INTERVAL_START", key, value, metadata)

    def end(self, key: str, value: Any = None, **metadata: Any) -> None:
        """The end of an interval; `key` ends in `_stop`."""
        self._write("INTERVAL_END", key, value, metadata)

    def point(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Something without duration: a hyperparameter, an accuracy."""
        self._write("POINT_IN_TIME", key, value, metadata)

    def close(self) -> None:
        self._file.close()

    def _write(self, event_type: str, key: str, value: Any, metadata: dict[str, Any]) -> None:
        caller = sys._getframe(2)  # whoever called start, end or point: MLPerf wants the place in the code
        line = {
            "namespace": "",
            "time_ms": time.time_ns() // 1_000_000,
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": {"file": caller.f_code.co_filename, "lineno": caller.f_lineno, **metadata},
        }
        self._file.write(f"{PREFIX} {json.dumps(line)}\n")
        self._file.flush()
