"""Monitors a GPU during a run through NVML: power, utilisation, memory in use, clock.

A thread takes the readings, so that the training loop never waits for NVML. A reading that cannot be taken is NaN, and
`problem` names the reading and the reason.
"""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

SAMPLE_SECONDS = 0.2  # NVML's own counters change about every 0.1 s
METERED_SECONDS = 1.0  # shortest time over which the energy meter is used; the meter changes about every 0.1 s
# nvml.h: nvmlClocksEventReasonSwPowerCap and nvmlClocksEventReasonHwPowerBrakeSlowdown
POWER_REASONS = 0x4 | 0x80


class GpuReadings(NamedTuple):
    """Readings of one GPU or of several GPUs: powers are added, all other readings are averaged. NaN: unknown."""

    power: float  # W
    utilization: float  # fraction of the time in which a kernel ran
    memory: float  # GiB in use by all programs
    clock: float  # MHz of the multiprocessors
    power_capped: float  # fraction of the time in which the power limit held the clock down


class _Sample(NamedTuple):
    seconds: float
    joules: float  # energy used since the driver was loaded
    readings: GpuReadings


UNKNOWN = GpuReadings(*(float("nan") for _ in GpuReadings._fields))


class GpuMonitor:
    """Watches the GPU with the PCI bus id `bus_id` (such as "0000:1B:00.0") from `start` to `close`.

    `nvml` and `clock` (seconds) are for tests.
    """

    def __init__(self, bus_id: str, nvml: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[str, str] = {}  # reading that cannot be taken -> reason
        self._lock = threading.Lock()
        self._samples: list[_Sample] = []  # samples since the last `take`, and one earlier sample
        self._last = UNKNOWN
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        try:
            nvml = nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._device = nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
            self._nvml = nvml
        except Exception as error:  # a missing library, a missing driver and a missing GPU raise different types
            self._refused["anything"] = str(error)

    @property
    def problem(self) -> str:
        """The readings that are not available, with the reasons; "" if there are none."""
        return "; ".join(f"NVML does not give {what}: {why}" for what, why in self._refused.items())

    def start(self) -> None:
        if self._nvml:
            self.sample()
            self._thread = threading.Thread(target=self._run, name="gpu monitor", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop monitoring. `take` can still be called once for the samples so far."""
        self._stop.set()
        if self._thread:
            self._thread.join()

    def take(self) -> GpuReadings:
        """Means since the last call; without a new sample, the last call's result again."""
        with self._lock:
            samples, self._samples = self._samples, self._samples[-1:]
        if len(samples) > 1:
            first, last = samples[0], samples[-1]
            means = GpuReadings(*(sum(values) / len(values) for values in
                                  zip(*(sample.readings for sample in samples[1:]), strict=True)))
            # The energy meter is more exact than samples of the power, because it also counts between two samples.
            joules, seconds = last.joules - first.joules, last.seconds - first.seconds
            is_metered = not math.isnan(joules) and seconds >= METERED_SECONDS
            self._last = means._replace(power=joules / seconds) if is_metered else means
        return self._last

    def sample(self) -> None:
        """Take one sample of all readings."""
        joules = self._read("energy", lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device) / 1e3)
        readings = GpuReadings(
            self._read("power", lambda: self._nvml.nvmlDeviceGetPowerUsage(self._device) / 1e3),
            self._read("utilisation", lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100),
            self._read("memory in use", lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._device).used / 2**30),
            self._read("clock", lambda: self._nvml.nvmlDeviceGetClockInfo(self._device, self._nvml.NVML_CLOCK_SM)),
            self._read("what holds the clock down", self._power_capped),
        )
        with self._lock:
            self._samples.append(_Sample(self._clock(), joules, readings))

    def _power_capped(self) -> bool:
        return self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device) & POWER_REASONS != 0

    def _read(self, what: str, read: Callable[[], float]) -> float:
        if what not in self._refused:
            try:
                return float(read())
            except Exception as error:  # NVMLError, or another exception if the driver is being unloaded
                self._refused[what] = str(error)
        return float("nan")

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.sample()
