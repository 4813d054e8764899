"""The results of an inference sweep: its points, the best ones by MLPerf's scenarios, and a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.report import plots
from train.report.plots import LIGHT
from train.timing import relative_error

LATENCY_BATCH = 32  # images; the latency of larger batches is not measured


@dataclass(frozen=True)
class Point:
    """One precision at one batch size."""

    precision: str
    batch: int
    images_per_sec: float  # throughput, over all passes
    pass_ms: np.ndarray  # ms between the ends of consecutive passes in the throughput measurement
    latency_ms: np.ndarray  # ms of passes that run alone; empty for a large batch
    memory_gib: float  # GiB in use on the GPU, or by the process on a CPU
    joules_per_image: float  # NaN if power is unknown
    watts: float
    sm_mhz: float

    @property
    def p50(self) -> float | None:
        return self._percentile(50)

    @property
    def p90(self) -> float | None:
        return self._percentile(90)

    @property
    def p99(self) -> float | None:
        return self._percentile(99)

    def _percentile(self, percent: int) -> float | None:
        """A percentile of the latency in ms; None if there are too few passes for this percentile."""
        if len(self.latency_ms) * (100 - percent) < 100:
            return None
        return float(np.percentile(self.latency_ms, percent))

    def to_dict(self) -> dict[str, Any]:
        """The point as JSON values; None for unknown values."""
        def known(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return {
            "precision": self.precision, "batch": self.batch, "images_per_sec": self.images_per_sec,
            "latency_ms": {"p50": self.p50, "p90": self.p90, "p99": self.p99}, "memory_gib": self.memory_gib,
            "joules_per_image": known(self.joules_per_image), "watts": known(self.watts), "sm_mhz": known(self.sm_mhz),
            "pass_ms": self.pass_ms.round(4).tolist(), "pass_latency_ms": self.latency_ms.round(4).tolist(),
        }


def error_of_passes(passes: np.ndarray) -> float:
    """Relative standard error of the median time of two consecutive passes; infinite with too few passes. Pairs of
    passes are used, because two passes are in flight at once and end together on a CPU.
    """
    return relative_error(passes[: len(passes) // 2 * 2].reshape(-1, 2).sum(axis=1))


@dataclass(frozen=True)
class Scenario:
    """A figure of an MLPerf scenario."""

    value: float
    unit: str
    precision: str
    batch: int

    def __str__(self) -> str:
        return f"{self.value:,.2f} {self.unit} ({self.precision}, batch {self.batch:,})"


def scenarios(points: Sequence[Point]) -> dict[str, Scenario]:
    """The best point for each scenario; the scenario single stream is left out unless batch 1 was measured often
    enough.
    """
    single = [(point.p90, point) for point in points if point.batch == 1 and point.p90]
    found = {}
    if single:
        latency, point = min(single, key=lambda pair: pair[0])
        found["single stream"] = Scenario(latency, "ms, 90th percentile", point.precision, 1)
    best = max(points, key=lambda point: point.images_per_sec)
    found["offline"] = Scenario(best.images_per_sec, "images/sec", best.precision, best.batch)
    return found


def plot(points: Sequence[Point], title: str) -> bytes:
    """A PNG plot over the batch size. Left: images/sec. Right: latency, with p50 as a line and a band up to p99, or up
    to p90 if some points have too few passes for p99."""
    theme, batches = LIGHT, sorted({point.batch for point in points})
    figure = plots._figure(9, 3.8, theme)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=theme.text)
    left, right = figure.subplots(1, 2)
    knows_p99 = all(point.p99 for point in points if point.batch <= LATENCY_BATCH)
    for color, name in zip(theme.parts, dict.fromkeys(point.precision for point in points), strict=False):
        own = [point for point in points if point.precision == name]
        left.plot([point.batch for point in own], [point.images_per_sec for point in own], "o-", color=color,
                  label=name, **plots._DOTTED)
        timed = [(point.batch, point.p50, point.p99 if knows_p99 else point.p90) for point in own if point.p50]
        if timed:
            x, typical, slow = (np.array(column, float) for column in zip(*timed, strict=True))
            right.plot(x, typical, "o-", color=color, label=name, **plots._DOTTED)
            right.fill_between(x, typical, slow, color=color, alpha=0.25, linewidth=0)
    plots._styled(left, theme, "Throughput", "batch size", "images/sec")
    plots._styled(right, theme, "Latency", "batch size", f"ms: p50, shaded up to p{99 if knows_p99 else 90}")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        # there are no latencies if all batches are large
        axes.set_ylim(0, 1.08 * axes.dataLim.ymax if axes.lines else None)
        axes.yaxis.set_major_formatter("{x:,g}")
    left.set_xticks(batches[:: 1 + len(batches) // 8])
    right.set_xticks([batch for batch in batches if batch <= LATENCY_BATCH])
    figure.legend(*left.get_legend_handles_labels(), loc="upper right", ncols=len(theme.parts), frameon=False,
                  # the legend is beside the title
                  labelcolor=theme.text, fontsize=9, handlelength=1.6, columnspacing=1.4)
    return plots.Drawing(figure).png
