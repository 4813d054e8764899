"""Run folders for other programs: a run's state, options and best accuracy; and all runs below a folder.

Reads only metrics.jsonl, so it works while a run trains and after it was killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from common import files
from train.config import Config
from train.content import content_of_file
from train.errors import TrainError
from train.language_model_config import LanguageModelConfig
from train.recording.metrics import METRICS_FILE, REASONS, WORDS, RunRecord, perplexity

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
DAMAGED = "damaged"  # the metrics cannot be read

# Why a session has ended ("reason" in metrics.jsonl) -> state of the run.
ENDINGS = {reason: FINISHED if completes else STOPPED for reason, completes in REASONS.items() if reason != "error"}
KILLED = "killed"  # reason of a run that has not recorded why it ended
DEPTH = 3  # folders below the given one that are searched for runs


@dataclass(frozen=True)
class Run:
    """A run in its folder."""

    folder: Path
    record: RunRecord
    is_running: bool  # whether a process is writing its metrics

    @property
    def state(self) -> str:
        """RUNNING; FINISHED: it has done its epochs, or has met its target or its patience; STOPPED: ended by a signal
        or a limit of steps or time, and can be resumed; FAILED: ended with an error or was killed."""
        return RUNNING if self.is_running else ENDINGS.get(self.reason, FAILED)

    @property
    def reason(self) -> str:
        """Why the last session ended, a key of ENDINGS, "error" or KILLED; "" while it is running."""
        if self.is_running:
            return ""
        ends = ("end", "resume")
        last: Mapping[str, Any] = next((event for event in reversed(self.record.events) if event["event"] in ends), {})
        if last.get("event") != "end":
            return KILLED
        return last.get("reason") or self._reason_of_earlier_versions(last["completed"])

    @property
    def is_over(self) -> bool:
        """Whether the last session has ended as requested, and not by a signal or an error."""
        return not self.is_running and self.record.is_over

    def _reason_of_earlier_versions(self, completed: bool) -> str:
        """The reason in files of earlier versions: whether an exception (including a signal) ended the run, and in
        words which limit."""
        if not completed:
            return "signal"
        stop = next((event["reason"] for event in reversed(self.record.events) if event["event"] == "stop"), "")
        if self.epochs_done >= self.epochs_wanted:  # an earlier session may have stopped
            return "epochs"
        words = {"max_steps": "--max-steps", "time_limit": "time limit", "target_accuracy": "target",
                 "patience": "in a row"}
        return next((reason for reason, part in words.items() if part in stop), "epochs")

    @cached_property
    def is_language_model(self) -> bool:
        return self.record.examples == WORDS

    @property
    def options(self) -> dict[str, Any]:
        """All options by field name. Options that an earlier version has not recorded have their defaults; options of
        another version that this one does not know are kept unchanged."""
        kind = LanguageModelConfig if self.is_language_model else Config
        try:
            return dict(kind.from_dict(self.record.config).to_dict())
        except TrainError:
            return {**({} if self.is_language_model else Config().to_dict()), **self.record.config}

    @property
    def epochs_done(self) -> int:
        return self.record.epochs[-1].epoch if self.record.epochs else 0

    @property
    def epochs_wanted(self) -> int:
        return int(self.record.config.get("epochs", 0))


def read(folder: Path, with_steps: bool = True) -> Run:
    """The run in a folder. `with_steps`: with the times of all steps; reading without them is ten times as fast.

    Raises TrainError if the folder contains no run, or its metrics cannot be read.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise TrainError(f"there is no {METRICS_FILE} in {folder}: give the output folder of a training run")
    is_running = files.is_locked(path)  # checked before reading: a run that ends meanwhile has then written its end
    try:
        record = RunRecord.read_jsonl(path, with_steps)
    except OSError as error:
        raise TrainError(f"cannot read {path} ({error.strerror}): check its permissions") from None
    if not record.session_starts:
        if path.read_bytes().lstrip()[:1] not in (b"", b"{"):
            raise TrainError(f"{path} is damaged: its first line is no JSON; restore it, or remove the run")
        raise TrainError(f"{path} names no session of a run: it was ended while it started, and can be removed")
    return Run(folder, record, is_running)


def find(folder: Path) -> list[Path]:
    """The folders of all runs in a folder: itself, or those up to DEPTH levels below it, by name. Raises TrainError if
    it is not a readable folder."""
    if not folder.is_dir():
        raise TrainError(f"there is no folder {folder}: give one that holds runs")
    try:
        return list(_find(folder, DEPTH))
    except OSError as error:
        raise TrainError(f"cannot read {error.filename} ({error.strerror}): check its permissions") from None


def _find(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / METRICS_FILE).is_file():
        yield folder
    elif depth:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from _find(Path(entry.path), depth - 1)


def size_on_disk(folder: Path) -> int:
    """Bytes of the files in a folder; a file with several names (best.npz) counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(path, name))
            except OSError:  # removed meanwhile
                continue
            sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


# --- a list of runs ---


@dataclass(frozen=True)
class Listed:
    """A run in a list."""

    folder: Path
    state: str  # RUNNING, FINISHED, STOPPED, FAILED or DAMAGED
    reason: str  # see `Run.reason`; for a damaged run: a sentence
    changed: float  # seconds since 1970, when it wrote its last line
    size: int  # bytes on disk
    model: str = ""  # see `model_of`
    epochs: int = 0  # epochs done
    epochs_wanted: int = 0
    best_top1: float | None = None  # fraction of `images`
    best_perplexity: float | None = None  # for a language model, in its place
    best_epoch: int | None = None
    images: str = ""  # validation, or training images

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        date = datetime.fromtimestamp(self.changed, timezone.utc).isoformat(timespec="seconds")
        return {**vars(self), "folder": str(self.folder), "changed": date}


def list_runs(folder: Path) -> list[Listed]:
    """All runs in a folder, up to DEPTH levels below it; the one that has changed last comes first. Raises TrainError
    if it is no folder."""
    return sorted(map(_listed, find(folder)), key=lambda run: (-run.changed, str(run.folder)))


def _listed(folder: Path) -> Listed:
    changed, size = (folder / METRICS_FILE).stat().st_mtime, size_on_disk(folder)
    try:
        with content_of_file(lambda reason: f"{folder / METRICS_FILE} has values that are none of a run ({reason})"):
            return _listed_run(read(folder, with_steps=False), changed, size)
    except TrainError as error:
        return Listed(folder, DAMAGED, str(error), changed, size)


def _listed_run(run: Run, changed: float, size: int) -> Listed:
    best = run.record.best
    listed = Listed(run.folder, run.state, run.reason, changed, size, model_of(run.record.config), run.epochs_done,
                    run.epochs_wanted)
    if not (best and best.evaluation):
        return listed
    found = best.evaluation
    listed = replace(listed, best_epoch=best.epoch, images=found.images)
    if run.is_language_model:
        return replace(listed, best_perplexity=perplexity(found.loss))
    return replace(listed, best_top1=found.top1)


def model_of(config: Mapping[str, Any]) -> str:
    """The name of a run's network, also for runs of earlier versions, which had only ResNets; "": unknown."""
    if "vocabulary" in config:
        return "language model"
    return config.get("model") or (f"resnet{config['depth']}" if "depth" in config else "")


def names_of(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder: its path below their common folder."""
    if not folders:
        return []
    paths = [os.path.abspath(folder) for folder in folders]
    common = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.path.relpath(path, common) for path in paths]
