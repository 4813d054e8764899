"""Spreads work over threads, keeps its order, and shows a progress bar with rate and time left.

Threads are enough, because reading, hashing, NumPy, and Pillow's decoding and encoding all release Python's global
lock.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from common.output import shows_bars

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


class _RateColumn(ProgressColumn):
    """Images, or other units, per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {self._unit}/sec" if speed else "", style="progress.data.speed", no_wrap=True)


def progress_bar(unit: str = "images", transient: bool = False) -> Progress:
    """A progress bar on stderr with count, rate and time left.

    A `transient` bar appears only on a terminal, and vanishes when it is done.
    """
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), _RateColumn(unit),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    is_hidden = not shows_bars(console) and (transient or console.is_jupyter)
    return Progress(*columns, console=console, transient=transient, disable=is_hidden)


def map_in_order(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    total: int,
    description: str,
    num_threads: int = 0,
    size: Callable[[Item], int] = lambda _: 1,
    unit: str = "images",
    transient: bool = False,
) -> Iterator[Result]:
    """Yield `function(item)` for all items in their order; threads work a few items ahead of the consumer.

    For the bar, `total` is the number of images (or other `unit`), and `size(item)` the number in one item.
    `num_threads` 0 takes all cores. A `transient` bar appears only on a terminal, and vanishes when it is done.
    """
    num_threads = num_threads or num_cores()
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    with progress_bar(unit, transient) as progress, ThreadPoolExecutor(num_threads) as pool:
        task = progress.add_task(description, total=total)

        def finish_first() -> Result:
            item, future = waiting.popleft()
            result = future.result()
            progress.advance(task, size(item))
            return result

        try:
            for item in items:
                waiting.append((item, pool.submit(function, item)))
                if len(waiting) > 4 * num_threads:
                    yield finish_first()
            while waiting:
                yield finish_first()
        finally:
            for _, future in waiting:
                future.cancel()
