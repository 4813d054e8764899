"""Our compiled training step on one GPU against PyTorch's, in turn, in one run, on synthetic data.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/step_gpu.py --batch 256 --profile profile.txt

Writes results/resnet<depth>_<fp16|bf16|fp32>_b<batch>_synthetic_1gpu.json. Ours is what a training step of the cuda
executor is: taking the batch from an MXNet array on the GPU, forward, loss and top-1/top-5, backward, optimizer with
loss scaling. The peer (benchmarks/peer_pytorch.py) does the same without top-1/top-5. Step times are from CUDA events,
one after each step; nothing waits for the host. Without PEER_PYTHON there is no peer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import itertools

from record import write_result

from graph_passes import Graph, passes
from graph_passes.executors import create_executor
from graph_passes.executors.cuda import profile
from graph_passes.executors.cuda.executor import CudaExecutor
from mxnet_compat import mx
from train.model import init_params, resnet

CLASSES, LEARNING_RATE, WARM_UP = 1000, 0.1, 15
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
PEER = Path(__file__).with_name("peer_pytorch.py")


def make_step(depth: int, batch: int, size: int, dtype: str) -> tuple[CudaExecutor, Any, Any]:
    """The executor and a batch on the GPU, as a loader gives it: NHWC, 16-bit, padded to 4 channels."""
    symbol = resnet(depth, CLASSES, label_smoothing=0.1)
    graph = passes.bn_relu(passes.bn_add_relu(Graph.from_json(symbol.tojson())))
    shapes = {"data": (batch, size, size, 4), "softmax_label": (batch,)}
    executor = create_executor("cuda", graph, shapes, device="gpu(0)", dtype=dtype)
    assert isinstance(executor, CudaExecutor)
    executor.set_params(*init_params(symbol, seed=0, channels=4))
    data = mx.nd.random.normal(shape=shapes["data"])
    data[:, :, :, 3] = 0
    label = mx.nd.floor(mx.nd.random.uniform(0, CLASSES, (batch,)))
    on_gpu = data.astype("float16" if dtype == "float16" else "float32").as_in_context(mx.gpu(0))
    return executor, on_gpu, label.as_in_context(mx.gpu(0))


def measure(executor: CudaExecutor, data: Any, label: Any, steps: int) -> list[float]:
    """Milliseconds of each step after warm-up."""
    gpu = executor.gpu
    events = [gpu.timing_event() for _ in range(steps + 1)]
    for _ in range(WARM_UP):
        executor.forward_backward(data, label)
        executor.update(LEARNING_RATE)
    gpu.record(events[0])
    for event in events[1:]:
        executor.forward_backward(data, label)
        executor.update(LEARNING_RATE)
        gpu.record(event)
    executor.synchronize()
    return [gpu.elapsed_ms(start, end) for start, end in itertools.pairwise(events)]


def measure_peer(arguments: argparse.Namespace, mode: str) -> dict[str, Any]:
    command = [os.environ["PEER_PYTHON"], str(PEER), "--mode", mode]
    for name in ("depth", "batch", "size", "dtype", "steps"):
        command += [f"--{name}", str(getattr(arguments, name))]
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    done = subprocess.run(command, env=clean, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: the peer failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=50)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", choices=tuple(SHORT), default="float16")
    parser.add_argument("--steps", type=int, default=50, help="counted steps in each round")
    parser.add_argument("--rounds", type=int, default=2, help="turns of ours and the peer")
    parser.add_argument("--peer", choices=("eager", "compile"), default="compile")
    parser.add_argument("--profile", type=Path, help="write one line per kernel of the step to this file")
    arguments = parser.parse_args()

    ours: list[float] = []
    theirs: list[float] = []
    peer: dict[str, Any] = {}
    started = time.monotonic()
    executor, data, label = make_step(arguments.depth, arguments.batch, arguments.size, arguments.dtype)
    print(f"ready after {time.monotonic() - started:.1f} s (the first time on a machine, plans are timed)")
    free, total = executor.gpu.memory()
    used = total - free
    for _ in range(arguments.rounds):
        ours += measure(executor, data, label, arguments.steps)
        if "PEER_PYTHON" in os.environ:
            peer = measure_peer(arguments, arguments.peer)
            theirs += peer["step_ms"]
    name = f"resnet{arguments.depth}_{SHORT[arguments.dtype]}_b{arguments.batch}_synthetic_1gpu"
    write_result(name, ours, arguments.batch, peer.get("name"), theirs)
    print(f"GPU memory in use: ours {used / 2**30:.2f} GiB"
          + (f", peer {peer['used_bytes'] / 2**30:.2f} GiB, of which {peer['peak_allocated_bytes'] / 2**30:.2f} GiB "
             "allocated at its peak" if peer else ""))
    if arguments.profile:
        rows = executor.profile()
        ceiling = executor.copy_gigabytes_per_second()
        text = f"{profile.format_table(rows, ceiling)}\n\n{profile.format_summary(rows, ceiling)}\n"
        arguments.profile.write_text(f"{text}copy {ceiling:.0f} GB/s; step {statistics.median(ours):.3f} ms\n")
        print(profile.format_summary(rows, ceiling))


if __name__ == "__main__":
    main()
