"""Reads run folders: a run's state, options and best accuracy; and all runs below a folder.

This module reads only metrics.jsonl, so it also works while a run trains, and after a run was killed.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import files
from train.config import Config
from train.content import content_of_file
from train.errors import TrainError
from train.language_model_config import LanguageModelConfig
from train.recording.metrics import METRICS_FILE, REASONS, VALIDATION, WORDS, EpochRow, RunRecord, perplexity

if TYPE_CHECKING:
    from typing_extensions import Self

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
DAMAGED = "damaged"  # the metrics cannot be read

# Reason for the end of a session ("reason" in metrics.jsonl) -> state of the run.
ENDINGS = {reason: FINISHED if completes else STOPPED for reason, completes in REASONS.items() if reason != "error"}
KILLED = "killed"  # reason of a run that has not recorded a reason for its end
DEPTH = 3  # folders below the given one that are searched for runs


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A run, with the results that its folder had when the run was read. `read` and `list_runs` make them."""

    folder: Path
    record: RunRecord
    """All data of the run's report, as docs/interfaces.md has them."""
    is_running: bool
    """Whether a process is writing its metrics."""
    damage: str = ""
    """Why the metrics cannot be read, a sentence; the record is empty then. "": they can."""

    @classmethod
    def read(cls, folder: Path, with_steps: bool = True) -> Self:
        """The run in a folder. `with_steps`: also read the times of all steps; without these times reading is ten times
        as fast.

        Raises TrainError if the folder holds no run, or if its metrics cannot be read.
        """
        path = folder / METRICS_FILE
        try:
            if not path.is_file():
                raise TrainError(f"there is no {METRICS_FILE} in {folder}: give the output folder of a training run")
            # tested before reading, so that the end of a run that ends meanwhile is not missed
            is_running = files.is_locked(path)
            record = RunRecord.read_jsonl(path, with_steps)
        except OSError as error:
            raise TrainError(f"cannot read {path} ({error.strerror}): check its permissions") from None
        if not record.session_starts:
            if path.read_bytes().lstrip()[:1] not in (b"", b"{"):
                raise TrainError(f"{path} is damaged: its first line is not JSON; restore it, or remove the run")
            raise TrainError(f"{path} names no session of a run: it was ended while it started, and can be removed")
        run = cls(folder, record, is_running)
        with content_of_file(lambda reason: f"{path} has values that are none of a run ({reason})"):
            run._figures()
        return run

    @classmethod
    def list_runs(cls, folders: Iterable[Path], with_steps: bool = True) -> list[Self]:
        """All runs in some folders, up to DEPTH levels below each, without duplicates; the run that changed last comes
        first. A run whose metrics cannot be read is DAMAGED. Raises TrainError for a path that is not a folder.
        """
        places: dict[str, Path] = {}
        for place in itertools.chain.from_iterable(map(find, folders)):
            places.setdefault(os.path.realpath(place), place)
        listed = [cls._read_if_sound(place, with_steps) for place in places.values()]
        return sorted(listed, key=lambda run: (-run.changed, str(run.folder)))

    @classmethod
    def _read_if_sound(cls, folder: Path, with_steps: bool) -> Self:
        try:
            return cls.read(folder, with_steps)
        except TrainError as error:
            return cls(folder, RunRecord(config={}, command="", images_per_step=0), is_running=False, damage=str(error))

    @property
    def state(self) -> str:
        """The state of the run: RUNNING. FINISHED: the run has done its epochs, or has met its target or its patience.
        STOPPED: a signal, or a limit of steps or time, has ended the run, which can be resumed. FAILED: the run ended
        with an error or was killed. DAMAGED.
        """
        if self.damage:
            return DAMAGED
        return RUNNING if self.is_running else ENDINGS.get(self.reason, FAILED)

    @property
    def reason(self) -> str:
        """The reason for the end of the last session: a key of ENDINGS, "error" or KILLED; "" while it is running;
        `damage` of a damaged run.
        """
        if self.damage or self.is_running:
            return self.damage
        ends = ("end", "resume")
        last: Mapping[str, Any] = next((event for event in reversed(self.record.events) if event["event"] in ends), {})
        if last.get("event") != "end":
            return KILLED
        return last.get("reason") or self._reason_of_earlier_versions(last["completed"])

    @property
    def is_over(self) -> bool:
        """Whether the last session has ended regularly, not by a signal or an error."""
        return not self.is_running and self.record.is_over

    def _reason_of_earlier_versions(self, completed: bool) -> str:
        """The reason in files of earlier versions: derived from whether an exception (or a signal) ended the run, and
        from the limits of the run.
        """
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
        """All options by field name. Options that an earlier version has not recorded have their defaults; options that
        only another version knows are kept unchanged.
        """
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

    @property
    def best_epoch(self) -> EpochRow | None:
        """The epoch whose weights are kept as the best: the first with the highest top-1 accuracy on the validation
        images (on the training images if the data has no validation images); None if no epoch was evaluated.
        """
        return self.record.best

    @property
    def best_top1(self) -> float:
        """The top-1 accuracy of the best epoch, a fraction of the validation images; NaN without validation.

        Data without validation images are evaluated on the training images, which says little about other images:
        `best_epoch.train_eval_top1`.
        """
        best = self.best_epoch
        return math.nan if best is None or best.val_top1 is None else best.val_top1

    @cached_property
    def changed(self) -> float:
        """The time at which the run wrote its last line, in seconds since 1970; 0 if the run's folder no longer exists.
        """
        try:
            return (self.folder / METRICS_FILE).stat().st_mtime
        except OSError:
            return 0.0

    @cached_property
    def size(self) -> int:
        """Bytes of the run's folder on disk."""
        return size_on_disk(self.folder)

    def to_dict(self) -> dict[str, Any]:
        """The values that a list of runs shows, as plain JSON values."""
        date = datetime.fromtimestamp(self.changed, timezone.utc).isoformat(timespec="seconds")
        return {"folder": str(self.folder), "changed": date, "size": self.size, **self._figures()}

    def _figures(self) -> dict[str, Any]:
        """The values of `to_dict` that are computed from the record."""
        best = self.best_epoch
        evaluated = best.evaluation if best else None
        top1 = evaluated.top1 if evaluated and not self.is_language_model else None
        is_of_validation = evaluated is not None and evaluated.images == VALIDATION
        return {
            "state": self.state, "reason": self.reason, "model": self.record.model,
            "epochs": self.epochs_done, "epochs_wanted": self.epochs_wanted,
            "best_epoch": best.epoch if best else None,
            "best_top1": top1 if is_of_validation else None,
            "best_train_eval_top1": None if is_of_validation else top1,
            "best_perplexity": perplexity(evaluated.loss) if evaluated and self.is_language_model else None,
        }


def find(folder: Path) -> list[Path]:
    """The folders of all runs in a folder: the folder itself, or the run folders up to DEPTH levels below it, sorted by
    name. Raises TrainError if the folder cannot be read.
    """
    try:
        if not folder.is_dir():
            raise TrainError(f"there is no folder {folder}: give one that holds runs")
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
            except OSError:  # the file was removed meanwhile
                continue
            sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def names_of(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder: its path below the common folder of all."""
    if not folders:
        return []
    paths = [os.path.abspath(folder) for folder in folders]
    common = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.path.relpath(path, common) for path in paths]
