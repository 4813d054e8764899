"""What a section of the report is given, and how it tells how far it is."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError
from common.mxnet_compat import mx
from gpu_report.figures import Figure, Section
from train.devices import Placement
from train.timing import repeat

LIMIT_SECONDS, CPU_LIMIT_SECONDS = 1.0, 8.0  # of the timing of a kernel or a layer
MOST_LISTED = 8  # things that were left out for one reason
Sampler = AbstractContextManager[Callable[[], float]]  # of what times once: ms


class Task(NamedTuple):
    """One timing of a kernel or a layer."""

    what: str
    size: str
    precision: str
    flops: int
    sampler: Callable[[], Sampler]  # raises UserError for what the device cannot do


@dataclass
class Bench:
    """Where and how long a section measures; `add`, `keep` and `leave_out` collect what it finds. Where its time was
    over, or it was stopped or killed, the next start goes on with what it has found: `begun`.

    Args:
        placement: the device, and what computes on it.
        device: its name.
        folder: of the report, for files of the section's own.
        seconds: that the section has. What would begin after them is left out, and said.
        data: CIFAR-10 in any form that the loader reads; "" where it is not given.
        target_accuracy: top-1 that time and cost are counted to, as a fraction.
        price_per_hour: of the machine, in any currency; 0: not known.
        save: writes down the section as far as it has come. Raises UserError.
    """

    placement: Placement
    device: str
    folder: Path
    seconds: float
    data: str = ""
    target_accuracy: float = 0.0
    price_per_hour: float = 0.0
    begun: Section = field(default_factory=lambda: Section(()))
    save: Callable[[Section], object] = lambda section: None
    clock: Callable[[], float] = time.monotonic
    left_out: dict[str, list[str]] = field(default_factory=dict)  # what, by the reason

    def __post_init__(self) -> None:
        self._start = self.clock()
        self.figures = list(self.begun.figures)
        self._late = False

    @property
    def on_gpu(self) -> bool:
        return self.placement.device.startswith("gpu")

    @property
    def limit_seconds(self) -> float:
        """Of the timing of a kernel or a layer."""
        return LIMIT_SECONDS if self.on_gpu else CPU_LIMIT_SECONDS

    @property
    def spent(self) -> float:
        """Seconds since the section began."""
        return self.clock() - self._start

    def free_memory(self) -> None:
        """Give back what networks before have left, which would count as in use by the next one: on a GPU MXNet keeps
        memory for arrays to come."""
        if self.on_gpu:
            gc.collect()  # executors are in cycles
            gpu = mx.gpu(0)
            # It refuses to free on a device that it has not used yet. A copy uses it without a kernel, of which MXNet
            # has none for newer GPUs.
            mx.nd.array([0.0], gpu).wait_to_read()
            gpu.empty_cache()

    def has(self, what: str, size: str, precision: str) -> bool:
        """Whether that is measured already; a size may be the beginning of one."""
        return any((figure.what, figure.precision) == (what, precision) and figure.size.startswith(size)
                   for figure in self.figures)

    def has_time(self, for_what: str, least: float = 0.0) -> bool:
        """Whether something more may begin, which takes so many seconds at `least`; what may not is left out, and the
        same command measures it."""
        if self.spent > self.seconds:
            why = f"the section's {self.seconds:.0f} s were over"
        elif least > self.seconds:
            why = f"it takes {least:.0f} s or more and the section had {self.seconds:.0f} s"
        else:
            return True
        self._late = True
        self.leave_out(for_what, f"{why}; the same command goes on with it")
        return False

    def add(self, *figures: Figure) -> None:
        """Keep them, and print a line for each."""
        self.keep(*figures)
        for figure in figures:
            error = f" +/- {figure.error:.1%}" if figure.error is not None else ""
            limit = f" ({figure.limit})" if figure.limit else ""
            name = ", ".join(filter(None, (figure.what, figure.size, figure.precision)))
            value = format(figure.value, ",.0f" if figure.value >= 1000 else ".4g")
            print(f"  {name}: {value} {figure.unit}{error}{limit}", flush=True)

    def keep(self, *figures: Figure) -> None:
        """With what was found before, on the disk too: whatever ends the program, the next start has them."""
        self.figures += figures
        self.save(replace(self.found(), complete=False))

    def time(self, task: Task) -> None:
        """Do it, unless it is done, and add what it finds; or leave it out."""
        name = f"{task.what} {task.size} in {task.precision}"
        if self.has(task.what, task.size, task.precision) or not self.has_time(name):
            return
        try:
            with task.sampler() as sample:
                sample()  # warms up
                timing = repeat(sample, self.limit_seconds)
        except UserError as error:
            self.leave_out(name, str(error))
            return
        self.add(Figure(task.what, task.size, task.precision, timing.median, "ms", timing.error, timing.limit,
                        {"tflops": task.flops / timing.median / 1e9}))

    def leave_out(self, what: str, reason: str) -> None:
        """Note that something is not measured, and print it."""
        self.left_out.setdefault(reason, []).append(what)
        print(f"  {what}: left out, {reason}", flush=True)

    def found(self) -> Section:
        notes = (f"{_listed(whats)}: {reason}" for reason, whats in self.left_out.items())
        return Section(tuple(self.figures), tuple(notes), round(self.begun.seconds + self.spent, 1), not self._late)


def _listed(whats: list[str]) -> str:
    """All of them; of very many the first."""
    more = len(whats) - MOST_LISTED
    shown = whats if more <= 0 else [*whats[:MOST_LISTED], f"{more} more"]
    return " and ".join(filter(None, ("; ".join(shown[:-1]), shown[-1])))
