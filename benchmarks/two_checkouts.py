"""The steps of this checkout against another checkout's, alternating, on one GPU, on synthetic data.

    git worktree add ../other COMMIT
    python benchmarks/two_checkouts.py ../other --batch 256
    python benchmarks/two_checkouts.py ../other --batch 2048 --inference --dtype int8

It tells whether a change made the training step, or inference, slower. Each checkout has its own process, which waits
while the other one is measured, and builds and measures its step with its own benchmarks/step_gpu.py. Both share the
cache of kernel choices; with `--own-caches` each begins with an empty cache of its own, so that first starts can be
compared. Appends a line to results/two_checkouts_1gpu.jsonl. It holds, for both commits, every step's time in ms, the
seconds of both starts (the second one has a warm cache), and the GPU's memory in use in MiB.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from record import RESULTS, ROOT, run

from common.command_line import Positive, read_options
from common.environment import hardware, versions
from common.errors import ProgramError, UserError
from common.nvidia_gpus import find_gpus


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    other: Annotated[Path, "FOLDER"]
    """The other checkout."""
    model: str = "resnet50"
    """A network."""
    batch: Positive = 256
    """Images in a batch."""
    dtype: Literal["float16", "bfloat16", "tf32", "float32", "int8"] = "float16"
    """Precision; int8 is for --inference."""
    inference: bool = False
    """Measure inference instead of the training step."""
    deterministic: bool = False
    """Measure deterministic training steps."""
    own_caches: bool = False
    """Give each checkout an empty cache of kernel choices at its first start."""
    turns: Positive = 4
    """Measurements of each checkout."""
    steps: Positive = 100
    """Timed steps in each measurement."""


# Runs in the measured checkout, with its modules.
WORKER = """
import json, sys, time
begin = time.time()
sys.path.insert(0, "benchmarks")
import step_gpu
from common.environment import git_commit

model, batch, dtype, inference = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "inference"
executor, batches = (step_gpu.make_int8(model, batch, 224) if dtype == "int8" else
                     step_gpu.make_step(model, batch, 224, dtype, deterministic=sys.argv[5] == "deterministic"))
executor.forward(batches[0][0]) if inference else executor.forward_backward(*batches[0])
executor.synchronize()
print(json.dumps([time.time() - begin, git_commit()]), flush=True)
monitor = step_gpu.GpuMonitor(executor.gpu_bus_id)
monitor.start()
for line in sys.stdin:
    print(json.dumps(step_gpu.measure(executor, monitor, batches, int(line), inference)), flush=True)
monitor.close()
"""


class Checkout:
    """A process that measures steps of the checkout in `folder` on request."""

    def __init__(self, folder: Path, arguments: Options, cache: Path | None) -> None:
        use = "inference" if arguments.inference else "training"
        order = "deterministic" if arguments.deterministic else "fastest"
        command = [sys.executable, "-c", WORKER, arguments.model, str(arguments.batch), arguments.dtype, use, order]
        others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != str(ROOT)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *others])}
        if cache:
            environment["RESNET_CACHE"] = str(cache)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
                                         env=environment)
        self._folder = folder
        self.start_seconds, self.commit = self._answer()

    def measure(self, steps: int) -> dict[str, Any]:
        assert self._process.stdin
        print(steps, file=self._process.stdin, flush=True)
        answer: dict[str, Any] = self._answer()
        return answer

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise ProgramError(f"the step of {self._folder} ended with exit code {self._process.wait()}: see its "
                               "message above")
        return json.loads(line)


def memory_in_use() -> int:
    """Memory in use on the measured GPU by all programs, in MiB."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def compare(arguments: Options, caches: Path) -> dict[str, dict[str, Any]]:
    """Start both checkouts, measure them in turn, and start each once more. `caches`: an empty folder."""
    folders = {"other": arguments.other.resolve(), "this": ROOT}
    checkouts: dict[str, Checkout] = {}
    rows: dict[str, dict[str, Any]] = {}
    cache_of = {name: caches / name if arguments.own_caches else None for name in folders}
    before = memory_in_use()
    for name, folder in folders.items():
        checkouts[name] = Checkout(folder, arguments, cache_of[name])
        rows[name] = {"commit": checkouts[name].commit, "memory_mib": memory_in_use() - before,
                      "start_s": [checkouts[name].start_seconds], "step_ms": []}
        before = memory_in_use()
    for turn, name in itertools.product(range(arguments.turns), folders):
        found = checkouts[name].measure(arguments.steps)
        rows[name]["step_ms"] += [round(each, 4) for each in found["step_ms"]]
        print(f"turn {turn + 1}, {name}: median {statistics.median(found['step_ms']):.3f} ms, loss {found['loss']:.3f}")
    for name, checkout in checkouts.items():
        checkout.close()
        again = Checkout(folders[name], arguments, cache_of[name])
        rows[name]["start_s"].append(again.start_seconds)
        again.close()
    return rows


def main() -> None:
    arguments = read_options(Options)
    if arguments.dtype == "int8" and not arguments.inference:
        raise UserError("--dtype int8 is for --inference: add it, or give another precision")
    if not (arguments.other / "train").is_dir():
        raise UserError(f"{arguments.other} is not a checkout of this project; make one with git worktree add FOLDER "
                        "COMMIT")
    if not find_gpus():
        raise UserError("steps are compared on an NVIDIA GPU, and there is none here")
    with tempfile.TemporaryDirectory() as caches:
        rows = compare(arguments, Path(caches))
    medians = {name: statistics.median(row["step_ms"]) for name, row in rows.items()}
    this, other = medians["this"], medians["other"]
    print(f"this {this:.3f} ms, other {other:.3f} ms: {this / other - 1:+.2%}; starts in s and memory in MiB: "
          f"{ {name: (row['start_s'], row['memory_mib']) for name, row in rows.items()} }")
    row = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "model": arguments.model,
           "batch": arguments.batch, "dtype": arguments.dtype, "inference": arguments.inference,
           "deterministic": arguments.deterministic, "hardware": hardware(), "versions": versions(), **rows}
    with (RESULTS / "two_checkouts_1gpu.jsonl").open("a") as file:
        print(json.dumps(row), file=file)


if __name__ == "__main__":
    run(main)
