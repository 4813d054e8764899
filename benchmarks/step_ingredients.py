"""The cost per step of each technique of today's recipes, on one GPU: steps with and without it alternate.

    python benchmarks/step_ingredients.py

For each technique ("ingredient") there is a step with and a step without it, both in one process: the steps of
`python -m train`, as in step_jpeg.py, on synthetic data, of the preset resnet50_90ep with all gammas 1. Both start from
equal weights and running statistics. Random numbers are drawn on the host, as in a run.

Writes results/<model>_fp16_b<batch>_ingredients_1gpu.json: the step with all ingredients together; its peer is the step
without any. The .jsonl file of that name has a line for each ingredient: both sides' step times, and how much longer
the step takes, in %. Each line is written at once, and the same command resumes.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from record import RESULTS, Peer, rounded, run, write_result
from step_jpeg import GPU_READINGS, TimedSteps, endless, measure, start_trainer
from torch_peer import take_turns
from trainings import KeptLines, Line

from common.command_line import Positive, read_options
from pipelines import Loader
from train.config import Config
from train.loop import Trainer
from train.options.data import SYNTHETIC
from train.presets import load_preset

# Ingredient -> its options, which change the preset.
INGREDIENTS: dict[str, dict[str, Any]] = {
    "mixup 0.2": {"mixup": 0.2},
    "CutMix 1": {"cutmix": 1.0},
    "BCE": {"loss": "bce", "label_smoothing": 0.0},
    "stochastic depth 0.05": {"stochastic_depth": 0.05},
    "stochastic depth 0.05, by block": {"stochastic_depth": 0.05, "stochastic_depth_mode": "block"},
    "dropout 0.1": {"dropout": 0.1},
    "clipping 1": {"clip_norm": 1.0},
}
SETTLING_STEPS = 100  # each step keeps 0.9 of the old running statistics
ALL = "all together"
TOGETHER = {"mixup": 0.2, "cutmix": 1.0, "loss": "bce", "label_smoothing": 0.0, "stochastic_depth": 0.05,
            "dropout": 0.1, "clip_norm": 1.0}


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    model: str = "resnet50"
    """Network."""
    batch: Positive = 256
    """Images per step."""
    steps: Positive = 80
    """Timed steps in each round."""
    rounds: Positive = 3
    """Rounds; both steps alternate."""
    results: Path = RESULTS
    """Folder to write to."""


def configuration(arguments: Options, changes: dict[str, Any]) -> Config:
    """The configuration of the measured step."""
    return replace(load_preset("resnet50_90ep"), data=SYNTHETIC, model=arguments.model, batch_size=arguments.batch,
                   num_classes=1000, dtype="float16", executor="cuda", zero_init_residual=False, **changes)


def line_of(name: str, without: Sequence[TimedSteps], with_it: Sequence[TimedSteps]) -> Line:
    """A result line: both sides' step times, and by how many % the median step with the ingredient is longer."""
    times = {side: rounded([ms for turn in turns for ms in turn.step_ms])
             for side, turns in (("without_ms", without), ("step_ms", with_it))}
    medians = {side: statistics.median(of_side) for side, of_side in times.items()}
    longer = 100 * (medians["step_ms"] / medians["without_ms"] - 1)
    readings = {what: statistics.fmean(getattr(turn.gpu, what) for turn in with_it) for what in GPU_READINGS}
    return {"change": name, "longer_percent": round(longer, 3), **readings, **times}


def settle_statistics(trainer: Trainer, images: Loader) -> None:
    """Run steps without updates until the running statistics, which frozen BatchNorms use, fit the present weights.

    While weights move, the statistics lag behind; the blocks amplify the mismatch beyond float16's range.
    """
    for batch in itertools.islice(endless(images), SETTLING_STEPS):
        trainer.executor.forward_backward(batch.data, batch.label)
    trainer.executor.read_metrics()


def compare(arguments: Options, name: str, changes: dict[str, Any], folder: Path) -> Line:
    """Measure the step without and with an ingredient, alternating."""
    trainers = {side: start_trainer(configuration(arguments, of_side), folder)
                for side, of_side in (("without", {}), ("with", changes))}
    settle_statistics(*trainers["without"])
    trainers["with"][0].executor.set_params(*trainers["without"][0].executor.get_params())
    turns = take_turns(arguments.rounds, {side: partial(measure, trainer, endless(loader), arguments.steps)
                                          for side, (trainer, loader) in trainers.items()})
    for trainer, loader in trainers.values():
        assert trainer.monitor
        trainer.monitor.close()
        loader.close()
        trainer.executor.close()
    return line_of(name, turns["without"], turns["with"])


def described(line: Line) -> str:
    """A result line as text."""
    without, with_it = (statistics.median(line[side]) for side in ("without_ms", "step_ms"))
    return f"{line['change']}: {with_it:.3f} ms, without {without:.3f} ms: {line['longer_percent']:+.2f} %"


def measure_all(arguments: Options, name: str, changes: dict[str, dict[str, Any]], headline: str,
                peer_name: str) -> None:
    """Measure the changes that results/`name`.jsonl lacks, and publish the change `headline` as the figure `name`."""
    kept = KeptLines(arguments.results / f"{name}.jsonl", {"steps": arguments.steps, "rounds": arguments.rounds})
    measured = {line["change"] for line in kept.lines}
    with tempfile.TemporaryDirectory() as folder:
        for each, options in changes.items():
            if each not in measured:
                begin = time.monotonic()
                kept.add(compare(arguments, each, options, Path(folder)), show=False)
                print(f"{described(kept.lines[-1])} ({time.monotonic() - begin:.0f} s)", flush=True)
    published = next(line for line in kept.lines if line["change"] == headline)
    write_result(name, published["step_ms"], arguments.batch, Peer(peer_name, published["without_ms"]),
                 published["power"], published["clock"], folder=arguments.results)
    print(*map(described, kept.lines), sep="\n")


def main() -> None:
    arguments = read_options(Options)
    measure_all(arguments, f"{arguments.model}_fp16_b{arguments.batch}_ingredients_1gpu", {ALL: TOGETHER} | INGREDIENTS,
                ALL, "our step without them")


if __name__ == "__main__":
    run(main)
