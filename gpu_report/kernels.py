"""Section kernels: matrix products and convolutions in DeepBench's sizes by precision, and copies.

Operands are random and identical in each repetition, as in DeepBench, so small operands stay in the cache. A
convolution's forward pass, its data gradient and its weight gradient are timed separately; "total" is their sum, as in
DeepBench. In 8 bits only the forward pass is timed, with bias and ReLU, because inference computes all three in one
kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Protocol

from common.errors import UserError
from gpu_report.datasheets import datasheet_of
from gpu_report.deepbench import (
    CONVOLUTIONS,
    GEMMS,
    SMALL_CONVOLUTIONS,
    SMALL_GEMMS,
    Convolution,
    Gemm,
)
from gpu_report.figures import Figure, Section
from gpu_report.section import Bench, Sampler, Task
from train.timing import repeat

WARM_UP_SECONDS = 1.0  # warm-up for a GPU, whose clock rises only under load; the copy is the first kernel to be timed
PASSES = ("forward", "data gradient", "weight gradient")
COPY, GEMM, CONVOLUTION, TOTAL = "copy", "GEMM", "convolution", "convolution, total"


class Machine(Protocol):
    """A device on which kernels are timed. Its samplers raise UserError for a kernel that the device cannot run."""

    precisions: tuple[str, ...]
    copy_bytes: int  # bytes that a copy reads; a copy writes the same number of bytes

    def copy(self) -> Sampler: ...

    def gemm(self, size: Gemm, precision: str) -> Sampler: ...

    def convolution(self, size: Convolution, direction: str, precision: str) -> Sampler: ...

    def close(self) -> None: ...


def measure(bench: Bench) -> Section:
    """Time all kernels. A note names each kernel that the device lacks, and each kernel for which no time was left."""
    module = bench.machine_module("kernels")
    if module is None:
        return bench.found()
    sizes = (GEMMS, CONVOLUTIONS) if bench.on_gpu else (SMALL_GEMMS, SMALL_CONVOLUTIONS)
    # an earlier start may have left totals in the figures
    bench.figures = [figure for figure in bench.figures if figure.what != TOTAL]
    with contextlib.closing(module.open_machine(bench.placement)) as machine:
        if not bench.has(COPY, "", ""):
            _measure_copy(bench, machine)
        for task in _tasks(machine, *sizes):
            bench.time(task)
    bench.figures = list(with_shares([*bench.figures, *totals(bench.figures)], bench.device))
    return bench.found()


def _measure_copy(bench: Bench, machine: Machine) -> None:
    try:
        with machine.copy() as sample:
            if bench.on_gpu:
                repeat(sample, WARM_UP_SECONDS, WARM_UP_SECONDS)
            timing = repeat(sample, bench.limit_seconds)
    except UserError as error:
        bench.leave_out(COPY, str(error))
        return
    speed = 2 * machine.copy_bytes / timing.median / 1e6
    bench.add(Figure(COPY, f"{machine.copy_bytes / 2**20:,.0f} MiB", "", speed, "GB/s", timing.error, timing.limit))


def _tasks(machine: Machine, gemms: Iterable[Gemm], convolutions: Iterable[Convolution]) -> Iterator[Task]:
    """The timings, the most important ones first, in case the time runs out."""
    for gemm in gemms:
        for precision in machine.precisions:
            yield Task(GEMM, str(gemm), precision, gemm.flops, partial(machine.gemm, gemm, precision))
    for size in convolutions:
        for precision in machine.precisions:
            for direction in PASSES if precision not in ("fp8", "int8") else PASSES[:1]:
                yield Task(f"{CONVOLUTION} {direction}", str(size), precision, size.flops,
                           partial(machine.convolution, size, direction, precision))


def totals(figures: Iterable[Figure]) -> Iterator[Figure]:
    """Yield the sum of the three passes, for each convolution and precision that has all three."""
    found: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        if figure.what in (f"{CONVOLUTION} {direction}" for direction in PASSES):
            found.setdefault((figure.size, figure.precision), []).append(figure)
    for (size, precision), passes in found.items():
        if len(passes) == len(PASSES):
            milliseconds = sum(each.value for each in passes)
            flops = sum(each.more["tflops"] * each.value for each in passes)
            errors = [each.error for each in passes if each.error is not None]
            yield Figure(TOTAL, size, precision, milliseconds, "ms",
                         # the error of the sum is unknown if the error of one pass is
                         max(errors) if len(errors) == len(passes) else None,
                         "as one of its passes" if any(each.limit for each in passes) else "",
                         {"tflops": flops / milliseconds})


def with_shares(figures: Iterable[Figure], device: str) -> Iterator[Figure]:
    """The figures, each with its share of the datasheet's peak and its share of the best GEMM of equal precision."""
    figures, sheet = list(figures), datasheet_of(device)
    best: dict[str, float] = {}
    for figure in figures:
        if figure.what == GEMM:
            best[figure.precision] = max(best.get(figure.precision, 0.0), figure.more["tflops"])
    for figure in figures:
        more = dict(figure.more)
        if figure.what == COPY:
            promised: float | None = sheet.gigabytes_per_second if sheet else None
            speed = figure.value
        else:
            promised = sheet.tflops.get(figure.precision) if sheet else None
            speed = more["tflops"]
            if figure.precision in best:
                more["of_best_gemm"] = speed / best[figure.precision]
        if promised:
            more["of_datasheet"] = speed / promised
        yield Figure(figure.what, figure.size, figure.precision, figure.value, figure.unit, figure.error, figure.limit,
                     more)
