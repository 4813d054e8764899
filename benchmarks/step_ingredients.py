"""The step with each ingredient of today's recipes, beside the step without, in turn, in one process, on one GPU.

    python benchmarks/step_ingredients.py

For each ingredient both steps are made and take turns: those of `python -m train`, as in step_jpeg.py, on synthetic
data, of the preset resnet50_90ep from all gammas 1, both from the same weights and running statistics. What is random
in a step is drawn as in a run, on the host.

Writes results/<model>_fp16_b<batch>_ingredients_1gpu.json, the step with all of them together, whose peer is the step
without any in the same turns, and as lines of the .jsonl file of that name both sides' step times for each ingredient,
and how much longer the step takes, in %. Lines are written as they are measured, and the same command goes on where it
was stopped.
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
from step_jpeg import GPU_READINGS, Turn, endless, measure, start_trainer
from torch_peer import take_turns
from trainings import KeptLines, Line

from common.command_line import Positive, read_options
from pipelines import Loader
from train.config import Config
from train.loop import Trainer
from train.options.data import SYNTHETIC
from train.presets import load_preset

# By name, what an ingredient changes in the preset.
INGREDIENTS: dict[str, dict[str, Any]] = {
    "mixup 0.2": {"mixup": 0.2},
    "CutMix 1": {"cutmix": 1.0},
    "BCE": {"loss": "bce", "label_smoothing": 0.0},
    "stochastic depth 0.05": {"stochastic_depth": 0.05},
    "stochastic depth 0.05, by block": {"stochastic_depth": 0.05, "stochastic_depth_mode": "block"},
    "dropout 0.1": {"dropout": 0.1},
    "clipping 1": {"clip_norm": 1.0},
}
SETTLING_STEPS = 100  # running statistics keep 0.9 of what they were in each
ALL = "all together"
TOGETHER = {"mixup": 0.2, "cutmix": 1.0, "loss": "bce", "label_smoothing": 0.0, "stochastic_depth": 0.05,
            "dropout": 0.1, "clip_norm": 1.0}


@dataclass(frozen=True)
class Options:
    """What is measured."""

    model: str = "resnet50"
    """Network."""
    batch: Positive = 256
    """Images a step."""
    steps: Positive = 80
    """Counted steps in each turn."""
    rounds: Positive = 3
    """Turns of both."""
    results: Path = RESULTS
    """Folder to write to."""


def configuration(arguments: Options, changes: dict[str, Any]) -> Config:
    """The step that is measured."""
    return replace(load_preset("resnet50_90ep"), data=SYNTHETIC, model=arguments.model, batch_size=arguments.batch,
                   num_classes=1000, dtype="float16", executor="cuda", zero_init_residual=False, **changes)


def line_of(name: str, without: Sequence[Turn], with_it: Sequence[Turn]) -> Line:
    """Both sides' step times, and by how much the step with the ingredient is longer, of the medians, in %."""
    times = {side: rounded([ms for turn in turns for ms in turn.step_ms])
             for side, turns in (("without_ms", without), ("step_ms", with_it))}
    medians = {side: statistics.median(of_side) for side, of_side in times.items()}
    longer = 100 * (medians["step_ms"] / medians["without_ms"] - 1)
    readings = {what: statistics.fmean(getattr(turn.gpu, what) for turn in with_it) for what in GPU_READINGS}
    return {"change": name, "longer_percent": round(longer, 3), **readings, **times}


def settle_statistics(trainer: Trainer, images: Loader) -> None:
    """Let the running statistics, with which frozen BatchNorms normalise, become those of the weights as they are: of
    weights that move they lag behind, and what the blocks amplify is then beyond float16."""
    for batch in itertools.islice(endless(images), SETTLING_STEPS):
        trainer.executor.forward_backward(batch.data, batch.label)
    trainer.executor.read_metrics()


def compare(arguments: Options, name: str, changes: dict[str, Any], folder: Path) -> Line:
    """The step without and with an ingredient, in turn."""
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
    """In one line for people."""
    without, with_it = (statistics.median(line[side]) for side in ("without_ms", "step_ms"))
    return f"{line['change']}: {with_it:.3f} ms, without {without:.3f} ms: {line['longer_percent']:+.2f} %"


def measure_all(arguments: Options, name: str, changes: dict[str, dict[str, Any]], headline: str,
                peer_name: str) -> None:
    """Measure the changes that results/`name`.jsonl has not, and publish the one called `headline` as `name`."""
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
