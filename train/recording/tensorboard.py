"""TensorBoard's event file of a run.

The file is written directly, with the message classes of tensorboardX. tensorboardX's own SummaryWriter writes in a
thread that ends if the disk is full; the training loop would then wait for this thread forever.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from pathlib import Path
from typing import Any

from train.recording.log_file import content_of, log_of_run

FLUSH_SECONDS = 60.0


class TensorBoardLog:
    """A new event file in `folder`, which is created if needed. Points of earlier sessions from step `first_step` on
    are hidden, because these steps are done again. Raises TrainError if the file cannot be written.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2  # slow to import
        from tensorboardX.record_writer import RecordWriter

        self._event, self._summary, self._open = event_pb2.Event, summary_pb2.Summary, RecordWriter
        self._flushed_at = -math.inf
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{first_step}"
        with log_of_run(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = RecordWriter(str(self._path))
        self._write(file_version="brain.Event:2")
        if first_step:
            self._write(step=first_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def add(self, group: str, step: int, **values: float | None) -> None:
        """Add points to the curves group/name at optimizer step `step`; None and values that are not finite are left
        out."""
        points = [
            self._summary.Value(tag=f"{group}/{name}", simple_value=value)
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        ]
        if points:
            self._write(step=step, summary=self._summary(value=points))

    @property
    def is_gone(self) -> bool:
        """Whether the file was removed."""
        return not self._path.exists()

    def write_anew(self) -> None:
        """Write the removed file again, with its whole content. Raises TrainError if that fails."""
        with log_of_run(self._path.parent):
            self._file.flush()
            content = content_of(self._file._writer)
            self._file.close()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open(str(self._path))
            self._file._writer.write(content)
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, **fields: Any) -> None:
        now = time.monotonic()
        with log_of_run(self._path.parent):
            self._file.write(self._event(wall_time=time.time(), **fields).SerializeToString())
            if now - self._flushed_at > FLUSH_SECONDS:
                self._file.flush()
                self._flushed_at = now
