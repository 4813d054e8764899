"""The plots of a comparison as SVG: the curves of all runs, in common axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from train.report import plots
from train.report.plots import Theme

BY_EPOCH, BY_TIME, LOSS = "accuracy_by_epoch.svg", "accuracy_by_time.svg", "loss_by_epoch.svg"
CAPTIONS = {
    BY_EPOCH: "Top-1 on the validation images after each epoch. Runs of one configuration: their mean, and a band from "
              "the lowest to the highest.",
    BY_TIME: "The same over the time of the run, validation included.",
    LOSS: "Mean training loss between two log lines; its level depends on label smoothing, mixup and CutMix.",
}
DASHES = ("-", "--", ":", "-.")  # for more curves than colours
LONGEST_NAME = 44  # most letters of a name
MAX_NAMED = 24  # curves that the legend names

Points = Sequence[tuple[float, float]]


class Curves(NamedTuple):
    """The curves of one configuration; each list has one element for each run."""

    name: str
    validated: Sequence[Sequence[tuple[int, float, float]]]  # (epoch, hours, top-1)
    losses: Sequence[Points]  # (epoch, loss)


class Line(NamedTuple):
    """At each x, the mean of several runs, and their lowest and highest values."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def figures(curves: Sequence[Curves]) -> dict[str, Callable[[Theme], bytes]]:
    """File name -> function that draws the plot, for the plots that have data."""
    drawn: dict[str, Callable[[Theme], bytes]] = {}
    if any(run for each in curves for run in each.validated):
        drawn[BY_EPOCH] = lambda theme: _plot("Validation top-1", "epoch", "correct (%)", [
            _accuracies(each, by_time=False, scale=1) for each in curves], curves, theme)
        unit, scale = plots._time_unit(max(run[-1][1] for each in curves for run in each.validated if run))
        drawn[BY_TIME] = lambda theme: _plot("Validation top-1 over time", f"time of the run ({unit})", "correct (%)", [
            _accuracies(each, by_time=True, scale=scale) for each in curves], curves, theme)
    if any(run for each in curves for run in each.losses):
        drawn[LOSS] = lambda theme: _plot("Training loss", "epoch", "nats per image", [
            _losses(each) for each in curves], curves, theme)
    return drawn


def _accuracies(curves: Curves, by_time: bool, scale: float) -> Line | None:
    """Top-1 in percent at the epochs that all runs have validated (or any run, if they share none)."""
    found = [{epoch: (hours, top1) for epoch, hours, top1 in run} for run in curves.validated if run]
    if not found:
        return None
    epochs = sorted(set.intersection(*map(set, found)) or found[0])
    runs = [run for run in found if run.keys() >= set(epochs)]
    hours, top1 = (np.array([[run[epoch][i] for epoch in epochs] for run in runs]) for i in range(2))
    return _line(scale * hours.mean(axis=0) if by_time else np.array(epochs), 100 * top1)


def _losses(curves: Curves) -> Line | None:
    """Training loss; runs of one configuration are read at the epochs of the shortest run."""
    found = [np.array(run) for run in curves.losses if len(run)]
    if not found:
        return None
    shortest = min(found, key=lambda run: run[-1, 0])
    x, _ = plots._thin(shortest[:, 0], shortest[:, 1])
    return _line(x, np.array([np.interp(x, run[:, 0], run[:, 1]) for run in found]))


def _line(x: np.ndarray, values: np.ndarray) -> Line:
    return Line(x, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def _plot(title: str, x_label: str, y_label: str, lines: Sequence[Line | None], curves: Sequence[Curves],
          theme: Theme) -> bytes:
    names = [_short(each.name) for each in curves[:MAX_NAMED]]
    columns = 2 if max(map(len, names)) <= LONGEST_NAME / 2 else 1
    figure, axes = plots._figure_with_axes(theme, title, x_label, y_label, height=3.2 + 0.2 * len(names) / columns)
    styles = itertools.cycle((color, dash) for dash in DASHES for color in theme.parts)
    for number, (line, (color, dash)) in enumerate(zip(lines, styles, strict=False)):
        if line is None:
            continue
        label = names[number] if number < MAX_NAMED else f"{len(curves) - MAX_NAMED} more"
        settings: dict[str, Any] = {"marker": "o", "markersize": 3.5} if len(line.x) < 40 else {}
        axes.plot(line.x, line.mean, dash, color=color, linewidth=1.6, **settings,
                  label=label if number <= MAX_NAMED else None)
        if (line.high > line.low).any():
            axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.18, linewidth=0)
    axes.set_xlim(left=0)
    if x_label == "epoch":
        plots._epochs_from_0(axes)
    axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside lower left", ncols=columns, frameon=False, labelcolor=theme.text, fontsize=9,
                  handlelength=2.4)
    return plots.Drawing(figure).svg


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME:]}"
