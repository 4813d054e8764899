"""The `Bench` that each section of the report receives: the device, the section's time, and the collected figures."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from common.errors import UserError
from common.mxnet_compat import mx
from gpu_report.figures import Figure, Section
from train.devices import Placement
from train.timing import repeat

LIMIT_SECONDS, CPU_LIMIT_SECONDS = 1.0, 8.0  # for timing one kernel or layer
MOST_LISTED = 8  # most names that a note lists for one reason
Sampler = AbstractContextManager[Callable[[], float]]  # yields a function that takes one sample, in ms


class Task(NamedTuple):
    """One timing of a kernel or a layer."""

    what: str
    size: str
    precision: str
    flops: int
    sampler: Callable[[], Sampler]  # raises UserError if the device cannot run the kernel or layer


@dataclass
class Bench:
    """The device and the time of a section's measurements; `add`, `keep` and `leave_out` collect the results. After a
    stop, a kill or the end of its time, the next start resumes from `begun`, the results so far.

    Args: placement: the device and its executor. device: the device's name. folder: the report's folder, for the
        section's own files. seconds: the section's time. A measurement that could begin only after this time is left
        out, with a note. data: CIFAR-10 in any form that the loader reads; "" if --data is not given. target_accuracy:
        the top-1, as a fraction, at which the counting of time and cost ends. price_per_hour: the price of the machine,
        in any currency; 0: unknown. save: writes the section's results so far to disk. Raises UserError.
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
    left_out: dict[str, list[str]] = field(default_factory=dict)  # reason -> names of the measurements left out

    def __post_init__(self) -> None:
        self._start = self.clock()
        self.figures = list(self.begun.figures)
        self._late = False

    @property
    def on_gpu(self) -> bool:
        return self.placement.device.startswith("gpu")

    @property
    def limit_seconds(self) -> float:
        """The time limit for one kernel or layer."""
        return LIMIT_SECONDS if self.on_gpu else CPU_LIMIT_SECONDS

    @property
    def spent(self) -> float:
        """Seconds since the section began."""
        return self.clock() - self._start

    def machine_module(self, section: str) -> ModuleType | None:
        """The module that opens the machine of `section` on this device; None, with a note, on a GPU without cuDNN 9.
        """
        if self.on_gpu and self.placement.executor != "cuda":
            self.leave_out("the section", f"it is measured through cuDNN 9, which {self.device} cannot run")
            return None
        return importlib.import_module(f"gpu_report.{section}_{'cuda' if self.on_gpu else 'cpu'}")

    def free_memory(self) -> None:
        """Free the GPU memory that earlier networks have left allocated. MXNet keeps this memory for later arrays, so
        it would otherwise count as memory of the next network.
        """
        if self.on_gpu:
            gc.collect()  # frees executors, which are in reference cycles
            gpu = mx.gpu(0)
            # MXNet refuses to free memory on a device that it has not used yet. A copy uses the device without a
            # kernel, and so also works on newer GPUs, for which MXNet has no kernels.
            mx.nd.array([0.0], gpu).wait_to_read()
            gpu.empty_cache()

    def has(self, what: str, size: str, precision: str) -> bool:
        """Whether the figure is measured already. `size` may be only the beginning of the figure's size."""
        return any((figure.what, figure.precision) == (what, precision) and figure.size.startswith(size)
                   for figure in self.figures)

    def has_time(self, for_what: str, least: float = 0.0) -> bool:
        """Whether there is time for a measurement that takes at least `least` seconds. If not, a note says that the
        measurement is left out; repeating the command measures it.
        """
        if self.spent > self.seconds:
            why = f"the section had used up its {self.seconds:.0f} s"
        elif least > self.seconds:
            why = f"it takes at least {least:.0f} s, and the section had only {self.seconds:.0f} s"
        else:
            return True
        self._late = True
        self.leave_out(for_what, f"{why}; repeat the command to measure it")
        return False

    def add(self, *figures: Figure) -> None:
        """Keep the figures, and print a line for each."""
        self.keep(*figures)
        for figure in figures:
            error = f" +/- {figure.error:.1%}" if figure.error is not None else ""
            limit = f" ({figure.limit})" if figure.limit else ""
            name = ", ".join(filter(None, (figure.what, figure.size, figure.precision)))
            value = format(figure.value, ",.0f" if figure.value >= 1000 else ".4g")
            print(f"  {name}: {value} {figure.unit}{error}{limit}", flush=True)

    def keep(self, *figures: Figure) -> None:
        """Add figures to the results and save them to disk, so that the next start has the figures even if this process
        is killed.
        """
        self.figures += figures
        self.save(replace(self.found(), complete=False))

    def time(self, task: Task) -> None:
        """Time a kernel or layer and add the figure, unless the figure is measured already. If the timing is left out,
        note the reason.
        """
        name = f"{task.what} {task.size} in {task.precision}"
        if self.has(task.what, task.size, task.precision) or not self.has_time(name):
            return
        try:
            with task.sampler() as sample:
                sample()  # warm-up
                timing = repeat(sample, self.limit_seconds)
        except UserError as error:
            self.leave_out(name, str(error))
            return
        self.add(Figure(task.what, task.size, task.precision, timing.median, "ms", timing.error, timing.limit,
                        {"tflops": task.flops / timing.median / 1e9}))

    def leave_out(self, what: str, reason: str) -> None:
        """Note, and print, that a measurement is left out."""
        self.left_out.setdefault(reason, []).append(what)
        print(f"  {what}: left out, {reason}", flush=True)

    def found(self) -> Section:
        notes = (f"{_listed(whats)}: {reason}" for reason, whats in self.left_out.items())
        return Section(tuple(self.figures), tuple(notes), round(self.begun.seconds + self.spent, 1), not self._late)


def _listed(whats: list[str]) -> str:
    """The names, joined by commas; only the first MOST_LISTED names if there are more."""
    more = len(whats) - MOST_LISTED
    shown = whats if more <= 0 else [*whats[:MOST_LISTED], f"{more} more"]
    return " and ".join(filter(None, ("; ".join(shown[:-1]), shown[-1])))
