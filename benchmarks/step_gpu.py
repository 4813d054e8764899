"""Our compiled step on one GPU against PyTorch's, alternating, on synthetic data.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/step_gpu.py --batch 256 --profile profile.txt

Writes results/<model>_<fp16|bf16|tf32|fp32>_b<batch>_synthetic_1gpu.json, and both sides' memory as a line of
results/memory_1gpu.jsonl. Ours is a training step of the cuda executor: take the batch from an MXNet array on the GPU,
forward, loss and top-1/top-5, backward, optimizer with loss scaling. The peer (benchmarks/peer_pytorch.py) does the
same without top-1/top-5, in each of the modes in `--peers`. The fastest mode is the figure's peer; the file holds the
times of all modes. Without PEER_PYTHON there is no peer. `--inference` measures inference, up to the probabilities on
the GPU, and writes results/<model>_<...>_b<batch>_inference_synthetic_1gpu.json. There, `--dtype int8` compares ours in
INT8 (`train/commands/quantize.py`) with the peer in float16, the peer's lowest precision.

Both sides start with all gammas 1 and with equal learning rate and loss scale. Both rotate through six batches, and
warm up for three seconds before each measurement. Step times come from CUDA events, one after each step; nothing waits
for the host. Nothing is written if the timed steps did not train: if a loss is not finite, or a step was skipped.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from record import RESULTS, Peer, best_peer, check_trained, flags, run, write_result
from torch_peer import TorchPeer, all_times, take_turns

from common.command_line import Positive, read_options
from common.errors import ProgramError, UserError
from common.mxnet_compat import mx
from graph_passes.executors import create_executor
from graph_passes.executors.cuda.executor import CudaExecutor
from train import models
from train.commands.quantize import untrained
from train.devices import Placement
from train.recording.gpu_monitor import GpuMonitor
from train.weights import int8_file

CLASSES = 1000
WARM_UP_SECONDS, NUM_BATCHES = 3.0, 6
CALIBRATION_SIZE = 64  # pixels; the scales do not depend on the size
SHORT = {"float16": "fp16", "bfloat16": "bf16", "tf32": "tf32", "float32": "fp32", "int8": "int8"}
MEMORY = RESULTS / "memory_1gpu.jsonl"
PeerMode = Literal["eager", "compile", "graph", "reduce-overhead", "max-autotune", "max-autotune-graph"]


def learning_rate(batch: int) -> float:
    """The learning rate: 0.1 for 256 images (Goyal et al., arXiv:1706.02677)."""
    return 0.1 * batch / 256


def make_int8(model: str, batch: int, size: int) -> tuple[CudaExecutor, list[tuple[Any, Any]]]:
    """`make_step` for inference in INT8."""
    trained, network = untrained(model, CLASSES, CALIBRATION_SIZE)
    config = replace(trained.config, batch_size=batch, image_size=size, val_image_size=0)
    executor = int8_file.executor_of(network, trained, config, Placement("cuda", "gpu(0)", ""))
    assert isinstance(executor, CudaExecutor)
    return executor, [random_batch((batch, size, size, 4), "float16", mx.gpu(0)) for _ in range(NUM_BATCHES)]


def make_step(model: str, batch: int, size: int, dtype: str, device_id: int = 0,
              **options: Any) -> tuple[CudaExecutor, list[tuple[Any, Any]]]:
    """Build the executor, with all gammas 1, and a few batches on the GPU in the loader's layout: NHWC, 16-bit, padded
    to 4 channels."""
    network = models.create(model, CLASSES, label_smoothing=0.1)
    shapes = {"data": (batch, size, size, 4), "softmax_label": (batch,)}
    executor = create_executor("cuda", network.graph, shapes, device=f"gpu({device_id})",
                               dtype="float32" if dtype == "tf32" else dtype, tf32=dtype == "tf32", **options)
    assert isinstance(executor, CudaExecutor)
    executor.set_params(*network.initial_values(seed=0, channels=4, zero_init_residual=False))
    return executor, [random_batch(shapes["data"], dtype, mx.gpu(device_id)) for _ in range(NUM_BATCHES)]


def random_batch(shape: tuple[int, ...], dtype: str, gpu: Any) -> tuple[Any, Any]:
    """Make random images and labels on a GPU."""
    data = mx.nd.random.normal(shape=shape)
    data[:, :, :, 3] = 0
    label = mx.nd.floor(mx.nd.random.uniform(0, CLASSES, shape[:1]))
    return data.astype("float16" if dtype == "float16" else "float32").as_in_context(gpu), label.as_in_context(gpu)


def loss_scale(executor: CudaExecutor) -> float:
    """The executor's loss scale; 1 if it does not scale the loss."""
    return executor.optimizer.scalars.get("loss_scale", 1.0)


def measure(executor: CudaExecutor, monitor: GpuMonitor, batches: Sequence[tuple[Any, Any]], steps: int,
            inference: bool = False, warm_up_seconds: float = WARM_UP_SECONDS) -> dict[str, Any]:
    """Warm up, then measure once.

    Returns the step times in ms, the mean loss of these steps (in inference: the mean sum of an image's probabilities),
    the loss scale before and after them, power in W and clock in MHz.
    """
    in_turn = itertools.cycle(batches)
    answer: Any = None

    def step() -> None:
        nonlocal answer
        data, label = next(in_turn)
        if inference:
            answer = executor.forward(data)
            return
        executor.forward_backward(data, label)
        executor.optimizer.step(learning_rate(len(label)))

    gpu = executor.gpu
    events = [gpu.timing_event() for _ in range(steps + 1)]
    step()  # the first call of inference compiles
    executor.synchronize()
    begin = time.monotonic()
    while time.monotonic() - begin < warm_up_seconds:
        step()
        executor.synchronize()
    executor.read_metrics()  # drop the warm-up's metrics
    scale_before = 1.0 if inference else loss_scale(executor)
    monitor.sample()
    monitor.take()
    gpu.record(events[0])
    for event in events[1:]:
        step()
        gpu.record(event)
    executor.synchronize()
    monitor.sample()
    readings, metrics = monitor.take(), executor.read_metrics()
    return {
        "step_ms": [gpu.elapsed_ms(start, end) for start, end in itertools.pairwise(events)],
        "loss": float(answer.asnumpy().sum(axis=1).mean()) if inference else metrics.loss_sum / metrics.count,
        "loss_scales": [scale_before, 1.0 if inference else loss_scale(executor)],
        "watts": readings.power, "sm_mhz": readings.clock,
    }


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    model: str = "resnet50"
    """A network; torchvision or timm has most of them for the peer."""
    batch: Positive = 256
    """Images per step."""
    size: Positive = 224
    """Height and width of an image."""
    dtype: Literal["float16", "bfloat16", "tf32", "float32", "int8"] = "float16"
    """Precision; int8 is for --inference."""
    steps: Positive = 50
    """Timed steps in each round."""
    rounds: Positive = 2
    """Rounds; ours and the peer alternate."""
    peers: tuple[PeerMode, ...] = ("compile", "graph", "max-autotune", "max-autotune-graph")
    """PyTorch's modes (see peer_pytorch.py); its memory is measured in the first one. For max-autotune PyTorch times
    its kernels for minutes, once on a machine."""
    profile: Path | None = None
    """Write one line per kernel of the step, or of inference, to this file."""
    inference: bool = False
    """Measure inference: forward with folded BatchNorm, from the batch to the probabilities."""


def peer_options(arguments: Options) -> list[str]:
    """The options for peer_pytorch.py."""
    arguments = replace(arguments, dtype="float16") if arguments.dtype == "int8" else arguments
    return [*flags(arguments, "model", "batch", "size", "dtype", "steps"), "--learning-rate",
            str(learning_rate(arguments.batch)), *["--inference"] * arguments.inference]


def write_memory(name: str, figures: dict[str, Any]) -> None:
    """Write one line to results/memory_1gpu.jsonl; it replaces the line of that name."""
    lines = MEMORY.read_text().splitlines() if MEMORY.exists() else []
    others = [line for line in lines if json.loads(line)["name"] != name]
    MEMORY.write_text("\n".join([*others, json.dumps({"name": name, **figures})]) + "\n")


def check_probabilities(who: str, sums: Sequence[float]) -> None:
    """Raise ProgramError if an image's probabilities, perhaps rounded to 16 bits, do not add up to 1."""
    if not all(abs(each - 1) < 0.01 for each in sums):
        raise ProgramError(f"{who} computed wrong probabilities: an image's add up to {sums}; nothing is published")


def publish(name: str, batch: int, ours: Sequence[dict[str, Any]], theirs: dict[str, list[dict[str, Any]]],
            versions: dict[str, str]) -> None:
    """Check that all rounds trained, and write the figure. `theirs` holds the peer's results by mode."""
    for who, turns in (("ours", ours), *((turns[0]["name"], turns) for turns in theirs.values())):
        check_trained(who, [turn["loss"] for turn in turns], [scale for turn in turns for scale in turn["loss_scales"]])
    modes = {turns[0]["name"]: all_times(turns) for turns in theirs.values()}
    peer: Peer | None = best_peer(modes, versions) if modes else None
    write_result(name, all_times(ours), batch, peer, statistics.fmean(turn["watts"] for turn in ours),
                 statistics.fmean(turn["sm_mhz"] for turn in ours))


def gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 2)


class Compared(NamedTuple):
    """Both sides' turns. `theirs`: by PyTorch's mode; empty without a peer."""

    executor: CudaExecutor
    batches: list[tuple[Any, Any]]
    ours: list[dict[str, Any]]
    theirs: dict[str, list[dict[str, Any]]]
    versions: dict[str, str]  # of the peer's libraries
    memory: dict[str, Any]


def compare(arguments: Options) -> Compared:
    """Build both sides, and measure them in turn. Without PEER_PYTHON there is no peer."""
    # The peer imports PyTorch meanwhile; it takes no GPU memory before its first measurement.
    peer = TorchPeer(*peer_options(arguments)) if "PEER_PYTHON" in os.environ else None
    started = time.monotonic()
    if arguments.dtype == "int8":
        executor, batches = make_int8(arguments.model, arguments.batch, arguments.size)
    else:
        executor, batches = make_step(arguments.model, arguments.batch, arguments.size, arguments.dtype)
    print(f"ready after {time.monotonic() - started:.1f} s (the first time on a machine, plans are timed)", flush=True)
    free, total = executor.gpu.memory()
    memory: dict[str, Any] = {"ours_in_use_gib": gib(total - free)}
    monitor = GpuMonitor(executor.gpu_bus_id)
    monitor.start()
    programs: dict[str, Callable[[], dict[str, Any]]] = {
        "ours": partial(measure, executor, monitor, batches, arguments.steps, arguments.inference)}

    def peer_turn(mode: str) -> dict[str, Any]:
        assert peer
        turn = peer.measure(mode)
        if mode == arguments.peers[0] and "peer" not in memory:
            memory.update(peer=turn["name"], peer_peak_allocated_gib=gib(turn["allocated_bytes"]))
        return turn

    if peer:
        programs |= {mode: partial(peer_turn, mode) for mode in arguments.peers}
        for mode in arguments.peers:
            peer.prepare(mode)
            # measured after the first mode only
            memory.setdefault("peer_in_use_gib", gib(free - executor.gpu.memory()[0]))
    turns = take_turns(arguments.rounds, programs)
    monitor.close()
    if peer:
        peer.close()
    if arguments.inference:
        for who, of_one in turns.items():
            check_probabilities(who, [turn["loss"] for turn in of_one])
    ours = turns.pop("ours")
    return Compared(executor, batches, ours, turns, peer.versions if peer else {}, memory)


def main() -> None:
    arguments = read_options(Options)
    if arguments.dtype == "int8" and not arguments.inference:
        raise UserError("--dtype int8 is for --inference: add it, or give another precision")
    compared = compare(arguments)
    use = "inference_synthetic" if arguments.inference else "synthetic"
    name = f"{arguments.model}_{SHORT[arguments.dtype]}_b{arguments.batch}_{use}_1gpu"
    publish(name, arguments.batch, compared.ours, compared.theirs, compared.versions)
    if not arguments.inference:
        write_memory(name, compared.memory)
        print(f"GPU memory: {compared.memory}")
    if arguments.profile:
        executor = compared.executor
        measured = executor.profile_inference(compared.batches[0][0]) if arguments.inference else executor.profile()
        note = f"copy {measured.ceiling:.0f} GB/s; step {statistics.median(all_times(compared.ours)):.3f} ms"
        arguments.profile.write_text(measured.text(note))
        print(measured.summary())


if __name__ == "__main__":
    run(main)
