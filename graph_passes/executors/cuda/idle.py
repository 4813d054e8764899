"""Measures, on the GPU, how long the GPU is idle because its next batch is late."""

from __future__ import annotations

from collections import deque
from typing import Any

from graph_passes.executors.cuda.device import Gpu


class IdleClock:
    """CUDA events at the end of each pass and at the start of the next: the time between them is idle time.

        clock.begin(); ...; clock.end()         around the launches of every pass (twice or more in a step is fine)
        clock.end_step()                        after the last launch of a step
        clock.take_seconds()                    idle time in the oldest untaken step, which the GPU has finished
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._unused: list[Any] = []  # events, reused in turn
        self._end: Any = None  # end of the latest launch
        self._gaps: list[tuple[Any, Any]] = []  # of the current step: (end of a pass, begin of the next one)
        self._steps: deque[list[tuple[Any, Any]]] = deque()

    def begin(self) -> None:
        if self._end is not None:
            self._gaps.append((self._end, self._record()))
            self._end = None

    def end(self) -> None:
        if self._end is None:
            self._end = self._record()
        else:
            self._gpu.record(self._end)

    def end_step(self) -> None:
        self.end()
        self._steps.append(self._gaps)
        self._gaps = []

    def forget(self) -> None:
        """Do not count the time until the next pass, because work other than training runs now."""
        if self._end is not None:
            self._unused.append(self._end)
            self._end = None

    def take_seconds(self) -> float:
        gaps = self._steps.popleft()
        seconds = sum(self._gpu.elapsed_ms(end, begin) for end, begin in gaps) / 1e3
        self._unused += [event for gap in gaps for event in gap]
        return seconds

    def _record(self) -> Any:
        event = self._unused.pop() if self._unused else self._gpu.timing_event()
        self._gpu.record(event)
        return event
