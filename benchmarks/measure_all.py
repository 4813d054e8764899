"""Measures every figure of the README and of docs/cuda_executor.md on one GPU again, at one commit.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/measure_all.py
    PEER_PYTHON=/path/to/python-with-torch python benchmarks/measure_all.py --sections step small --limit 200
    python benchmarks/measure_all.py --list

First PyTorch compiles all steps to be measured, several at a time, without running them: torch.compile's cache on disk
shortens its start later. Then the programs of SECTIONS run one after the other, each alone in its own process; a
section should take less than four minutes. Each program writes its files under results/. `python benchmarks/tables.py`
then puts them into the pages. If a program fails, the others still run; failures are named at the end, with exit code
1. With `--limit`, no program starts after this many seconds, and the remaining ones are named.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from record import ROOT, run
from torch_peer import PEER, require_peer, start_peer

from common.command_line import Positive, given, read_options
from common.errors import ProgramError
from pipelines.progress import num_cores

SectionName = Literal["step", "small", "inference", "jpeg", "trivialaugment", "randaugment", "loader", "ingredients",
                      "frozen", "presets", "shallow", "resnet101", "resnet152", "resnext50", "resnext101", "variants",
                      "precision", "recurrent", "recurrent_others", "cpu"]
PROFILES = "benchmarks/results/resnet50"
# Numbers of steps: about one second of work per round, and enough for a median.
SECTIONS: dict[SectionName, tuple[str, ...]] = {
    "step": (f"step_gpu.py --batch 256 --steps 100 --profile {PROFILES}_fp16_b256_profile.txt",
             "step_gpu.py --batch 256 --steps 60 --dtype bfloat16"),
    "small": ("step_gpu.py --batch 64 --steps 150", "step_gpu.py --batch 128 --steps 100"),
    "inference": ("step_gpu.py --inference --batch 1 --steps 2000", "step_gpu.py --inference --batch 32 --steps 600",
                  "step_gpu.py --inference --batch 256 --steps 120 "
                  f"--profile {PROFILES}_fp16_b256_inference_profile.txt",
                  "step_gpu.py --inference --batch 256 --steps 200 --dtype int8 "
                  f"--profile {PROFILES}_int8_b256_inference_profile.txt",
                  "step_gpu.py --inference --batch 2048 --steps 25 --dtype int8 --peers graph"),
    "jpeg": ("step_jpeg.py",),
    "trivialaugment": ("step_jpeg.py --auto-augment trivialaugment --random-erasing 0.1",),
    "randaugment": ("step_jpeg.py --auto-augment randaugment --random-erasing 0.1",),
    "loader": ("loader_gpu.py --seconds 2",),
    "ingredients": ("step_ingredients.py",),
    "frozen": ("step_frozen.py --steps 50 --rounds 2",),
    "presets": ("preset_rates.py",),
    "shallow": ("step_gpu.py --model resnet18 --steps 100", "step_gpu.py --model resnet34 --steps 80"),
    "resnet101": ("step_gpu.py --model resnet101 --steps 30",),
    "resnet152": ("step_gpu.py --model resnet152 --steps 25",),
    "resnext50": ("step_gpu.py --model resnext50_32x4d --steps 40",),
    "resnext101": ("step_gpu.py --model resnext101_32x8d --steps 20",),
    "variants": ("step_gpu.py --model resnet50d --steps 50", "step_gpu.py --model wide_resnet50_2 --steps 30"),
    "precision": ("step_gpu.py --dtype tf32 --steps 20 --peers eager", "step_gpu.py --dtype float32 --steps 8 "
                  "--peers eager", "step_gpu.py --batch 512 --steps 30"),
    "recurrent": ("rnn_layers.py --dtypes float16",),
    "recurrent_others": ("rnn_layers.py --dtypes bfloat16 tf32",),
    "cpu": ("step_cpu.py", "loader_cpu.py", "int8_cpu.py"),
}
COMPILE_SECONDS = 300
COMPILERS = 6  # run at a time; each takes several cores and about 5 GiB
ON_GPU = tuple(name for name in SECTIONS if name != "cpu")  # "cpu" needs a machine whose CPU is to be measured


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    sections: tuple[SectionName, ...] = ON_GPU
    """Sections to measure, in this order."""
    limit: Positive = 24 * 3600
    """Seconds after which no further program begins."""
    compile_first: bool = True
    """Have PyTorch compile everything before anything is measured."""
    list: bool = False
    """Print the sections and their programs, and measure nothing."""


def compile_one(options: Sequence[str]) -> int:
    """Run a peer that only compiles, and return its exit code; it is ended if it takes too long."""
    peer = start_peer(PEER, "--compile-only", *options)
    try:
        return peer.wait(COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        peer.kill()
        return peer.wait()


def compile_first(commands: Sequence[str]) -> None:
    """Have PyTorch compile the steps that these commands measure, COMPILERS at a time. A failure is not reported here,
    but when the step is measured."""
    import step_gpu

    measured = [step_gpu.Options(**given(step_gpu.Options, options, prog=program))
                for program, *options in map(str.split, commands) if program == "step_gpu.py"]
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, num_cores() // COMPILERS)))
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")  # the default in newer versions
    begin = time.monotonic()
    with ThreadPoolExecutor(COMPILERS) as pool:
        ends = [pool.submit(compile_one, step_gpu.peer_options(options)) for options in measured
                if {"compile", "graph"} & set(options.peers)]
    failed = sum(end.result() != 0 for end in ends)
    print(f"== PyTorch has compiled {len(ends) - failed} of {len(ends)} steps in {time.monotonic() - begin:.0f} s",
          flush=True)


def measure(commands: Sequence[str], limit: float) -> tuple[list[str], list[str]]:
    """Run the commands; returns the failed ones, and those that had not started after `limit` seconds."""
    begin = time.monotonic()
    failed: list[str] = []
    for number, command in enumerate(commands):
        started = time.monotonic()
        if started - begin >= limit:
            return failed, list(commands[number:])
        program, *options = command.split()
        print(f"== {command}", flush=True)
        code = subprocess.run([sys.executable, Path(__file__).with_name(program), *options], cwd=ROOT).returncode
        print(f"== {time.monotonic() - started:.0f} s" + f", exit code {code}" * bool(code), flush=True)
        failed += [command] * bool(code)
    return failed, []


def main() -> None:
    arguments = read_options(Options)
    if arguments.list:
        for name, programs in SECTIONS.items():
            print(f"{name}:", *programs, sep="\n    ")
        return
    if set(arguments.sections) - {"cpu"}:
        require_peer()
    commands = [command for name in arguments.sections for command in SECTIONS[name]]
    if arguments.compile_first and set(arguments.sections) - {"cpu"}:
        compile_first(commands)
    failed, left = measure(commands, arguments.limit)
    sentences = [f"{verb}: {'; '.join(commands)}" for verb, commands in (("failed", failed), ("not begun", left))
                 if commands]
    if sentences:
        raise ProgramError(". ".join(sentences))


if __name__ == "__main__":
    run(main)
