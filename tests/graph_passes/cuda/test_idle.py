"""How long a GPU is idle between passes: with a simulated clock, and on a GPU."""

from __future__ import annotations

import time
from typing import Any

import pytest

from graph_passes.executors.cuda.idle import IdleClock


class Timeline:
    """Simulates a GPU: an event is the time (ms) at which it was recorded."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0

    def timing_event(self) -> list[float]:
        self.num_events += 1
        return [float("nan")]

    def record(self, event: list[float]) -> None:
        event[0] = self.now

    def elapsed_ms(self, start: list[float], end: list[float]) -> float:
        return end[0] - start[0]


def test_gaps_between_passes_are_counted_for_their_step() -> None:
    gpu: Any = Timeline()
    clock = IdleClock(gpu)

    def do_pass(wait: float) -> None:
        gpu.now += wait
        clock.begin()
        gpu.now += 20
        clock.end()

    waits = [[5, 1], [0, 7], [3, 2], [0, 0]]  # two passes per step
    taken = []
    for number, step in enumerate(waits):
        for wait in step:
            do_pass(wait)
        gpu.now += 1  # the optimizer
        clock.end_step()
        if number:
            taken.append(clock.take_seconds() * 1e3)
        if number == 1:  # a validation, which belongs to no step
            clock.forget()
            gpu.now += 1000
    # Nothing counts before the first pass, nor before the first pass after validation; the optimizer is no gap.
    assert taken == pytest.approx([1, 7, 2])
    for _ in range(100):
        do_pass(0.5)
        clock.end_step()
        clock.take_seconds()
    assert gpu.num_events < 20


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu(device: Any) -> None:
    clock = IdleClock(device.gpu)
    memory = device.gpu.allocate(1 << 20)
    begin = time.monotonic()
    for pause in (0.0, 0.03):
        time.sleep(pause)
        clock.begin()
        device.gpu.fill(memory, 0, 1 << 20)
        clock.end()
        device.gpu.synchronize()
    clock.end_step()
    device.gpu.synchronize()
    assert 0.03 <= clock.take_seconds() < time.monotonic() - begin
    device.gpu.free(memory)
