"""The plots of GPU reports and comparisons: each is drawn in the colours of a theme."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpu_report.figures import PRECISIONS, Figure, precisions_of
from train.report import plots
from train.report.plots import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS, BARS = 0.22, 0.2  # height in inches of a line of dots, and of a bar


def _colors(theme: Theme) -> dict[str, str]:
    """Precision -> colour, equal in all plots."""
    blue, orange, green, violet, yellow = theme.parts
    return dict(zip(PRECISIONS, (theme.muted, orange, blue, green, violet, yellow), strict=True))


def kernels(figures: Sequence[Figure], titles: Mapping[str, str], theme: Theme) -> plots.Drawing:
    """TFLOP/s of each size, with a dot per precision and a panel per kind of kernel. A panel's title is in `titles`,
    else the kind's own name."""
    kinds = list(dict.fromkeys(figure.what for figure in figures))
    sizes = {kind: list(dict.fromkeys(figure.size for figure in figures if figure.what == kind)) for kind in kinds}
    lines = [len(sizes[kind]) for kind in kinds]
    figure = plots._figure(9, DOTS * sum(lines) + 0.9 * len(kinds), theme)
    panels = figure.subplots(len(kinds), 1, squeeze=False, sharex=True, height_ratios=lines)[:, 0]
    for axes, kind in zip(panels, kinds, strict=True):
        places = {size: -number for number, size in enumerate(sizes[kind])}
        for precision in precisions_of(figures):
            own = [each for each in figures if each.what == kind and each.precision == precision]
            axes.plot([each.more["tflops"] for each in own], [places[each.size] for each in own], "o", markersize=5,
                      color=_colors(theme)[precision], label=precision, markeredgewidth=0)
        plots._styled(axes, theme, titles.get(kind, kind), "", "")
        axes.set_yticks(list(places.values()), list(places), fontsize=8)
        axes.set_ylim(-len(places) + 0.5, 0.5)
        axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    _logarithmic(*panels)
    panels[-1].set_xlabel("TFLOP/s, on a logarithmic scale", color=theme.muted)
    _in_columns(panels[0], theme)
    return plots.Drawing(figure)


def bars(figures: Sequence[Figure], title: str, unit: str, theme: Theme) -> plots.Drawing:
    """Horizontal bars of the values. Each kernel or network has a group, with a bar per precision."""
    groups = list(dict.fromkeys(figure.what for figure in figures))
    names = precisions_of(figures)
    figure, axes = plots._figure_with_axes(theme, title, unit, "", width=8,
                                           height=BARS * len(figures) + 0.12 * len(groups) + 1)
    place, ticks = 0.0, []
    for group in groups:
        own = {each.precision: each for each in figures if each.what == group}
        first = place
        for precision in filter(own.__contains__, names):
            bar = axes.barh(place, own[precision].value, color=_colors(theme)[precision], height=0.85)
            axes.bar_label(bar, fmt="{:,.4g}" if own[precision].value < 1000 else "{:,.0f}", padding=3,
                           color=theme.muted, fontsize=8)
            place -= 1
        ticks.append((first + place + 1) / 2)
        place -= 0.6
    axes.set_yticks(ticks, groups, fontsize=9)
    axes.margins(0.1, 0.01)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.grid(visible=False)
    for precision in names:  # in order, without duplicates
        axes.plot([], [], "s", color=_colors(theme)[precision], label=precision)
    _in_columns(axes, theme)
    return plots.Drawing(figure)


def over_batches(figures: Sequence[Figure], theme: Theme) -> plots.Drawing:
    """Images/sec over the batch size, a line per precision; a second panel shows the median latency, if any is known.
    """
    is_timed = any("latency_p50_ms" in each.more for each in figures)  # only small batches have a latency
    figure = plots._figure(9, 3.6, theme)
    panels = list(figure.subplots(1, 1 + is_timed, squeeze=False)[0])
    left, right = panels[0], panels[-1]
    for precision in precisions_of(figures):
        own = [each for each in figures if each.precision == precision]
        color = _colors(theme)[precision]
        left.plot([batch_of(each) for each in own], [each.value for each in own], "o-", color=color, label=precision,
                  **plots._DOTTED)
        timed = [each for each in own if "latency_p50_ms" in each.more]
        if timed:
            right.plot([batch_of(each) for each in timed], [each.more["latency_p50_ms"] for each in timed], "o-",
                       color=color, **plots._DOTTED)
    if is_timed:
        plots._styled(right, theme, "Latency", "batch size", "ms, median, on a logarithmic scale")
    plots._styled(left, theme, "Inference", "batch size", "images/sec")
    for axes in panels:
        axes.set_facecolor(theme.background)
        batches = sorted({int(x) for line in axes.lines for x in line.get_xdata()})
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
        axes.set_ylim(0, 1.08 * axes.dataLim.ymax)
    if is_timed:
        right.set_yscale("log", base=2)  # logarithmic, because fp32 takes ten times as long as fp16
        right.set_ylim(right.dataLim.ymin / 2, 2 * right.dataLim.ymax)
    for axes in panels:
        axes.yaxis.set_major_formatter("{x:,g}")
    # the upper left is free, because rates of small batches are low
    left.legend(loc="upper left", frameon=False, labelcolor=theme.text, fontsize=9)
    return plots.Drawing(figure)


def batch_of(figure: Figure) -> int:
    """The batch size of a figure whose size is "batch N"."""
    return int(figure.size.removeprefix("batch "))


def accuracy(figures: Sequence[Figure], title: str, price_per_second: float, theme: Theme) -> plots.Drawing:
    """Top-1 over the seconds of a run, and over the price of these seconds if the price is known."""
    drawn, axes = plots._figure_with_axes(theme, title, "seconds of training and validation", "top-1, %")
    axes.plot([each.more["seconds"] for each in figures], [each.value for each in figures], "o-",
              color=theme.series[0], **plots._DOTTED)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 100)
    if price_per_second:
        above = axes.secondary_xaxis("top", functions=(
            lambda x: np.multiply(x, price_per_second), lambda x: np.divide(x, price_per_second)))
        above.set_xlabel("price", color=theme.muted)
        above.tick_params(colors=theme.muted, length=0)
        above.spines["top"].set_visible(False)
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=theme.text, pad=30)
    return plots.Drawing(drawn)


def ratios(values: Mapping[str, Sequence[float]], devices: Sequence[str], meaning: str, theme: Theme) -> plots.Drawing:
    """Ratios to the first device, by kind of figure; NaN: unknown. The plot has no title, because device names are
    long. `meaning`: what a ratio means, in words.
    """
    others = devices[1:]
    lines = sum(math.isfinite(value) for own in values.values() for value in own[1:])
    figure, axes = plots._figure_with_axes(theme, "", "", "", width=8, height=BARS * lines + 0.12 * len(values) + 1.2)
    axes.set_xlabel(textwrap.fill(f"{meaning}, on a logarithmic scale", 80), loc="right")
    place, ticks = 0.0, []
    # if there are more devices than colours, the colours are repeated, paler
    rounds = 1 + len(others) // len(theme.parts)
    colors = [(color, 0.6**paler) for paler in range(rounds) for color in theme.parts][: len(others)]
    for own in values.values():
        first = place
        for value, color in zip(own[1:], colors, strict=True):
            if math.isfinite(value):
                bar = axes.barh(place, value - 1, left=1, color=color, height=0.85)  # a bar to the left means slower
                axes.bar_label(bar, [f"{value:.3g}"], padding=3, color=theme.muted, fontsize=8)
                place -= 1
        ticks.append((first + place + 1) / 2)
        place -= 0.6
    axes.set_yticks(ticks, list(values), fontsize=9)
    _logarithmic(axes)
    axes.margins(0.15, 0.01)
    axes.axvline(1, color=theme.muted, linewidth=0.8)
    axes.grid(visible=False)
    for device, color in zip(others, colors, strict=True):
        axes.plot([], [], "s", color=color, label=device)
    _in_columns(axes, theme, columns=2 if max(map(len, others)) < 45 else 1)
    return plots.Drawing(figure)


def _logarithmic(*panels: Axes) -> None:
    """Give the panels a logarithmic x axis. Ticks are at 1, 2, 5, 10, ...; for many decades at 1, 10, ...; for a short
    range at 1, 2, 3, ...; and at linear steps if the range contains no such tick.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    for axes in panels:
        axes.set_xscale("log")
    low, high = panels[0].get_xlim()  # for a single figure, matplotlib's limits span a decade or more
    subs = range(1, 10) if high < 5 * low else (1, 2, 5) if high < 300 * low else (1,)
    for axes in panels:
        axes.xaxis.set_major_locator(MaxNLocator(5) if high < 3 * low else LogLocator(subs=subs))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:,g}")


def _in_columns(axes: Axes, theme: Theme, columns: int = 6) -> None:
    """Put the legend above the axes, to the right of the title."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=columns, frameon=False, labelcolor=theme.text,
                fontsize=9, borderaxespad=0.2, handlelength=1.0, columnspacing=1.2)
