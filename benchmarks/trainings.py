"""Shared by the programs that train whole runs: options, data, starting `python -m train` as a user does, reading its
validations, and results that are kept as they come."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import record

from common.command_line import Positive, option_name
from common.environment import git_commit, hardware
from common.errors import error_of
from pipelines import MEAN, STD, LoaderConfig
from pipelines.decoded import decode_once
from pipelines.sources import Source, open_source
from train.config import Config
from train.presets import load_preset

Line = dict[str, Any]  # a line of a .jsonl


@dataclass(frozen=True)
class TrainingOptions:
    """Options of programs that train."""

    preset: str = "cifar10_resnet18"
    """The preset that defines network, images and recipe."""
    data: Path = record.REAL_DATA / "cifar10"
    """CIFAR-10 in any form that the loader reads."""
    seeds: Positive = 3
    """Number of runs of each kind; a published result needs 3."""
    results: Path = record.RESULTS
    """Folder to write to."""


@dataclass(frozen=True)
class SideBySide:
    """Options of programs that train several runs at a time."""

    side_by_side: Positive = 4
    """Runs of ours at a time when only accuracies count: one run is too small to fill a GPU."""
    limit: Positive = 24 * 3600
    """Seconds after which no further run begins; the same command resumes later."""


# --- data ---


def decoded(data: Path) -> dict[str, np.ndarray]:
    """Decode both splits: all images (N, 32, 32, 3) uint8, and labels (N,)."""
    arrays: dict[str, np.ndarray] = {"mean": np.array(MEAN, np.float32), "std": np.array(STD, np.float32)}
    for split in ("train", "val"):
        source = decode_once(LoaderConfig(data=str(data), split=split, cache_gib=None), open_source(data, split))
        arrays[f"{split}_images"] = np.stack([source.feed(i) for i in range(len(source))])
        arrays[f"{split}_labels"] = np.array([source.label(i) for i in range(len(source))])
    return arrays


def write_images(source: Source, classes: Iterable[int], folder: Path, per_class: int | None = None,
                 seed: int = 0) -> None:
    """Write class folders with the encoded images of some classes: all, or a number of each sampled by the seed."""
    labels = np.array([source.label(i) for i in range(len(source))])
    for label in classes:
        (indices,) = np.nonzero(labels == label)
        if per_class:
            indices = np.random.default_rng((seed, label)).choice(indices, per_class, replace=False)
        place = folder / source.class_names[label]
        place.mkdir(parents=True)
        for i in indices:
            (place / f"{i}.jpg").write_bytes(source.read(int(i)).tobytes())


# --- runs ---


def options_of(config: Config) -> list[str]:
    """The options of `python -m train` that turn a preset into this configuration: all that differ from the preset, and
    the warm-up, whose default depends on the number of epochs."""
    preset = load_preset(config.config)
    changed = [name for name, value in vars(config).items()
               if value != getattr(preset, name) or name == "warmup_epochs"]
    return [text for name in changed for text in _option(name, getattr(config, name))]


def _option(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [option_name(name) if value else option_name(f"no_{name}")]
    return [option_name(name), *map(str, value if isinstance(value, tuple) else (value,))]


def command(*arguments: object) -> list[str]:
    """The command `python -m train` with these arguments."""
    return [sys.executable, "-W", "ignore", "-m", "train", *map(str, arguments)]


def run_program(words: Sequence[str], log: Path) -> None:
    """Run a command with its output in a file; raises its error."""
    with log.open("w") as output:
        code = subprocess.run(words, cwd=record.ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
    if code:
        raise error_of(code)(f"{' '.join(words[4:])} ended with exit code {code}: {log.read_text()[-2000:]}")


def arguments_of(config: Config, data: Path, seed: int, run: Path) -> list[str]:
    """The arguments of `python -m train` for a run whose results go to the folder `run`."""
    return ["--config", config.config, "--data", str(data), "--seed", str(seed), *options_of(config), "--output",
            str(run), "--no-tensorboard"]


def train(config: Config, data: Path, seed: int, run: Path, *others: object) -> None:
    """Train a whole run in the folder `run`, with its output in a file beside it; raises its error."""
    run_program(command(*arguments_of(config, data, seed, run), *others), run.with_name(f"{run.name}.log"))


def validations(folder: Path, launched: float, program: str, seed: int) -> Iterator[Line]:
    """Yield the validations of a run that was launched at the time.time() `launched`. Their seconds count from the
    start of the first step, without the time for writing checkpoints."""
    startup = (folder / "config.json").stat().st_mtime - launched  # it is written when everything is built
    apart = 0.0  # seconds that do not count
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if line["event"] == "phase" and line["name"] == "checkpoint":
            apart += line["seconds"]
        elif line["event"] == "epoch" and line["val_top1"] is not None:
            yield {"program": program, "seed": seed, "epoch": line["epoch"], "seconds": line["time"] - apart,
                   "top1": line["val_top1"], "train_loss": line["train_loss"], "startup_seconds": startup}


# --- results ---


class KeptLines:
    """The lines of a .jsonl, each written at once, so that a stopped program can resume.

    The file's first line holds the settings `about` that all lines share, such as the recipe, and the commit and GPU.
    If they differ from the present ones, this run would give other lines, so the old lines are replaced.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path, self._about = path, {**about, "commit": git_commit(), "gpu": (hardware()["gpus"] or [None])[0]}
        self.lines: list[Line] = []
        if path.exists():
            first, *rest = map(json.loads, path.read_text().splitlines() or ["{}"])
            self.lines = rest if first == json.loads(json.dumps(self._about)) else []

    def add(self, *lines: Line, show: bool = True) -> None:
        """Write and print lines; the lines of one call are written together or not at all."""
        self.lines += lines
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in (self._about, *self.lines)))
        partial.replace(self._path)
        for line in lines if show else ():
            print(json.dumps(line), flush=True)


Start = Callable[..., "Future[Line | None]"]


@contextlib.contextmanager
def until(ends: float, side_by_side: int) -> Iterator[Start]:
    """A context that gives a function to start calls in threads, at most `side_by_side` at a time.

    A call that would begin after time.monotonic() has passed `ends` returns None instead.
    """
    def in_time(run: Callable[..., Line], *arguments: object) -> Line | None:
        return run(*arguments) if time.monotonic() < ends else None

    with ThreadPoolExecutor(side_by_side) as pool:
        yield lambda run, *arguments: pool.submit(in_time, run, *arguments)


def keep_all(kept: KeptLines, runs: Sequence[Future[Line | None]]) -> bool:
    """Keep the lines of runs as they end; returns whether all have run, as time may have been short.

    Raises the error of a failed run; then no further run begins, because it would probably fail, too.
    """
    done = True
    try:
        for run in as_completed(runs):
            if line := run.result():
                kept.add(line)
            else:
                done = False
    finally:
        for run in runs:
            run.cancel()
    return done


def tell_what_is_left() -> None:
    print("--limit: not all runs have begun; the same command goes on", file=sys.stderr, flush=True)


def mean_and_deviation(values: Sequence[float]) -> str:
    """Mean and standard deviation as text, with one decimal; a single value has no deviation."""
    return f"{statistics.mean(values):.1f}" + (f" +/- {statistics.stdev(values):.1f}" if len(values) > 1 else "")
