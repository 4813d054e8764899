"""From Enter to the result: the seconds of whole commands, cold and warm, and where they go.

    python benchmarks/start.py                                      # this machine's GPU, or its CPU where there is none
    python benchmarks/start.py --other ../before --device cpu       # and those of another checkout, in turn
    PEER_PYTHON=... python benchmarks/start.py --torchvision vision/references/classification/train.py --timm train.py

The commands are those of a newcomer with 100 photographs in ten folders: train (30 epochs of ResNet-50 at 224 pixels on
a GPU, 2 epochs of ResNet-18 at 64 pixels on a CPU), predict one image, validate, export and quantize. On a GPU also the
whole preset cifar10_resnet18. A cold command finds neither bytecode of Python's modules nor anything in the cache
(kernels, plans, times); the warm ones that follow find both. Files are in the system's memory in both cases. The first
step is there when its line is printed.

Appends to results/start_1gpu.jsonl or start_cpu.jsonl a line for each command and checkout: all seconds, those of the
CPU (which other programs on the machine hardly change), and the phases of the median run. Prints a table last.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

import record
from finetune_photographs import NUM_CLASSES, write_data

from common.command_line import Positive, read_options
from common.environment import git_commit, hardware, versions
from common.errors import ProgramError, UserError
from common.nvidia_gpus import find_gpus

PHOTOGRAPHS_PER_CLASS = 10
TASKS = ("train", "predict", "validate", "export", "quantize", "cifar10")
ON_CPU, ON_GPU = TASKS[:5], ("train", "predict", "validate", "cifar10")  # export and quantize compute on the CPU anyway
FIRST_STEP = re.compile(r"\bstep 1/|^Epoch: \[0\]|^Train: 0 ")  # ours, torchvision's, timm's
NETWORK = {"cpu": "--config cpu_sample --model resnet18 --image-size 64 --batch-size 16 --epochs 2",
           "gpu": "--config resnet50_90ep --batch-size 32 --epochs 30"}


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device; auto: a GPU if there is one."""
    other: Annotated[Path | None, "FOLDER"] = None
    """Another checkout, measured in turn with this one."""
    tasks: tuple[Literal["train", "predict", "validate", "export", "quantize", "cifar10"], ...] = ()
    """Commands to measure; default: all of the device."""
    rounds: Positive = 5
    """Warm runs of each command."""
    data: Path = record.SAMPLE
    """Class folders of photographs."""
    cifar10: Path = record.REAL_DATA / "cifar10"
    """CIFAR-10 in any form that the loader reads."""
    torchvision: Annotated[Path | None, "FILE"] = None
    """torchvision's references/classification/train.py, measured beside `train` with PEER_PYTHON."""
    timm: Annotated[Path | None, "FILE"] = None
    """timm's train.py, likewise."""
    results: Path = record.RESULTS
    """Folder to write to."""


@dataclass
class Run:
    """A command from Enter to its end."""

    seconds: float
    cpu_seconds: float
    first_step: float | None  # seconds until its line was printed
    phases: str  # the command's own line


@dataclass
class Measured:
    """All runs of one command by one checkout, or by a peer."""

    task: str
    who: str
    command: list[str]
    folder: Path  # where it runs
    environment: dict[str, str]
    cold: list[Run] = field(default_factory=list)
    warm: list[Run] = field(default_factory=list)


def run_once(command: Sequence[str], folder: Path, environment: dict[str, str]) -> Run:
    """Raises ProgramError, with the end of its output, if the command fails."""
    began, first, lines = time.monotonic(), None, []
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True)
    assert process.stdout
    for line in process.stdout:
        if first is None and FIRST_STEP.search(line):
            first = time.monotonic() - began
        lines.append(line)
    _, status, used = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise ProgramError(f"{shlex.join(command)} failed: {''.join(lines[-5:])}")
    phases = next((line.strip() for line in reversed(lines) if line.startswith("seconds: ")), "")
    return Run(time.monotonic() - began, used.ru_utime + used.ru_stime, first, phases)


def environment_of(folder: Path, caches: Path) -> dict[str, str]:
    """The variables for a checkout whose caches, empty at first, are in the folder `caches`."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(folder), "RESNET_CACHE": str(caches / "kernels"),
            "PYTHONPYCACHEPREFIX": str(caches / "bytecode")}


def words(task: str, device: str, arguments: Options, scratch: Path, output: str) -> list[str]:
    """The command line of a task after `python -m train`; `output`: a run folder, made anew in each run."""
    photographs, run = scratch / "photographs", scratch / "trained"
    profile = "" if arguments.other else " --profile-start"  # which an older checkout may not have
    trained, image = f"--checkpoint {run}{profile}", min(photographs.rglob("*.JPEG"))
    lines = {
        "train": f"train {NETWORK[device]} --data {photographs} --val-split 0.2 --device {device} --output {output}",
        "predict": f"predict {trained} --device {device} {image}",
        "validate": f"validate {trained} --device {device}",
        "export": f"export {trained} --onnx {scratch}/exported.onnx --overwrite",
        "quantize": f"quantize {trained} --images 32 --overwrite",
        "cifar10": f"train --config cifar10_resnet18 --data {arguments.cifar10} --device {device} --output {output}",
    }
    return shlex.split(lines[task])


def peers(arguments: Options, device: str, scratch: Path) -> Iterator[Measured]:
    """PyTorch's programs on the photographs, as `train` has them: the same network, batch and epochs."""
    python = os.environ.get("PEER_PYTHON", "")
    if (arguments.torchvision or arguments.timm) and not python:
        raise UserError("--torchvision and --timm need PyTorch: set PEER_PYTHON to a Python that has it")
    size, batch, epochs, model = (224, 32, 30, "resnet50") if device == "gpu" else (64, 16, 2, "resnet18")
    data, on_device = scratch / "split", "--device cuda --amp" if device == "gpu" else "--device cpu"
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(scratch / "peers" / "bytecode")}
    if arguments.torchvision:
        line = (f"--data-path {data} --model {model} --batch-size {batch} --epochs {epochs} --val-resize-size {size} "
                f"--val-crop-size {size} --train-crop-size {size} --output-dir {scratch}/peers {on_device}")
        yield Measured("train", "torchvision", [python, str(arguments.torchvision.resolve()), *line.split()],
                       arguments.torchvision.resolve().parent, environment)
    if arguments.timm:
        line = (f"--data-dir {data} --model {model} --batch-size {batch} --epochs {epochs} --img-size {size} "
                f"--num-classes {NUM_CLASSES} --output {scratch}/peers {on_device}")
        yield Measured("train", "timm", [python, str(arguments.timm.resolve()), *line.split()],
                       arguments.timm.resolve().parent, environment)


def split_for_peers(photographs: Path, folder: Path) -> None:
    """Folders train/ and val/ of links: every fifth photograph of a class is for validation."""
    for image in sorted(photographs.rglob("*.JPEG")):
        number = sorted(image.parent.iterdir()).index(image)
        place = folder / ("val" if number % 5 == 4 else "train") / image.parent.name
        place.mkdir(parents=True, exist_ok=True)
        (place / image.name).symlink_to(image)


def measure(arguments: Options, device: str, scratch: Path) -> list[Measured]:
    """Run all commands; first each cold, then in turn `rounds` times warm."""
    folders = {"this": record.ROOT} | ({"other": arguments.other.resolve()} if arguments.other else {})
    tasks = arguments.tasks or (ON_GPU if device == "gpu" else ON_CPU)
    photographs = scratch / "photographs"
    write_data(arguments.data, photographs, PHOTOGRAPHS_PER_CLASS)
    split_for_peers(photographs, scratch / "split")
    train = [sys.executable, "-m", "train"]
    first = words("train", device, arguments, scratch, str(scratch / "trained"))
    run_once([*train, *first, "--epochs", "1"], record.ROOT, environment_of(record.ROOT, scratch / "first"))
    all_measured = [Measured(task, who, [*train, *words(task, device, arguments, scratch, "OUTPUT")], folder,
                             environment_of(folder, scratch / f"caches-{who}-{task}"))
                    for task in tasks for who, folder in folders.items()]
    all_measured += peers(arguments, device, scratch) if "train" in tasks else ()
    for turn in range(arguments.rounds + 1):
        for number, each in enumerate(all_measured):
            output = str(scratch / f"run-{turn}-{number}")
            command = [output if word == "OUTPUT" else word for word in each.command]
            (each.warm if turn else each.cold).append(found := run_once(command, each.folder, each.environment))
            print(f"{'warm' if turn else 'cold'} {each.task}, {each.who}: {found.seconds:.2f} s", flush=True)
    return all_measured


def line_of(each: Measured, device: str, scratch: Path) -> dict[str, Any]:
    """A line of the results."""
    middle = sorted(each.warm, key=lambda run: run.seconds)[len(each.warm) // 2]
    is_ours = each.who in ("this", "other")
    found: dict[str, Any] = {"task": each.task, "device": device, "who": each.who}
    for name, runs in (("cold", each.cold), ("warm", each.warm)):
        found[f"{name}_s"] = [round(run.seconds, 2) for run in runs]
        found[f"{name}_cpu_s"] = [round(run.cpu_seconds, 2) for run in runs]
        if runs[0].first_step is not None:
            found[f"{name}_first_step_s"] = [round(run.first_step or 0, 2) for run in runs]
    return {**found, "phases": middle.phases, "commit": _commit(each.folder) if is_ours else None,
            "hardware": hardware(), "versions": versions() if is_ours else {},
            "command": shlex.join(each.command).replace(str(scratch), "SCRATCH").replace(sys.executable, "python"),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def _commit(folder: Path) -> str | None:
    if folder == record.ROOT:
        return git_commit()
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True)
    return found.stdout.strip() or None


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Seconds: of the cold run, least and median of the warm ones, the same of the CPU, and to the first step."""
    rows = [("command", "of", "cold", "warm: least", "median", "of the CPU", "median", "first step")]
    for line in lines:
        values = [line["cold_s"][0], *(of(line[name]) for name in ("warm_s", "warm_cpu_s")
                                       for of in (min, statistics.median))]
        if steps := line.get("warm_first_step_s"):
            values.append(statistics.median(steps))
        rows.append((line["task"], line["who"], *(f"{value:.1f}" for value in values)))
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in rows)


def main() -> None:
    arguments = read_options(Options)
    device = ("gpu" if find_gpus() else "cpu") if arguments.device == "auto" else arguments.device
    if arguments.other and not (arguments.other / "train").is_dir():
        raise UserError(f"{arguments.other} is not a checkout of this project; make one with git worktree add FOLDER "
                        "COMMIT")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        lines = [line_of(each, device, scratch) for each in measure(arguments, device, scratch)]
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / f"start_{'1gpu' if device == 'gpu' else 'cpu'}.jsonl"
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    print(table(lines))
    print(f"-> {os.path.relpath(path)}")


if __name__ == "__main__":
    record.run(main)
