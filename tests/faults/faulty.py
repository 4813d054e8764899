"""Shared by the fault tests: a training run to harm, checks that must hold afterwards, and the table of tries.

A test tries a fault once, at a random moment or place, and is repeated `tries()` times. The first few tries are marked
`long`, for `make test-long`, the others `slow`: `make test-faults` runs all. RESNET_FAULT_TRIES sets their number.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train import checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]
LIGHT = REPOSITORY / "tests" / "light"  # on PYTHONPATH, it shortens a run
TRIES = int(os.environ.get("RESNET_FAULT_TRIES", "5"))
EPOCHS, STEPS_PER_EPOCH = 2, 6  # 27 images in batches of 4
PATIENCE = 300  # seconds for a run to end on a busy machine; not a promise of the program
OPTIONS = ("--model", "resnet18", "--image-size", "32", "--batch-size", "4", "--epochs", str(EPOCHS), "--device", "cpu",
           "--num-threads", "1", "--no-tensorboard", "--warmup-epochs", "0", "--learning-rate", "0.5", "--optimizer",
           "sgd", "--weight-decay", "1e-4", "--validate-every", "1", "--log-every", "1",
           "--checkpoint-minutes", "0.00001")  # after each step, so that many faults hit a save


def tries(few: int = 0) -> pytest.MarkDecorator:
    """Repeat a test; the first `few` tries are marked long, all others slow."""
    marks = [pytest.mark.long if number < few else pytest.mark.slow for number in range(max(few, TRIES))]
    return pytest.mark.parametrize("number", [pytest.param(number, marks=mark) for number, mark in enumerate(marks)])


class FaultyRun:
    """`python -m train` in `folder`: two epochs of six steps, with a checkpoint after each step. Starting it again with
    the same command resumes it (--resume auto)."""

    steps_per_epoch = STEPS_PER_EPOCH

    def __init__(self, folder: Path, data: Path, *options: str, command: Sequence[str] = ("-m", "train")) -> None:
        self.folder = folder
        self.command = [sys.executable, *command, "--output", str(folder), "--resume", "auto",
                        "--data", str(data), *OPTIONS, *options]
        self.process: subprocess.Popen[str] | None = None

    @property
    def steps(self) -> int:
        """The number of steps of a whole run."""
        return self.steps_per_epoch * EPOCHS

    def start(self, **environment: str) -> None:
        """Start the run; its output goes to files beside its folder."""
        assert self.process is None or self.process.poll() is not None
        paths = os.pathsep.join([str(LIGHT), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment}
        with self._words("out").open("w") as out, self._words("err").open("w") as err:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=err, env=env, start_new_session=True,
                                            preexec_fn=hear_signals)

    def _words(self, kind: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{kind}")

    @property
    def err(self) -> str:
        return self._words("err").read_text(errors="replace")

    @property
    def out(self) -> str:
        return self._words("out").read_text(errors="replace")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events in metrics.jsonl so far; only complete lines."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def wait_for(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Wait until a condition holds or the run ends; returns whether it holds."""
        end = time.monotonic() + seconds
        assert self.process
        while not condition():
            if self.process.poll() is not None:
                return condition()
            assert time.monotonic() < end, f"still waiting after {seconds} s: {self.err}"
            time.sleep(0.005)
        return True

    def wait_for_step(self, step: int) -> bool:
        """Wait until this step is logged or the run ends; returns whether it is logged."""
        return self.wait_for(lambda: len(self.events("steps")) >= step)

    def end(self, seconds: float = PATIENCE) -> int:
        """Wait for the run's end and return its exit code. Fails if it does not end by itself in time."""
        assert self.process
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run has not ended after {seconds} s: {self.out[-500:]} {self.err[-500:]}")

    def kill(self) -> None:
        """Kill the run and all its processes at once, also stopped ones."""
        if self.process and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def members(self) -> dict[int, tuple[int, int]]:
        """Parent and rank of each process of a distributed run: the training processes and those that they forked."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                variables = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
                rank = [entry for entry in variables if entry.startswith(b"HOROVOD_RANK=")]
                if rank and os.fsencode(str(self.folder)) + b"\0" in command:
                    parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                    found[int(folder.name)] = int(parent), int(rank[0].partition(b"=")[2])
        return found

    def ranks(self) -> dict[int, int]:
        """The ids of the training processes, by rank."""
        members = self.members()
        return {rank: pid for pid, (parent, rank) in members.items() if parent not in members}

    def finish(self) -> int:
        """Start the run again, and let it finish undisturbed."""
        self.start()
        return self.end()


def hear_signals() -> None:
    """Restore the default handling of signals, as in a terminal: processes in the background or under nohup ignore
    some."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_a_random_time(run: FaultyRun, rng: np.random.Generator, least: int = 0) -> None:
    """Wait for a random step, `least` or later, and then for a random part of the time of a step and its save. The run
    may have ended by then."""
    run.wait_for_step(int(rng.integers(least, run.steps + 1)))
    time.sleep(rng.uniform(0, 0.2))  # hits any moment; it waits for nothing


def assert_nothing_lost(run: FaultyRun) -> None:
    """Check that every checkpoint is intact, and that the newest is at least as new as the last reported save."""
    told = [event["step"] for event in run.events("checkpoint")]
    folder = run.folder / "checkpoints"
    found = sorted(folder.glob("*.npz")) if folder.exists() else []
    steps = [checkpoint.load(path).progress.step for path in found]
    assert max(steps, default=0) >= max(told, default=0), f"saved: {told}; there: {[path.name for path in found]}"


def assert_same_end(run: FaultyRun, unbroken: FaultyRun, same_statistics: bool = True) -> None:
    """Check that the last and the best checkpoint have the bits of the unbroken run. Without `same_statistics`, running
    statistics may differ by rounding, because several processes resume from the mean of their statistics."""
    last = max(path.name for path in (unbroken.folder / "checkpoints").glob("step-*.npz"))
    for name in (last, checkpoint.BEST):
        ours, theirs = (checkpoint.load(each.folder / "checkpoints" / name) for each in (run, unbroken))
        assert ours.progress == theirs.progress, name
        assert ours.loader_states == theirs.loader_states, name
        assert_equal_arrays(ours.params, theirs.params, f"{name}, params")
        if same_statistics:
            assert_equal_arrays(ours.aux, theirs.aux, f"{name}, aux")
        for key in ours.aux:
            np.testing.assert_allclose(ours.aux[key], theirs.aux[key], rtol=1e-5, atol=1e-6, err_msg=f"{name}, {key}")
        for slot in ours.state.keys() | theirs.state.keys():
            assert_equal_arrays(ours.state[slot], theirs.state[slot], f"{name}, {slot}")
    assert not list(run.folder.rglob("*.partial")), "what a save has left behind is still there"


def assert_equal_arrays(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], where: str) -> None:
    assert ours.keys() == theirs.keys(), where
    differ = [name for name in ours if not np.array_equal(ours[name], theirs[name])]
    assert not differ, f"{where}: {differ} differ"


def assert_sentence(run: FaultyRun, *words: str) -> None:
    """Standard error holds one sentence with these words, and no stack trace."""
    assert "Traceback" not in run.err, run.err
    errors = [line for line in run.err.splitlines() if line.startswith("error: ")]
    assert any(all(re.search(word, line) for word in words) for line in errors), run.err


# --- the table ---


def title(function: Any) -> str:
    """The title of a fault: the first line of its test's docstring."""
    return str(function.__doc__).splitlines()[0].rstrip(".")


def table(outcomes: Iterable[tuple[str, str]]) -> str:
    """A Markdown table, from each fault's title and the outcome of each try."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for fault, outcome in outcomes:
        counts[fault][outcome] += 1
    lines = ["| fault | tries | survived |", "|---|---|---|"]
    total = [0, 0]
    for fault, found in counts.items():
        row = [found["passed"] + found["failed"], found["passed"]]
        if row[0]:
            lines.append(f"| {fault} | {row[0]} | {row[1]} |")
            total = [total[0] + row[0], total[1] + row[1]]
    return "\n".join([*lines, f"| all | {total[0]} | {total[1]} |"])
