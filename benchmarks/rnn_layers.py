"""Recurrent layers on one GPU against PyTorch's, alternating: forward and backward, and inference.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/rnn_layers.py
    python benchmarks/rnn_layers.py --sizes 1024/128/25 --dtypes float16 --uses training     # hidden/batch/steps

For each size, use and precision, ours alternates with PyTorch's nn.LSTM (benchmarks/peer_rnn.py). Ours is the graph's
RNN operator in the cuda executor, with the algorithm of `--algorithms` that the planner finds fastest. PyTorch runs
eagerly and as a CUDA graph; the faster one is the peer. Data has as many features as the layer has hidden units; data,
weights and states are in the measured precision. Training computes all gradients: of data, weights and initial states.

A measurement begins with a warm-up, and ends when the standard error of the median is below 1 %, or at its time limit.
Writes a line for each case, with all times in ms, to results/rnn_layers_1gpu.jsonl, and resumes from that file. A
result that is not finite, on either side, is an error.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from record import RESULTS, best_peer, rounded, run
from torch_peer import LinePeer, take_turns
from trainings import KeptLines, Line

from common.command_line import Positive, read_options
from common.environment import versions
from common.errors import ProgramError, UserError
from gpu_report.recurrent import layer_graph
from graph_passes import Graph, passes
from graph_passes.choice import limited
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.function import DeviceFunction
from graph_passes.executors.cuda.toolchain import Toolchain, toolchain
from graph_passes.operators.rnn import flops
from graph_passes.pipeline import cover
from train.recording.gpu_monitor import GpuMonitor
from train.timing import standard_error_of_median

PEER = Path(__file__).with_name("peer_rnn.py")
# hidden/batch/steps: sizes from articles (32 steps, hidden 128 to 1,024), from the issue (25 steps), and similar ones.
SIZES = ("128/128/32", "256/128/32", "512/128/32", "1024/128/32", "1024/128/25", "2048/128/25", "4096/128/25",
         "512/64/25", "1024/64/25", "1024/256/25", "2048/64/25", "2048/256/25", "512/128/128", "1024/128/128")
SHORT = {"float16": "fp16", "bfloat16": "bf16", "tf32": "tf32", "float32": "fp32"}
SAMPLE_MS = 2.0  # time of the repetitions between two CUDA events; the events themselves cost 0.002 ms
LEAST_SAMPLES, WANTED_ERROR = 12, 0.01

Dtype = Literal["float16", "bfloat16", "tf32", "float32"]
Use = Literal["training", "inference"]
Algorithm = Literal["standard", "persist_static", "persist_static_small_h"]


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    sizes: tuple[str, ...] = SIZES
    """Hidden units/sequences in a batch/steps."""
    dtypes: tuple[Dtype, ...] = ("float16", "bfloat16", "tf32")
    """Precisions."""
    uses: tuple[Use, ...] = ("training", "inference")
    """training: forward and backward pass; inference: forward pass alone."""
    mode: Literal["lstm", "gru", "rnn_tanh"] = "lstm"
    """Kind of layer."""
    algorithms: tuple[Algorithm, ...] = ("standard", "persist_static", "persist_static_small_h")
    """cuDNN's algorithms; ours takes the fastest."""
    rounds: Positive = 2
    """Measurements of ours and of each PyTorch mode, alternating."""
    limit: float = 1.0
    """Seconds after which a measurement ends, without warm-up."""
    warm_up: float = 0.3
    """Seconds of warm-up in each measurement."""
    results: Path = RESULTS
    """Folder to write to."""


@dataclass(frozen=True)
class LayerCase:
    """One layer to measure, with the limits of the measurement."""

    mode: str
    hidden: int
    batch: int
    steps: int
    dtype: str
    use: str
    limit_seconds: float
    warm_up_seconds: float
    sample_ms: float = SAMPLE_MS
    least_samples: int = LEAST_SAMPLES
    wanted_error: float = WANTED_ERROR

    @property
    def name(self) -> str:
        return f"{self.mode}_{SHORT[self.dtype]}_h{self.hidden}_b{self.batch}_t{self.steps}_{self.use}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shape = (self.steps, self.batch, self.hidden)
        return {"data": shape, **({"head": shape} if self.use == "training" else {})}

    @property
    def graph(self) -> Graph:
        """The graph of the layer, with gradients in training."""
        return layer_graph(self.mode, self.hidden, self.use == "training")

    @property
    def network_dtype(self) -> str:
        return "float32" if self.dtype == "tf32" else self.dtype


def cases_of(options: Options) -> Iterator[LayerCase]:
    """Yield all cases of the options. Raises UserError for an invalid size."""
    for dtype in options.dtypes:
        for use in options.uses:
            for size in options.sizes:
                parts = size.split("/")
                if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
                    raise UserError(f"--sizes has {size}: give hidden/batch/steps, such as 1024/128/25")
                hidden, batch, steps = map(int, parts)
                yield LayerCase(options.mode, hidden, batch, steps, dtype, use, options.limit, options.warm_up)


class Ours:
    """The layer on the GPU, run by the cuda executor."""

    def __init__(self, tools: Toolchain, case: LayerCase, algorithms: Sequence[str]) -> None:
        self._gpu, self._case = tools.gpu, case
        marked = passes.precision(case.graph, case.network_dtype)
        self._function = DeviceFunction(
            lambda price: cover(marked, limited(price, lambda each: each.node.get("algorithm") in (None, *algorithms))),
            case.shapes, case.network_dtype, tools)
        random = np.random.default_rng(0)
        for name, buffer in self._function.variables.items():
            values = random.standard_normal(buffer.shape, np.float32)
            if name == "parameters":  # initialised like PyTorch's weights
                values = random.uniform(-1, 1, buffer.shape).astype(np.float32) / math.sqrt(case.hidden)
            self._gpu.upload(buffer.address, stored(values * (not name.startswith("state")), buffer.dtype))
        self.algorithm = self._function.graph["rnn"]["algorithm"]
        self.times = {kernel: ms for choice in self._function.choices
                      for kernel, ms in ((choice.kernel, choice.price), *choice.rivals)}

    def measure(self) -> dict[str, Any]:
        return {"step_ms": repeat(self._gpu, self._function, self._case), "finite": self._is_finite()}

    def close(self) -> None:
        self._function.close()

    def _is_finite(self) -> bool:
        return all(is_finite(self._gpu.download(buffer.address, buffer.shape, bits_of(buffer.dtype)), buffer.dtype)
                   for buffer in self._function.outputs)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert fp32 values to the bits of the dtype; bfloat16 is truncated."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def bits_of(dtype: str) -> str:
    """The unsigned integer type of the dtype's size."""
    return "uint32" if dtype == "float32" else "uint16"


def is_finite(bits: np.ndarray, dtype: str) -> bool:
    """Whether all numbers are finite: none has all bits of its exponent set."""
    exponent = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
    return not bool(((bits & exponent) == exponent).any())


def repeat(gpu: Gpu, step: Callable[[], None], case: LayerCase) -> list[float]:
    """Milliseconds of a step: takes samples, each of enough steps to be timed exactly, until the median is exact."""
    begin, num_steps = time.monotonic(), 0
    while time.monotonic() - begin < case.warm_up_seconds:
        step()
        gpu.synchronize()
        num_steps += 1
    per_sample = max(1, math.ceil(case.sample_ms / (1e3 * case.warm_up_seconds / num_steps)))
    start, end = gpu.timing_event(), gpu.timing_event()
    samples: list[float] = []
    begin = time.monotonic()
    while len(samples) < case.least_samples or (
            time.monotonic() - begin < case.limit_seconds and relative_error(samples) > case.wanted_error):
        gpu.record(start)
        for _ in range(per_sample):
            step()
        gpu.record(end)
        gpu.synchronize()
        samples.append(gpu.elapsed_ms(start, end) / per_sample)
    return samples


def relative_error(samples: Sequence[float]) -> float:
    """Standard error of the median, relative to the median."""
    return standard_error_of_median(samples) / statistics.median(samples)


def measure(tools: Toolchain, monitor: GpuMonitor, peer: LinePeer | None, case: LayerCase, rounds: int,
            algorithms: Sequence[str]) -> Line:
    """Measure both sides, alternating. Raises ProgramError if a computed number is not finite."""
    ours = Ours(tools, case, algorithms)
    readings = []

    def own_turn() -> dict[str, Any]:
        monitor.take()
        found = ours.measure()
        monitor.sample()
        readings.append(monitor.take())
        return found

    def peer_turn(way: str) -> dict[str, Any]:
        assert peer
        peer.say(json.dumps({**asdict(case), "way": way}))
        answer: dict[str, Any] = json.loads(peer.answer())
        return answer

    programs: dict[str, Callable[[], dict[str, Any]]] = {"ours": own_turn}
    if peer:
        programs |= {way: lambda way=way: peer_turn(way) for way in ("eager", "graph")}  # type: ignore[misc]
    turns = take_turns(rounds, programs)
    ours.close()
    for who, of_one in turns.items():
        if not all(each["finite"] for each in of_one):
            raise ProgramError(f"{who} computed numbers that are not finite for {case.name}: nothing is published")
    times = {who: [ms for each in of_one for ms in each["step_ms"]] for who, of_one in turns.items()}
    median = statistics.median(times["ours"])
    operations = flops(case.graph["rnn"], case.shapes["data"]) * (3 if case.use == "training" else 1)
    line: Line = {
        "name": case.name, "ms": round(median, 5), "mean_ms": round(statistics.fmean(times["ours"]), 5),
        "relative_error": round(relative_error(times["ours"]), 5), "tflops": round(operations / median / 1e9, 2),
        "algorithm": ours.algorithm, "algorithm_ms": {way: round(ms, 5) for way, ms in ours.times.items()},
        "watts": round(statistics.fmean(each.power for each in readings), 1),
        "sm_mhz": round(statistics.fmean(each.clock for each in readings)),
        "peer": None, "ratio": None, "step_ms": rounded(times["ours"]),
    }
    if peer:
        samples_by_mode = {turns[way][0]["name"]: times[way] for way in ("eager", "graph")}
        best = best_peer(samples_by_mode, turns["eager"][0]["versions"])
        theirs = statistics.median(best.step_ms)
        line["peer"] = {"name": best.name, "ms": round(theirs, 5), "relative_error": round(
            relative_error(best.step_ms), 5), "versions": best.versions, "step_ms": rounded(best.step_ms),
            "others": {name: rounded(samples) for name, samples in best.others.items()}}
        line["ratio"] = round(theirs / median, 4)
    return line


def described(line: Line) -> str:
    """A line as text: ms with standard error, TFLOP/s, algorithm; PyTorch's ms in each mode, and the ratio to the best.
    """
    row = (f"{line['name']:<36} {line['ms']:>8.4f} ms +-{line['relative_error']:>6.2%} {line['tflops']:>7.1f} TFLOP/s "
           f"{line['algorithm']:<22}")
    if line["peer"]:
        samples_by_mode = {line["peer"]["name"]: line["peer"]["step_ms"], **line["peer"]["others"]}
        theirs = ", ".join(f"{name.split(' ', 2)[2]} {statistics.median(samples):.4f}"
                           for name, samples in sorted(samples_by_mode.items(), reverse=True))
        row += f" PyTorch {theirs}: {line['ratio']:.2f} times"
    return row


def geometric_mean(lines: Sequence[Line]) -> str:
    """A sentence with the geometric mean of the ratios; empty if there are none."""
    ratios = [line["ratio"] for line in lines if line["ratio"]]
    if not ratios:
        return ""
    mean = statistics.geometric_mean(ratios)
    return f"geometric mean of {len(ratios)}: {mean:.2f} times PyTorch's fastest way, {min(ratios):.2f} at least"


def main() -> None:
    options = read_options(Options)
    cases = list(cases_of(options))
    kept = KeptLines(options.results / "rnn_layers_1gpu.jsonl", {
        "what": "recurrent layers, ms of a step", "rounds": options.rounds, "limit_seconds": options.limit,
        "algorithms": options.algorithms, "versions": versions()})
    measured = {line["name"] for line in kept.lines}
    gpu = Gpu()
    tools = {tf32: toolchain(gpu, tf32) for tf32 in (False, True)}
    with contextlib.ExitStack() as stack:
        peer = None
        if "PEER_PYTHON" in os.environ:
            peer = stack.enter_context(contextlib.closing(LinePeer(PEER)))
        monitor = stack.enter_context(contextlib.closing(GpuMonitor(gpu.device.pci_bus_id)))
        monitor.start()
        for case in cases:
            if case.name not in measured:
                kept.add(measure(tools[case.dtype == "tf32"], monitor, peer, case, options.rounds, options.algorithms),
                         show=False)
                print(described(kept.lines[-1]), flush=True)
    print(geometric_mean(kept.lines))


if __name__ == "__main__":
    run(main)
