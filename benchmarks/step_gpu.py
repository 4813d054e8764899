"""Our compiled training step on one GPU against PyTorch's, in turn, in one run, on synthetic data.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/step_gpu.py --batch 256 --profile profile.txt
    PEER_PYTHON=/path/to/python-with-torch python benchmarks/step_gpu.py --sweep

Writes results/<model>_<fp16|bf16|tf32|fp32>_b<batch>_synthetic_1gpu.json, and the memory that both need as a line
of results/memory_1gpu.jsonl. Ours is what a training step of the cuda executor is: taking the batch from an MXNet array
on the GPU, forward, loss and top-1/top-5, backward, optimizer with loss scaling. The peer (benchmarks/peer_pytorch.py)
does the same without top-1/top-5. Both start from all gammas 1, take turns between six batches, and warm up for three
seconds before each turn. Step times are from CUDA events, one after each step; nothing waits for the host.
Without PEER_PYTHON there is no peer. `--inference` measures inference, up to the probabilities on the GPU. `--sweep`
measures all of SWEEP, each in a process of its own; torch.compile takes about a minute for most of them.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from record import RESULTS, flags, run, write_result
from torch_peer import TorchPeer, take_turns

from common.command_line import Positive, read_options
from common.errors import ProgramError
from common.mxnet_compat import mx
from graph_passes.executors import create_executor
from graph_passes.executors.cuda import profile
from graph_passes.executors.cuda.executor import CudaExecutor
from train import models

CLASSES, LEARNING_RATE = 1000, 0.1
WARM_UP_SECONDS, NUM_BATCHES = 3.0, 6
SHORT = {"float16": "fp16", "bfloat16": "bf16", "tf32": "tf32", "float32": "fp32"}
MEMORY = RESULTS / "memory_1gpu.jsonl"
SWEEP = (
    "--batch 256", "--batch 64", "--batch 128", "--batch 512", "--model resnet18", "--model resnet34",
    "--model resnet101", "--model resnet152",
    "--inference --batch 1", "--inference --batch 64", "--inference", "--dtype bfloat16",
    "--dtype tf32 --peer eager --steps 30", "--dtype float32 --peer eager --steps 10",
)


def make_step(model: str, batch: int, size: int, dtype: str, device_id: int = 0,
              **options: Any) -> tuple[CudaExecutor, Any, Any]:
    """The executor and a batch on the GPU, as a loader gives it: NHWC, 16-bit, padded to 4 channels."""
    gpu = mx.gpu(device_id)
    network = models.create(model, CLASSES, label_smoothing=0.1)
    shapes = {"data": (batch, size, size, 4), "softmax_label": (batch,)}
    executor = create_executor("cuda", network.graph, shapes, device=f"gpu({device_id})",
                               dtype="float32" if dtype == "tf32" else dtype, tf32=dtype == "tf32", **options)
    assert isinstance(executor, CudaExecutor)
    executor.set_params(*network.initial_values(seed=0, channels=4, zero_init_residual=False))
    return executor, *random_batch(shapes["data"], dtype, gpu)


def random_batch(shape: tuple[int, ...], dtype: str, gpu: Any) -> tuple[Any, Any]:
    """Images and labels on a GPU."""
    data = mx.nd.random.normal(shape=shape)
    data[:, :, :, 3] = 0
    label = mx.nd.floor(mx.nd.random.uniform(0, CLASSES, shape[:1]))
    return data.astype("float16" if dtype == "float16" else "float32").as_in_context(gpu), label.as_in_context(gpu)


def measure(executor: CudaExecutor, batches: Sequence[tuple[Any, Any]], steps: int, inference: bool) -> list[float]:
    """Milliseconds of each step after warm-up."""
    in_turn = itertools.cycle(batches)

    def step() -> None:
        data, label = next(in_turn)
        if inference:
            executor.forward(data)
            return
        executor.forward_backward(data, label)
        executor.update(LEARNING_RATE)

    gpu = executor.gpu
    events = [gpu.timing_event() for _ in range(steps + 1)]
    begin = time.monotonic()
    while time.monotonic() - begin < WARM_UP_SECONDS:
        step()
        executor.synchronize()
    gpu.record(events[0])
    for event in events[1:]:
        step()
        gpu.record(event)
    executor.synchronize()
    return [gpu.elapsed_ms(start, end) for start, end in itertools.pairwise(events)]


@dataclass(frozen=True)
class Options:
    """What is measured."""

    model: str = "resnet50"
    """PyTorch's torchvision knows most of them."""
    batch: Positive = 256
    """Images a step."""
    size: Positive = 224
    """Height and width of an image."""
    dtype: Literal["float16", "bfloat16", "tf32", "float32"] = "float16"
    """Precision."""
    steps: Positive = 50
    """Counted steps in each round."""
    rounds: Positive = 2
    """Turns of ours and the peer."""
    peer: Literal["eager", "compile"] = "compile"
    """How PyTorch runs."""
    profile: Path | None = None
    """Write one line per kernel of the step to this file."""
    inference: bool = False
    """Forward with folded BatchNorm, from batch to answer."""
    sweep: bool = False
    """Measure all of SWEEP instead."""


def start_peer(arguments: Options) -> TorchPeer:
    options = flags(arguments, "model", "batch", "size", "dtype", "steps")
    return TorchPeer("--mode", arguments.peer, *options, *["--inference"] * arguments.inference)


def write_memory(name: str, figures: dict[str, Any]) -> None:
    """Put one line into results/memory_1gpu.jsonl, in place of the one of that name."""
    lines = MEMORY.read_text().splitlines() if MEMORY.exists() else []
    others = [line for line in lines if json.loads(line)["name"] != name]
    MEMORY.write_text("\n".join([*others, json.dumps({"name": name, **figures})]) + "\n")


def gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 2)


def main() -> None:
    arguments = read_options(Options)
    if arguments.sweep:
        failed = [line for line in SWEEP if subprocess.run([sys.executable, __file__, *line.split()]).returncode]
        if failed:
            raise ProgramError(f"these failed: {'; '.join(failed)}")
        return

    started = time.monotonic()
    executor, *first = make_step(arguments.model, arguments.batch, arguments.size, arguments.dtype)
    print(f"ready after {time.monotonic() - started:.1f} s (the first time on a machine, plans are timed)")
    free, total = executor.gpu.memory()
    memory: dict[str, Any] = {"ours_in_use_gib": gib(total - free)}
    shape, gpu = executor.input_shapes["data"], first[0].context
    batches = [(first[0], first[1]), *(random_batch(shape, arguments.dtype, gpu) for _ in range(NUM_BATCHES - 1))]
    peer = start_peer(arguments) if "PEER_PYTHON" in os.environ else None
    ours, theirs, turn = take_turns(
        arguments.rounds, lambda: measure(executor, batches, arguments.steps, arguments.inference), peer)
    if peer:
        memory |= {"peer": turn["name"], "peer_in_use_gib": gib(free - executor.gpu.memory()[0]),
                   "peer_peak_allocated_gib": gib(turn["allocated_bytes"])}
        peer.close()
    use = "inference_synthetic" if arguments.inference else "synthetic"
    name = f"{arguments.model}_{SHORT[arguments.dtype]}_b{arguments.batch}_{use}_1gpu"
    write_result(name, ours, arguments.batch, turn.get("name"), theirs)
    if not arguments.inference:
        write_memory(name, memory)
        print(f"GPU memory: {memory}")
    if arguments.profile:
        rows = executor.profile()
        ceiling = executor.copy_gigabytes_per_second()
        text = f"{profile.format_table(rows, ceiling)}\n\n{profile.format_summary(rows, ceiling)}\n"
        text += f"copy {ceiling:.0f} GB/s; step {statistics.median(ours):.3f} ms\n"
        arguments.profile.write_text(f"{text}\n{profile.format_decisions(executor.decisions)}\n")
        print(profile.format_summary(rows, ceiling))


if __name__ == "__main__":
    run(main)
