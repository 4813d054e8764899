"""The command sweep: trains several seeds or options, one after the other or one per GPU, and compares the runs.

Each training is a run of `python -m train` in its own process and folder. If the command is repeated, finished runs are
skipped, and a stopped run is resumed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from common import files
from common.command_line import part_of
from common.errors import ProgramError
from common.output import print_line
from common.program import TRAIN, own_process
from train.commands import compare
from train.commands.grid import Point, check_data, plan
from train.commands.trainings import check_same, is_complete
from train.config import CONFIG_FILE
from train.errors import TrainError
from train.options.runs import Sweep
from train.processes import topology
from train.processes.signals import STOPPING, StoppedBySignal, ending, handled
from train.processes.worker import Slot, how_it_ended, stop_ours_with_us
from train.recording.metrics import METRICS_FILE, accuracy_of
from train.report.comparison import Comparison
from train.report.comparison import compare as compare_runs
from train.report.runs import Run, size_on_disk

NAME = "comparison"  # name of the files that a sweep writes at its end, without suffix
POLL_SECONDS = 0.2
LOOK_SECONDS = 5.0  # seconds between two checks for new epochs of parallel trainings
LAST_WORDS = 4096  # bytes at the end of a log that are searched for an error
# Exit codes of a training that was stopped.
SIGNAL_CODES = {code for number in STOPPING for code in (128 + number, -number)}


def main(values: Mapping[str, Any]) -> None:
    """Train all points and compare them. Raises UserError, StoppedBySignal, and ProgramError if a training fails."""
    own = part_of(Sweep, values)
    points = plan(own, values)
    check_data(points)
    output = points[0].folder.parent
    _check_output(output)
    slots = _slots(own.parallel, points)
    for point in points:
        check_same(point.config, point.folder, "sweep")
    files.check_place(output / f"{NAME}.json", "give another --output")
    taken = TrainError(f"another sweep is at work in {output}: wait for its end, or give another --output")
    with files.alone_in(output, taken):
        trainings = _Trainings(points, slots)
        trainings.run()
        if found := _compare(points):
            compare.show(found)
            print(f"comparison: {output / NAME}.html, .md and .json")
    if failed := trainings.failed:
        raise ProgramError(f"{len(failed)} of {len(points)} runs failed ({', '.join(failed)}), see their messages "
                           "above: repeat the command to try them again")


def _check_output(output: Path) -> None:
    if (output / CONFIG_FILE).exists():
        raise TrainError(f"{output} is the folder of a run, and a sweep's runs have folders of their own below it: "
                         "give another --output")


# --- training ---


def _slots(parallel: int, points: Sequence[Point]) -> list[Slot | None]:
    """The share of the machine for each run of those that train in parallel; None: the whole machine. Raises TrainError
    if there are fewer GPUs than requested.
    """
    on_gpu = any(point.config.device != "cpu" for point in points)
    gpus = topology.read_gpus() if on_gpu and parallel != 1 else []
    count = min(parallel or len(gpus) or 1, len(points))
    if gpus and count > len(gpus):
        raise TrainError(f"--parallel {parallel} needs {count} GPUs, and there {'are' if len(gpus) > 1 else 'is'} "
                         f"{len(gpus)} here: lower --parallel, or give --device cpu")
    if count == 1:
        return [None]
    cores = topology.assign_cores(gpus, count)
    return [Slot(i, gpus[i] if gpus else None, cores[i], bound=True) for i in range(count)]


@dataclass
class _Running:
    """A training that is running."""

    point: Point
    slot: Slot | None
    process: subprocess.Popen[bytes]
    started: float
    log: Path | None  # log file of the training, if it runs in parallel
    epochs: int  # epochs printed so far


class _Trainings:
    """Runs the trainings of a sweep, one at a time in each of the `slots`.

    `failed`: names of failed trainings. `obstacle`: why no further training is started; None if there is no obstacle.
    """

    def __init__(self, points: Sequence[Point], slots: Sequence[Slot | None]) -> None:
        self.failed: list[str] = []
        self.obstacle: StoppedBySignal | ProgramError | None = None
        self._points, self._left = points, list(points)
        self._free, self._num_slots = list(slots), len(slots)
        self._running: list[_Running] = []
        self._seconds: list[float] = []  # durations of the successful trainings
        self._largest = 0  # bytes on disk of the largest finished run
        self._looked = time.monotonic()

    def run(self) -> None:
        """Run the trainings until all are complete. Raises StoppedBySignal, and ProgramError if the disk is full."""
        with handled(dict.fromkeys(ending(), self._stop)):
            try:
                while self._running or (self._left and not self.obstacle):
                    while self._left and self._free and not self.obstacle:
                        self._begin(self._left.pop(0))
                    time.sleep(POLL_SECONDS)
                    self._collect()
            finally:
                for each in self._running:  # nonempty only if starting a training has raised an error
                    each.process.terminate()
                    each.process.wait()
        if self.obstacle:
            raise self.obstacle

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the trainings, which then save checkpoints. The trainings also receive Ctrl-C from the
        terminal, and count both signals as one.
        """
        if self._num_slots > 1 and not self.obstacle:  # a training that runs alone prints the message itself
            print_line("stopping: the trainings save their state")
        self.obstacle = StoppedBySignal(number, "stopped: repeat the command to resume")
        for each in self._running:
            each.process.send_signal(number)

    def _begin(self, point: Point) -> None:
        number = f"{self._points.index(point) + 1} of {len(self._points)}"
        if is_complete(point.config, point.folder):
            self._largest = max(self._largest, size_on_disk(point.folder))
            print(f"== {point.name} ({number}): finished before, skipped", flush=True)
            return
        if not self._has_room(point.folder.parent):
            return
        slot = self._free.pop(0)
        log = point.folder.with_name(f"{point.name}.log") if slot else None
        where = f" on {f'GPU {slot.gpu.visible}' if slot.gpu else 'the CPU'}, output in {log}" if slot else ""
        print(f"== {point.name} ({number}{self._time_left()}){where}", flush=True)
        epochs_before = len(_epochs(point.folder))
        with log.open("ab") if log else contextlib.nullcontext() as output:
            process = subprocess.Popen(own_process(TRAIN, *point.arguments), env=_environment(slot), stdout=output,
                                       stderr=output, preexec_fn=stop_ours_with_us)
        if slot:
            with contextlib.suppress(ProcessLookupError):  # the process has already ended
                os.sched_setaffinity(process.pid, slot.cores)
        self._running.append(_Running(point, slot, process, time.monotonic(), log, epochs_before))
        # the signal came while this training was starting, so the training did not receive the signal
        if isinstance(self.obstacle, StoppedBySignal):
            process.send_signal(self.obstacle.exit_code - 128)

    def _has_room(self, output: Path) -> bool:
        """Whether the disk has room for another run of the size of the largest finished run. If not, sets `obstacle`.
        """
        free = shutil.disk_usage(output).free
        if free < self._largest:
            self.obstacle = ProgramError(f"{output} has {free / 2**30:.2f} GiB left, and a run of this sweep takes "
                                         f"{self._largest / 2**30:.2f}: make room, and repeat the command to resume")
        return not self.obstacle

    def _time_left(self) -> str:
        """Estimated time of the trainings that have not started, including this one, from the mean duration of finished
        trainings.
        """
        if not self._seconds:
            return ""
        seconds = (len(self._left) + 1) / self._num_slots * sum(self._seconds) / len(self._seconds)
        return f", about {timedelta(seconds=round(seconds))} left"

    def _collect(self) -> None:
        """Collect trainings that have ended, and print new epochs of parallel trainings."""
        ended = [each for each in self._running if each.process.poll() is not None]
        if ended or time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            for each in self._running:
                _tell_epochs(each)
        for each in ended:
            self._running.remove(each)
            self._free.append(each.slot)
            self._end(each)

    def _end(self, each: _Running) -> None:
        point, code = each.point, each.process.returncode
        if not code and is_complete(point.config, point.folder):
            self._seconds.append(time.monotonic() - each.started)
            self._largest = max(self._largest, size_on_disk(point.folder))
        elif not (isinstance(self.obstacle, StoppedBySignal) and code in SIGNAL_CODES):
            self.failed.append(point.name)
            print(f"== {point.name} {_how(code)}{_last_error(each.log) if each.log else ''}", flush=True)


def _how(code: int) -> str:
    """How a training that is not complete ended."""
    if not code:
        return "ended before it was finished"
    return "was stopped by a signal" if code in SIGNAL_CODES else how_it_ended(code)


def _last_error(log: Path) -> str:
    """The last error message of a training, and the file that contains the message."""
    lines = log.read_bytes()[-LAST_WORDS:].decode(errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.startswith("error: ")), "")
    return f" ({log}); {said}" if said else f" ({log})"


def _epochs(folder: Path) -> list[str]:
    """A line for each epoch that a run has completed."""
    try:
        run = Run.read(folder, with_steps=False)
    except TrainError:  # the training has not begun yet
        return []
    return [f"epoch {row.epoch} of {run.epochs_wanted}"
            + (f", {accuracy_of(row.evaluation.images)} {row.evaluation.top1:.1%}" if row.evaluation else "")
            for row in run.record.epochs]


def _tell_epochs(each: _Running) -> None:
    """Print the epochs that a parallel training has completed since the last call."""
    if each.slot:
        done = _epochs(each.point.folder)
        for epoch in done[each.epochs:]:
            print(f"{each.point.name}: {epoch}", flush=True)
        each.epochs = len(done)


def _environment(slot: Slot | None) -> dict[str, str]:
    if slot is None:
        return dict(os.environ)
    own = {"CUDA_VISIBLE_DEVICES": slot.gpu.visible} if slot.gpu else {}
    return {**os.environ, **slot.environment, **own}


# --- the comparison ---


def _compare(points: Sequence[Point]) -> Comparison | None:
    """Write the comparison of the runs; None if no run has a step."""
    begun = [point.folder for point in points if (point.folder / METRICS_FILE).exists()]
    try:
        found = compare_runs(begun)
    except TrainError:
        return None
    for ending_, form in compare.ENDINGS.items():
        compare.save(found, points[0].folder.with_name(f"{NAME}{ending_}"), form)
    return found
