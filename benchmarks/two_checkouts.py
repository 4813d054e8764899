"""The training step of this checkout against another checkout's, alternating, on one GPU, on synthetic data.

    git worktree add ../other COMMIT && python benchmarks/two_checkouts.py ../other --batch 256

It tells whether a change made the step slower. Each checkout has its own process, which waits while the other one is
measured; both share the cache of kernel choices. All gammas are 1 at the start, six batches alternate, and each
measurement begins with three seconds of warm-up. Appends a line to results/two_checkouts_1gpu.jsonl. It holds, for both
commits, every step's time in ms, the seconds of start-up (the second checkout starts with a warm cache), and the GPU's
memory in use in MiB.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from record import RESULTS, ROOT, run

from common.command_line import Positive, read_options
from common.environment import git_commit, hardware, versions
from common.errors import ProgramError, UserError
from common.nvidia_gpus import find_gpus

WARM_UP_SECONDS, NUM_BATCHES, LEARNING_RATE = 3, 6, 0.05


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    other: Annotated[Path, "FOLDER"]
    """The other checkout."""
    batch: Positive = 256
    """Images in a batch."""
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Type of the tensors."""
    turns: Positive = 4
    """Measurements of each checkout."""
    steps: Positive = 100
    """Timed steps in each measurement."""


# Runs in the measured checkout, with its modules; the checkout only needs the code that builds a step.
WORKER = f"""
import json, sys, time
begin = time.time()
import numpy as np
from common.mxnet_compat import mx
from graph_passes.executors import create_executor
from train import models

batch, dtype = int(sys.argv[1]), sys.argv[2]
network = models.create("resnet50", 1000, label_smoothing=0.1)
shapes = {{"data": (batch, 224, 224, 4), "softmax_label": (batch,)}}
executor = create_executor("cuda", network.graph, shapes, device="gpu(0)", dtype=dtype)
params, aux = network.initial_values(seed=0, channels=4)
params |= {{name: np.ones_like(value) for name, value in params.items() if name.endswith("_gamma")}}
executor.set_params(params, aux)
batches = []
for _ in range({NUM_BATCHES}):
    data = mx.nd.random.normal(shape=shapes["data"])
    data[:, :, :, 3] = 0
    label = mx.nd.floor(mx.nd.random.uniform(0, 1000, (batch,)))
    kind = "float16" if dtype == "float16" else "float32"
    batches.append((data.astype(kind).as_in_context(mx.gpu(0)), label.as_in_context(mx.gpu(0))))
executor.forward_backward(*batches[0])
executor.synchronize()
print(json.dumps(time.time() - begin), flush=True)


def steps(count):
    gpu = executor.gpu
    ends = [gpu.timing_event() for _ in range(count + 1)]
    gpu.record(ends[0])
    for number, end in enumerate(ends[1:]):
        executor.forward_backward(*batches[number % len(batches)])
        executor.update({LEARNING_RATE})
        gpu.record(end)
    gpu.synchronize()
    return [round(gpu.elapsed_ms(first, second), 4) for first, second in zip(ends, ends[1:])]


for line in sys.stdin:
    begin = time.time()
    while time.time() - begin < {WARM_UP_SECONDS}:
        steps(20)
    executor.read_metrics()
    step_ms = steps(int(line))
    metrics = executor.read_metrics()
    print(json.dumps({{"step_ms": step_ms, "loss": metrics.loss_sum / metrics.count}}), flush=True)
"""


class Checkout:
    """A process that measures steps of the checkout in `folder` on request."""

    def __init__(self, folder: Path, arguments: Options) -> None:
        command = [sys.executable, "-c", WORKER, str(arguments.batch), arguments.dtype]
        others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != str(ROOT)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *others])}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
                                         env=environment)
        self._folder = folder
        self.start_seconds: float = self._answer()

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
    """Memory in use on the first GPU by all programs, in MiB."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    arguments = read_options(Options)
    if not (arguments.other / "train").is_dir():
        raise UserError(f"{arguments.other} is not a checkout of this project; make one with git worktree add FOLDER "
                        "COMMIT")
    if not find_gpus():
        raise UserError("steps are compared on an NVIDIA GPU, and there is none here")
    folders = {"other": arguments.other.resolve(), "this": ROOT}
    checkouts: dict[str, Checkout] = {}
    rows: dict[str, dict[str, Any]] = {}
    before = memory_in_use()
    for name, folder in folders.items():
        checkouts[name] = Checkout(folder, arguments)
        rows[name] = {"memory_mib": memory_in_use() - before, "start_s": [checkouts[name].start_seconds], "step_ms": []}
        before = memory_in_use()
    for turn, name in itertools.product(range(arguments.turns), folders):
        found = checkouts[name].measure(arguments.steps)
        rows[name]["step_ms"] += found["step_ms"]
        print(f"turn {turn + 1}, {name}: median {statistics.median(found['step_ms']):.3f} ms, loss {found['loss']:.3f}")
    for name, checkout in checkouts.items():
        checkout.close()
        again = Checkout(folders[name], arguments)
        rows[name]["start_s"].append(again.start_seconds)
        again.close()
    medians = {name: statistics.median(row["step_ms"]) for name, row in rows.items()}
    this, other = medians["this"], medians["other"]
    print(f"this {this:.3f} ms, other {other:.3f} ms: {this / other - 1:+.2%}")
    row = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "batch": arguments.batch,
           "dtype": arguments.dtype, "commit": git_commit(), "hardware": hardware(), "versions": versions(), **rows}
    with (RESULTS / "two_checkouts_1gpu.jsonl").open("a") as file:
        print(json.dumps(row), file=file)


if __name__ == "__main__":
    run(main)
