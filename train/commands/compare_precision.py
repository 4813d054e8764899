"""The command compare-precision: train one preset in each precision, and compare time, memory, speed and accuracy.

Each network and precision is a run of `python -m train` in its own process and folder, with otherwise equal options. If
the command is repeated, complete runs are skipped, and an interrupted run is resumed. The table is written after each
run, with the rows so far.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common import files
from common.command_line import part_of, to_arguments
from common.errors import error_of
from common.program import TRAIN, own_process
from train import devices, models
from train.commands.trainings import check_same, is_complete
from train.config import Config, check_untrained, configure, default_warmup
from train.options.commands import Comparison
from train.presets import load_preset
from train.processes.signals import STOPPING, StoppedBySignal, ending, handled
from train.processes.worker import stop_with_us
from train.recording.metrics import METRICS_FILE, VALIDATION, RunRecord, accuracy_of, tells_top5
from train.report import plots

RESULT = "comparison.json"

# Precision -> the fields of the configuration that select it.
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "tf32": False},
    "tf32": {"dtype": "float32", "tf32": True},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
}


@dataclass(frozen=True)
class Row:
    """One run in the comparison."""

    model: str
    precision: str
    largest_batch: int | None  # largest training batch that fits into the GPU's memory; None on the CPU
    images_per_sec: float
    seconds: float  # duration of the whole run, with validation and checkpoints
    train_loss: float | None  # training loss of the last epoch, nats per image
    # images on which the next two fields were measured: "validation" or "training images"; None: not measured
    evaluated: str | None
    top1: float | None  # top-1 of the last epoch, fraction of images
    top5: float | None
    num_classes: int | None


def main(values: Mapping[str, Any]) -> None:
    """Train and compare. Raises UserError and StoppedBySignal."""
    check_untrained(values)
    config = configure(values, devices.default_config(values, local_rank=0))
    wanted = part_of(Comparison, values)
    networks = models.named(wanted.models) or [config.model]
    output = Path(config.output or f"runs/compare_precision-{config.config}")
    files.check_place(output / RESULT, "give another --output")
    placement = devices.choose(config, local_rank=0)
    precisions: Sequence[str] = list(dict.fromkeys(wanted.precisions))
    if placement.executor != "cuda":
        precisions = ["float32"]
        print(f"only float32 is trained here: the other precisions need the cuda executor, and this run has the "
              f"{placement.executor} executor", flush=True)
    cells = [(model, precision) for model in networks for precision in precisions]
    runs: dict[tuple[str, str], RunRecord] = {}
    for number, (model, precision) in enumerate(cells, start=1):
        folder = output / f"{model}_{precision}"
        own = replace(config, model=model, output=str(folder), **PRECISIONS[precision])
        print(f"== {model} in {precision}" + f" ({number} of {len(cells)})" * (len(cells) > 1), flush=True)
        runs[model, precision] = run_training(own, folder)
        rows = [_row(*cell, record) for cell, record in runs.items()]
        title = f"{config.config}: {_machine(next(iter(runs.values())))}"
        so_far = f"{number} of {len(cells)} runs so far.\n\n" * (number < len(cells))
        files.write(output / RESULT, json.dumps([dataclasses.asdict(row) for row in rows], indent=1).encode())
        files.write(output / "comparison.md", f"# {title}\n\n{so_far}{_markdown(rows)}".encode())
    figure = plots.precisions({model: {p: runs[model, p] for p in precisions} for model in networks}, title)
    files.write(output / "comparison.png", figure)
    _print(rows)
    print(f"comparison: {output / 'comparison.md'}, {output / 'comparison.png'}")


# --- the runs ---


def run_arguments(config: Config) -> list[str]:
    """The arguments of `python -m train` that begin or resume a run with this configuration."""
    preset = load_preset(config.config)
    # the run shortens the warm-up in the same way
    preset = replace(preset, warmup_epochs=default_warmup(preset, config.epochs))
    # --epochs is always given. Without --epochs, the demonstration preset would choose its length by the machine's
    # speed.
    own = to_arguments(config, preset)
    return ["--config", config.config, *own, "--epochs", str(config.epochs), "--resume", "auto"]


def run_training(config: Config, folder: Path) -> RunRecord:
    """Begin or resume a run, or do nothing if the run is complete. Returns the run's record. Raises TrainError if the
    run fails, and StoppedBySignal.
    """
    check_same(config, folder, "comparison")
    if is_complete(config, folder):
        print("already complete, skipped", flush=True)
        return RunRecord.read_jsonl(folder / METRICS_FILE)
    command = own_process(TRAIN, *run_arguments(config))
    # On a signal the child saves a checkpoint, and this process waits for the child. Ctrl-C reaches both processes, and
    # this process forwards it, so the child gets the signal twice at once. The child counts both as one signal. If this
    # process is killed, the child must stop too.
    with subprocess.Popen(command, preexec_fn=stop_with_us) as child, handled(
        dict.fromkeys(ending(), lambda number, frame: child.send_signal(number))
    ):
        code = child.wait()
    for number in STOPPING:
        if code in (128 + number, -number):  # -number: the signal came before the training loop had started
            raise StoppedBySignal(number, "stopped: repeat the command to resume")
    if code:
        raise error_of(code)(f"the run in {folder} ended with exit code {code}, see its message above; repeat the "
                             "command to resume")
    return RunRecord.read_jsonl(folder / METRICS_FILE)


# --- the result ---


def _row(model: str, precision: str, record: RunRecord) -> Row:
    memory = [event for event in record.events if event["event"] == "memory"]
    last = record.epochs[-1] if record.epochs else None
    found = last.evaluation if last else None
    loss = last.train_loss if last else record.loss_curve[-1].loss if record.loss_curve else None
    return Row(model, precision, memory[-1]["largest_batch"] if memory else None, record.speed().mean, record.seconds,
               loss, found and found.images, found and found.top1, found and found.top5, record.num_classes)


def _machine(record: RunRecord) -> str:
    return (record.hardware.get("gpus") or [record.hardware.get("cpu", "")])[0]


def _headings(rows: Sequence[Row]) -> tuple[str, ...]:
    accuracy = accuracy_of(next((row.evaluated for row in rows if row.evaluated), VALIDATION))
    return ("network", "precision", "largest batch", "images/sec", "speed-up", "time", "training loss", accuracy,
            *["top-5"] * _tell_top5(rows))


def _tell_top5(rows: Sequence[Row]) -> bool:
    return any(tells_top5(row.num_classes) for row in rows)


def _cells(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """The table's cells. The speed-up is relative to fp32 with the same network, or to the first run if no fp32 run
    exists.
    """
    base: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: row.precision != "float32"):
        base.setdefault(row.model, row.images_per_sec)
    for row in rows:
        speed_up = row.images_per_sec / base[row.model]
        yield (row.model, row.precision, _shown(row.largest_batch, ",d"), f"{row.images_per_sec:,.1f}",
               f"{speed_up:.2f}", f"{row.seconds:,.1f} s", _shown(row.train_loss, ".4f"), _shown(row.top1, ".2%"),
               *[_shown(row.top5, ".2%")] * _tell_top5(rows))


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _markdown(rows: Sequence[Row]) -> str:
    headings = _headings(rows)
    lines = [headings, tuple("---" for _ in headings), *_cells(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _print(rows: Sequence[Row]) -> None:
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(_headings(rows)):
        table.add_column(heading, justify="left" if number < 2 else "right")
    for cells in _cells(rows):
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
