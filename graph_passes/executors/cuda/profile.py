"""Profile of a step or of inference: the launches of the compiled graph, with a timing event between each two.

The events are nodes of the CUDA graph, so every kernel is timed at its place in the step, with realistic cache
contents. The memory ceiling for the percentages is measured on the same GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from graph_passes.choice import Choice, format_choices
from graph_passes.executors.cuda.compiled import CompiledGraph
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernel_library import KernelLibrary
from graph_passes.executors.cuda.program import Launch

COPY_BYTES = 2 << 30  # much larger than any cache


@dataclass(frozen=True)
class Row:
    """One launch of the step. `milliseconds`: median over the replays, including the timing event (about 1 us)."""

    node: str
    operation: str
    milliseconds: float
    num_bytes: int
    flops: int

    @property
    def gigabytes_per_second(self) -> float:
        return self.num_bytes / self.milliseconds / 1e6

    @property
    def teraflops(self) -> float:
        return self.flops / self.milliseconds / 1e9


@dataclass(frozen=True)
class Profile:
    """The times of a compiled graph's launches, and the planner's choices. `ceiling`: GB/s of a copy on this GPU."""

    rows: list[Row]
    ceiling: float
    choices: list[Choice]

    def summary(self) -> str:
        """Sums by operation."""
        return format_summary(self.rows, self.ceiling)

    def text(self, note: str) -> str:
        """The table, the sums, and a note below them."""
        return (f"{format_table(self.rows, self.ceiling)}\n\n{self.summary()}\n{note}\n\n"
                f"chosen, with the times of rivals:\n{format_choices(self.choices)}\n")


def profile(compiled: CompiledGraph, gpu: Gpu, kernels: KernelLibrary) -> Profile:
    """The profile of the graph with the loaded batch."""
    return Profile(time_launches(gpu, compiled.lowering.program.launches), copy_gigabytes_per_second(gpu, kernels),
                   compiled.choices)


def time_launches(gpu: Gpu, launches: Sequence[Launch], replays: int = 10) -> list[Row]:
    """One row per launch."""
    events = [gpu.timing_event() for _ in range(len(launches) + 1)]

    def enqueue() -> None:
        gpu.record_in_graph(events[0])
        for launch, event in zip(launches, events[1:], strict=True):
            launch.enqueue()
            gpu.record_in_graph(event)

    graph = gpu.capture(enqueue)
    times: list[list[float]] = [[] for _ in launches]
    for replay in range(replays + 2):
        gpu.replay(graph)
        gpu.synchronize()
        if replay >= 2:  # the first replays warm up
            for number, (start, end) in enumerate(itertools.pairwise(events)):
                times[number].append(gpu.elapsed_ms(start, end))
    return [Row(launch.node, launch.operation, statistics.median(ms), launch.num_bytes, launch.flops)
            for launch, ms in zip(launches, times, strict=True)]


@contextlib.contextmanager
def copying(gpu: Gpu, kernels: KernelLibrary) -> Iterator[Callable[[], None]]:
    """A function that enqueues a copy of COPY_BYTES within the device. Raises TransientError."""
    address = gpu.allocate(2 * COPY_BYTES)
    try:
        gpu.fill_random(address, COPY_BYTES, "float16")
        vectors = COPY_BYTES // 16
        grid, block = (vectors // 1024, 1, 1), (256, 1, 1)  # four vectors per thread
        yield partial(kernels.get("elementwise.cu", "copy").launch, grid, block, address, address + COPY_BYTES)
    finally:
        gpu.free(address)


def copy_gigabytes_per_second(gpu: Gpu, kernels: KernelLibrary) -> float:
    """The memory ceiling: bytes read plus bytes written by a kernel that copies 2 GiB within the device."""
    with copying(gpu, kernels) as copy:
        return 2 * COPY_BYTES / gpu.time_ms(copy, launches=4) / 1e6


def format_table(rows: list[Row], ceiling: float) -> str:
    """The rows as text. `ceiling`: GB/s of `copy_gigabytes_per_second`."""
    lines = [f"{'node':<34}{'operation':<30}{'ms':>9}{'TFLOP/s':>9}{'GB/s':>7}{'of copy':>9}"]
    for row in rows:
        lines.append(f"{row.node[:33]:<34}{row.operation[:29]:<30}{row.milliseconds:>9.4f}{row.teraflops:>9.1f}"
                     f"{row.gigabytes_per_second:>7.0f}{row.gigabytes_per_second / ceiling:>9.0%}")
    return "\n".join(lines)


def format_summary(rows: list[Row], ceiling: float) -> str:
    """Sums by operation, as text. The column `least` is a lower bound in milliseconds: for each launch the longer of
    two times, moving its bytes at the copy's speed, or multiplying at the highest TFLOP/s of any launch.
    """
    peak = max(row.teraflops for row in rows) or 1.0

    def line(operation: str, group: list[Row]) -> str:
        total = Row("", operation, sum(row.milliseconds for row in group), sum(row.num_bytes for row in group),
                    sum(row.flops for row in group))
        least = sum(max(row.num_bytes / ceiling / 1e6, row.flops / peak / 1e9) for row in group)
        return (f"{operation:<42}{len(group):>9}{total.milliseconds:>9.3f}{least:>9.3f}{total.teraflops:>9.1f}"
                f"{total.gigabytes_per_second:>7.0f}{total.gigabytes_per_second / ceiling:>9.0%}")

    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.operation, []).append(row)
    by_time = sorted(groups.items(), key=lambda item: -sum(row.milliseconds for row in item[1]))
    head = f"{'operation':<42}{'launches':>9}{'ms':>9}{'least':>9}{'TFLOP/s':>9}{'GB/s':>7}{'of copy':>9}"
    return "\n".join([head, *(line(operation, group) for operation, group in by_time), line("sum", rows)])
