"""The GPU monitor on a made-up NVML: means, the energy meter, and everything that may be refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from train.recording.gpu_monitor import GpuMonitor


class FakeNvml:
    """A GPU that draws `power` W; what is in `refuses` raises, as NVML does."""

    NVML_CLOCK_SM = 1

    def __init__(self, *refuses: str) -> None:
        self.refuses = refuses
        self.power, self.utilization, self.gib = 0.0, 0.0, 0.0
        self.clock, self.reasons = 0, 0
        self.joules, self.seconds = 1234.5, 0.0

    def advance(self, seconds: float, power: float) -> None:
        self.power = power
        self.seconds += seconds
        self.joules += seconds * power

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByPciBusId": lambda bus_id: bus_id,
            "nvmlDeviceGetTotalEnergyConsumption": lambda _: round(1e3 * self.joules),
            "nvmlDeviceGetPowerUsage": lambda _: round(1e3 * self.power),
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=round(100 * self.utilization)),
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=int(self.gib * 2**30)),
            "nvmlDeviceGetClockInfo": lambda _, kind: self.clock if kind == self.NVML_CLOCK_SM else -1,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: self.reasons,
        }

        def call(*arguments: Any) -> Any:
            if any(refused in name for refused in self.refuses):
                raise RuntimeError("Not Supported")
            return answers[name](*arguments)

        return call


def monitor(nvml: FakeNvml) -> GpuMonitor:
    made = GpuMonitor("0000:1B:00.0", nvml, lambda: nvml.seconds)
    made.sample()
    return made


def feed(made: GpuMonitor, nvml: FakeNvml) -> None:
    """Two samples: 3 s at 100 W and 1 s at 500 W."""
    for seconds, power, utilization, gib in ((3.0, 100.0, 0.5, 10.0), (1.0, 500.0, 1.0, 12.0)):
        nvml.advance(seconds, power)
        nvml.utilization, nvml.gib = utilization, gib
        # At 500 W the limit holds the clock down (nvml.h: 0x4); at 100 W a user's setting does (0x2).
        nvml.clock, nvml.reasons = (1980, 0x2) if power < 500 else (1500, 0x4 | 0x2)
        made.sample()


def test_means_since_the_last_call() -> None:
    nvml = FakeNvml()
    made = monitor(nvml)
    assert all(math.isnan(value) for value in made.take()), "one sample says nothing yet"
    feed(made, nvml)
    readings = made.take()
    assert readings.power == pytest.approx(200.0), "the meter's 800 J in 4 s, not the mean of the two samples"
    assert (readings.utilization, readings.memory) == pytest.approx((0.75, 11.0))
    assert (readings.clock, readings.power_capped) == pytest.approx((1740.0, 0.5))
    assert made.take() == readings, "no sample since"
    nvml.advance(2.0, 50.0)
    made.sample()
    assert made.take().power == pytest.approx(50.0)
    nvml.seconds += 0.06  # too short for the meter to have moved
    made.sample()
    assert made.take().power == 50.0
    assert made.problem == ""


def test_without_the_meter_power_is_the_mean_of_its_samples() -> None:
    nvml = FakeNvml("Energy")
    made = monitor(nvml)
    feed(made, nvml)
    assert made.take().power == pytest.approx(300.0)
    assert made.problem == "NVML does not give energy: Not Supported"


def test_what_is_refused_is_named_and_the_rest_is_read() -> None:
    nvml = FakeNvml("Energy", "Power", "Utilization")
    made = monitor(nvml)
    feed(made, nvml)
    readings = made.take()
    assert math.isnan(readings.power) and math.isnan(readings.utilization) and readings.memory == pytest.approx(11.0)
    assert made.problem.count("Not Supported") == 3


@pytest.mark.parametrize("refused", ["Init", "PciBusId"])
def test_without_nvml_or_the_gpu_nothing_is_read(refused: str) -> None:
    made = GpuMonitor("0000:1B:00.0", FakeNvml(refused))
    made.start()
    assert all(math.isnan(value) for value in made.take())
    made.close()
    assert made.problem == "NVML does not give anything: Not Supported"


def test_the_thread_samples_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.recording.gpu_monitor.SAMPLE_SECONDS", 0.001)
    nvml = FakeNvml()
    made = GpuMonitor("0000:1B:00.0", nvml)
    nvml.utilization = 0.5
    made.start()
    while math.isnan(made.take().utilization):  # a second sample exists
        pass
    made.close()
    assert made.take().utilization == 0.5
    assert made._thread and not made._thread.is_alive()
