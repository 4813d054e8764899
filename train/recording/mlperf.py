"""MLPerf log lines: `:::MLLOG {"namespace": "", "time_ms": ..., "event_type": ..., "key": ..., "value": ..., ...}`.

Format and keys are those of MLCommons' logging package (github.com/mlcommons/logging, mlperf_logging/mllog), so its
tools can read the file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.recording.log_file import LogFile, log_of_run

PREFIX = ":::MLLOG"
OPTIONS = {  # MLPerf's key -> our option
    "opt_name": "optimizer",
    "seed": "seed",
    "opt_weight_decay": "weight_decay",
    "opt_learning_rate_warmup_epochs": "warmup_epochs",
}


class MLPerfLog(LogFile):
    """Appends one line per event to a file. Raises TrainError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        with log_of_run(path):
            super().__init__(path)

    def run(self, config: Mapping[str, Any], global_batch: int) -> None:
        """Log the start of a run with these options."""
        self.point("submission_benchmark", "resnet")
        self.point("global_batch_size", global_batch)
        for key, option in OPTIONS.items():
            if option in config:
                self.point(key, config[option])
        self.start("run_start")

    def start(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Log the start of an interval; `key` ends in `_start`."""
        self._write("INTERVAL_START", key, value, metadata)

    def end(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Log the end of an interval; `key` ends in `_stop`."""
        self._write("INTERVAL_END", key, value, metadata)

    def point(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Log an event without duration: a hyperparameter, an accuracy."""
        self._write("POINT_IN_TIME", key, value, metadata)

    def _write(self, event_type: str, key: str, value: Any, metadata: dict[str, Any]) -> None:
        caller = sys._getframe(2)  # the caller of start, end or point: MLPerf records the place in the code
        line = {
            "namespace": "",
            "time_ms": time.time_ns() // 1_000_000,
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": {"file": caller.f_code.co_filename, "lineno": caller.f_lineno, **metadata},
        }
        self._append(f"{PREFIX} {json.dumps(line)}")
