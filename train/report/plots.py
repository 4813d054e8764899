"""The plots of a report from a RunRecord, in a light and a dark version."""

from __future__ import annotations

import importlib
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw

from common.drawing import fitting, font, matplotlib
from train.recording.metrics import VALIDATION, Evaluation, RunRecord, accuracy_of, perplexity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from train.report.predictions import Predictions

# upper end of the plot, as a multiple of the highest perplexity in validation, or in training after the first
# validation
PERPLEXITY_ROOM = 1.5
FAST = 1  # level of PNG's compression: files are a tenth larger than at the usual 6, and made in a third of the time
MAX_POINTS = 750  # longer series are drawn as medians of equal parts, because a plot has not enough pixels


WIDTH = 5.2  # inches: two plots fit beside each other on a page, and letters can be read on a phone
_LONG_NUMBER = re.compile(rb"(?<=[ MLQCZ\"(,-])(\d+\.\d{2})\d+(?=[ \"),])")  # a coordinate in points: 1/100 is enough


@dataclass(frozen=True)
class Theme:
    """The colours of one version. Series colours can be told apart by colour-blind readers and in grey print."""

    background: str
    text: str
    muted: str
    grid: str
    series: tuple[str, str, str]
    parts: tuple[str, ...]  # colours of a stacked bar; the last part is muted

    @property
    def colors(self) -> tuple[str, ...]:
        return self.background, self.text, self.muted, self.grid, *self.series, *self.parts


LIGHT = Theme(
    background="#ffffff",
    text="#1f2328",
    muted="#6e7781",
    grid="#e4e8ec",
    series=("#0b62c4", "#d9622b", "#2a9d6f"),
    parts=("#0b62c4", "#d9622b", "#2a9d6f", "#8a63d2", "#c9a227"),
)
DARK = Theme(
    background="#0f1319",
    text="#e6edf3",
    muted="#8b949e",
    grid="#262c35",
    series=("#58a6ff", "#f0883e", "#4fc794"),
    parts=("#58a6ff", "#f0883e", "#4fc794", "#b392f0", "#e3c04f"),
)

_DARK_COLORS = {one.encode(): other.encode() for one, other in zip(LIGHT.colors, DARK.colors, strict=True)}
_LIGHT_COLOR = re.compile(b"|".join(_DARK_COLORS))


def prepare() -> None:
    """Import the drawing modules, which takes half a second, so that drawing need not wait for the import."""
    matplotlib()
    for module in ("figure", "backends.backend_agg", "backends.backend_svg"):
        importlib.import_module(f"matplotlib.{module}")


class Drawing:
    """A figure that is drawn when its content is requested. Its layout is computed once, for all formats."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    @property
    def png(self) -> bytes:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        return self._written(partial(FigureCanvasAgg(self.figure).print_png, pil_kwargs={"compress_level": FAST}))

    @property
    def svg(self) -> bytes:
        """The figure as SVG, for HTML: sharp at any size, with letters as text. Equal figures give equal bytes."""
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        with matplotlib().rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}):
            write = partial(FigureCanvasSVG(self.figure).print_svg, metadata={"Date": None, "Creator": None})
            return _LONG_NUMBER.sub(rb"\1", self._written(write))

    def _written(self, write: Callable[[io.BytesIO], None]) -> bytes:
        """The bytes that `write` writes for the figure. `Figure.savefig` is not used, because it would draw everything
        twice, and compute the layout each time.
        """
        buffer, dpi = io.BytesIO(), self.figure.dpi
        # suppresses matplotlib's warnings about letters that the font lacks, for which it draws a box
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph", UserWarning)
            self._lay_out()
            write(buffer)
        self.figure.dpi = dpi  # SVG has 72 dpi
        return buffer.getvalue()

    def _lay_out(self) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        if engine := self.figure.get_layout_engine():
            FigureCanvasAgg(self.figure)  # the canvas measures texts
            engine.execute(self.figure)
            self.figure.set_layout_engine("none")


def darkened(light: bytes) -> bytes | None:
    """The SVG of a plot in the colours of DARK instead of LIGHT; None if the plot contains a picture, because the
    picture's colours must not change.
    """
    if b"<image" in light:
        return None
    return _LIGHT_COLOR.sub(lambda match: _DARK_COLORS[match[0]], light)


def throughput(record: RunRecord, theme: Theme) -> Drawing:
    """Images/sec (words/sec) of every step over training time, with its running median and the warm-up greyed."""
    speeds = record.images / (np.asarray(record.step_ms) / 1e3)
    hours = np.cumsum(record.step_ms) / 3.6e6
    unit, scale = _time_unit(hours[-1])
    counted = np.zeros(len(speeds), dtype=bool)
    counted[record.counted_steps] = True
    figure, axes = _figure_with_axes(theme, "Throughput", f"training time ({unit})", f"{record.examples}/sec")
    x, y = _thin(hours[counted] * scale, speeds[counted])
    dots: dict[str, Any] = {"marker": "o", "markersize": 2.5, "linestyle": "none", "markeredgewidth": 0}
    axes.plot(x, y, color=theme.series[0], alpha=0.35, label="one step" if len(x) == counted.sum() else "steps", **dots)
    axes.plot(hours[~counted] * scale, speeds[~counted], color=theme.muted, alpha=0.6, label="warm-up", **dots)
    axes.plot(x, _running_median(y, max(len(y) // 20, 5)), color=theme.series[0], linewidth=1.8, label="running median")
    typical = float(np.median(speeds[counted]))
    # Outliers above three times the typical speed come from the clock's resolution, and would compress the remaining
    # curve.
    axes.set_ylim(0, 1.15 * min(float(np.max(speeds[counted])), 3 * typical))
    axes.yaxis.set_major_formatter("{x:,g}")
    _legend(axes, theme)
    return Drawing(figure)


def loss(record: RunRecord, theme: Theme) -> Drawing:
    """Training loss and validation loss (if any) by epoch."""
    figure, axes = _figure_with_axes(theme, "Loss", "epoch", f"nats per {record.examples[:-1]}")
    x, y = _thin(np.array([p.epoch for p in record.loss_curve]), np.array([p.loss for p in record.loss_curve]))
    axes.plot(x, y, color=theme.series[0], linewidth=1.6, label="training")
    for images, points in _evaluations(record).items():
        label = images if images == VALIDATION else f"{images}, after the epoch"
        axes.plot([epoch for epoch, _ in points], [found.loss for _, found in points], "o-", color=theme.series[1],
                  **_DOTTED, label=label)
    axes.set_ylim(0, 1.08 * axes.dataLim.ymax)
    _epochs_from_0(axes)
    _legend(axes, theme)
    return Drawing(figure)


def accuracy(record: RunRecord, theme: Theme) -> Drawing:
    """Training top-1, validation top-1 and top-5 by epoch, in percent."""
    figure, axes = _figure_with_axes(theme, "Accuracy", "epoch", "correct (%)")
    series = [("training top-1", theme.series[0], [(row.epoch, row.train_top1) for row in record.epochs])]
    for images, rows in _evaluations(record).items():
        series.append((accuracy_of(images), theme.series[1], [(epoch, found.top1) for epoch, found in rows]))
        if record.tells_top5:
            name = accuracy_of(images, "top-5")
            series.append((name, theme.series[2], [(epoch, found.top5) for epoch, found in rows]))
    for label, color, points in series:
        known = [(epoch, 100 * value) for epoch, value in points if value is not None]
        if known:
            x, y = zip(*known, strict=True)
            axes.plot(x, y, "o-", color=color, label=label, **_DOTTED)
    axes.set_ylim(0, 102)
    _epochs_from_0(axes)
    _legend(axes, theme)
    return Drawing(figure)


def plugin_metrics(record: RunRecord, theme: Theme) -> Drawing:
    """The metrics of plug-ins by epoch, one above the other, because each metric has a different scale."""
    names = record.plugin_metrics
    figure = _figure(WIDTH, 0.6 + 2.0 * len(names), theme)
    for row, name in enumerate(names, start=1):
        axes = _styled(figure.add_subplot(len(names), 1, row, facecolor=theme.background), theme, name,
                       "epoch" if row == len(names) else "", "")
        points = [(each.epoch, each.plugin_metrics[name]) for each in record.epochs if name in each.plugin_metrics]
        axes.plot(*zip(*points, strict=True), "o-", color=theme.series[1], **_DOTTED)
        _epochs_from_0(axes)
    return Drawing(figure)


def perplexities(record: RunRecord, best_possible: float | None, theme: Theme) -> Drawing:
    """A language model's perplexity in training and, after each epoch, in validation; and the best possible perplexity,
    if known.
    """
    figure, axes = _figure_with_axes(theme, "Perplexity", "epoch", "")
    x, losses = _thin(np.array([p.epoch for p in record.loss_curve]), np.array([p.loss for p in record.loss_curve]))
    training = [perplexity(loss) for loss in losses]
    axes.plot(x, training, color=theme.series[0], linewidth=1.6, label="training")
    validated = [(row.epoch, perplexity(row.val_loss)) for row in record.epochs if row.val_loss is not None]
    if validated:
        axes.plot(*zip(*validated, strict=True), "o-", color=theme.series[1], **_DOTTED, label=VALIDATION)
    if best_possible:
        axes.axhline(best_possible, color=theme.muted, linewidth=1.2, linestyle="--", label="best possible")
    if validated:
        top = perplexity_top(record)
        lowest = min(*training, *(value for _, value in validated), best_possible or math.inf)
        axes.set_ylim(lowest - 0.1 * (top - lowest), top)
    _epochs_from_0(axes)
    _legend(axes, theme)
    return Drawing(figure)


def perplexity_top(record: RunRecord) -> float:
    """The upper end of the perplexity plot. Training starts at the perplexity of guessing, which is the vocabulary's
    size, and would compress the remaining curve. Without a validation the end is inf.
    """
    validated = [(row.epoch, row.val_loss) for row in record.epochs if row.val_loss is not None]
    if not validated:
        return math.inf
    later = [point for point in record.loss_curve if point.epoch >= validated[0][0]] or record.loss_curve[-1:]
    return PERPLEXITY_ROOM * perplexity(max([loss for _, loss in validated] + [point.loss for point in later]))


def _evaluations(record: RunRecord) -> dict[str, list[tuple[int, Evaluation]]]:
    """Name of the images -> the run's evaluations on them, each with its epoch."""
    found: dict[str, list[tuple[int, Evaluation]]] = {}
    for row in record.epochs:
        if row.evaluation:
            found.setdefault(row.evaluation.images, []).append((row.epoch, row.evaluation))
    return found


def gpu(record: RunRecord, theme: Theme) -> Drawing:
    """Utilisation and power of the GPUs over training time, one above the other."""
    hours = np.cumsum(record.step_ms) / 3.6e6
    unit, scale = _time_unit(hours[-1])
    figure = _figure(WIDTH, 4.6, theme)
    panels = (
        ("GPU utilisation", "%", theme.series[0], [(p.step, 100 * p.utilization) for p in record.gpu_curve
                                                   if p.utilization is not None]),
        ("GPU power", "W", theme.series[1], [(p.step, p.power) for p in record.gpu_curve if p.power is not None]),
    )
    for row, (title, what, color, points) in enumerate(panels, start=1):
        axes = _styled(figure.add_subplot(2, 1, row, facecolor=theme.background), theme, title,
                       f"training time ({unit})" if row == 2 else "", what)
        if points:
            steps, values = (np.array(column, dtype=float) for column in zip(*points, strict=True))
            x, y = _thin(hours[steps.astype(int) - record.steps_before - 1] * scale, values)
            axes.plot(x, y, color=color, linewidth=1.6)
            axes.set_ylim(0, 1.15 * float(y.max()) if row == 2 else 105)
        axes.set_xlim(0, float(hours[-1]) * scale)
    return Drawing(figure)


def time_split(seconds: Mapping[str, float], theme: Theme) -> Drawing:
    """A stacked bar of the run's time; `seconds` by part, the last part being the rest."""
    figure, axes = _figure_with_axes(theme, "Where the time went", "", "", height=1.9)
    total = sum(seconds.values())
    left = 0.0
    colors = [*(theme.parts * len(seconds))[: len(seconds) - 1], theme.muted]
    for (name, value), color in zip(seconds.items(), colors, strict=True):
        share = 100 * value / total
        label = f"{name} {share:.1f} %"
        axes.barh(0, share, left=left, color=color, edgecolor=theme.background, linewidth=1.5, label=label)
        left += share
    axes.set_xlim(0, 100)
    axes.set_ylim(-0.5, 0.5)
    axes.axis("off")
    figure.legend(
        loc="outside lower left", ncols=2, frameon=False, labelcolor=theme.text, fontsize=10,
        handlelength=1.0, handleheight=1.0, columnspacing=2.5,
    )
    return Drawing(figure)


_COLUMNS, _TOP = 6, 58  # pictures in a row; pixels above the first row
_CELL, _PICTURE, _LINE = 192, 168, 22  # pixels of a cell's width, of a picture in it, of a line of text


def predictions(shown: Predictions) -> bytes:
    """The contact sheet of predictions, with the number of right predictions in its title."""
    return contact_sheet(shown, "Predictions", f"{shown.num_right} of {len(shown.true)} right")


def contact_sheet(shown: Predictions, title: str, note: str) -> bytes:
    """A PNG of images with the network's guess and its probability (also as a bar). A wrong guess gets a frame and the
    true class."""
    theme, columns = LIGHT, min(_COLUMNS, len(shown.true))
    height = _PICTURE + 3 * _LINE + 24
    sheet = Image.new("RGB", (_COLUMNS * _CELL, _TOP + math.ceil(len(shown.true) / columns) * height), theme.background)
    draw = ImageDraw.Draw(sheet)
    margin = (_CELL - _PICTURE) // 2
    draw.text((margin, 12), title, theme.text, font(23, bold=True))
    draw.text((sheet.width - margin, 16), note, theme.muted, font(19), anchor="ra")
    for i, (true, guess, probability) in enumerate(zip(shown.true, shown.guessed, shown.probability, strict=True)):
        x, y = i % columns * _CELL + margin, _TOP + i // columns * height
        is_right = guess == true
        color = theme.series[2 if is_right else 1]
        if not is_right:
            draw.rectangle((x - 5, y - 5, x + _PICTURE + 4, y + _PICTURE + 4), color)
        picture = Image.fromarray(shown.pictures[i]).resize((_PICTURE, _PICTURE), Image.Resampling.LANCZOS)
        sheet.paste(picture, (x, y))
        y += _PICTURE + 9
        bar = _PICTURE - 56  # leaves room for the percentage
        draw.rectangle((x, y + 5, x + bar, y + 10), theme.grid)
        draw.rectangle((x, y + 5, x + round(bar * float(probability)), y + 10), color)
        draw.text((x + _PICTURE, y), f"{100 * float(probability):.0f} %", theme.muted, font(15), anchor="ra")
        y += _LINE - 2
        name = fitting(f"{'✓' if is_right else '✗'} {guess}", font(16, bold=True), _PICTURE)
        draw.text((x, y), name, color, font(16, bold=True))
        if not is_right:
            draw.text((x, y + _LINE), fitting(f"is: {true}", font(16), _PICTURE), theme.text, font(16))
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", compress_level=FAST)
    return buffer.getvalue()


def precisions(runs: Mapping[str, Mapping[str, RunRecord]], title: str) -> bytes:
    """A PNG that compares runs by model and precision: accuracy over time (loss without validation), and images/sec."""
    theme, models = LIGHT, list(runs)
    figure = _figure(9, 3.2 * len(models) + 0.4, theme)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=theme.text)
    grid = figure.subplots(len(models), 2, squeeze=False, width_ratios=(2, 1))
    for (left, right), model in zip(grid, models, strict=True):
        for color, (name, record) in zip(theme.parts, runs[model].items(), strict=False):
            rows = [(row.hours, row.evaluation) for row in record.epochs if row.evaluation]
            if rows:
                hours, top1 = np.array([(hours, found.top1) for hours, found in rows]).T
                left.plot(3600 * hours, 100 * top1, "o-", color=color, label=name, **_DOTTED)
            else:
                seconds = np.cumsum(record.step_ms) / 1e3
                points = [point for point in record.loss_curve if point.step <= len(seconds)]
                left.plot([seconds[point.step - 1] for point in points], [point.loss for point in points], color=color,
                          label=name, linewidth=1.6)
            bar = right.barh(name, record.speed().mean, color=color)
            right.bar_label(bar, fmt="{:,.0f}", padding=3, color=theme.muted, fontsize=9)
        what = f"{accuracy_of(rows[-1][1].images)} (%)" if rows else "training loss"
        _styled(left, theme, model, "training time (s)", what)
        _styled(right, theme, "", "images/sec", "")
        right.grid(visible=False)
        right.invert_yaxis()
        right.set_xmargin(0.25)
        _legend(left, theme)
    return Drawing(figure).png


_DOTTED: dict[str, Any] = {"linewidth": 1.6, "markersize": 4}


def _figure(width: float, height: float, theme: Theme) -> Figure:
    """An empty figure; width and height in inches."""
    matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=144, facecolor=theme.background, layout="constrained")


def _figure_with_axes(theme: Theme, title: str, x_label: str, y_label: str, height: float = 3.2,
                      width: float = WIDTH) -> tuple[Figure, Axes]:
    figure = _figure(width, height, theme)
    return figure, _styled(figure.add_subplot(facecolor=theme.background), theme, title, x_label, y_label)


def _styled(axes: Axes, theme: Theme, title: str, x_label: str, y_label: str) -> Axes:
    _titled(axes, theme, title)
    axes.set_xlabel(x_label, color=theme.muted)
    axes.set_ylabel(y_label, color=theme.muted)
    axes.tick_params(colors=theme.muted, length=0)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    return axes


def _epochs_from_0(axes: Axes) -> None:
    """Start the axis at 0 with ticks at whole epochs, if there is at least one."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _legend(axes: Axes, theme: Theme) -> None:
    """Put the legend above the axes, under the title, where it never covers data."""
    legend = axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, labelcolor=theme.text, fontsize=9,
        borderaxespad=0.2, handlelength=1.4, columnspacing=1.2, borderpad=0,
    )
    lines = math.ceil(len(legend.get_texts()) / 3)
    _titled(axes, theme, axes.get_title("left"), pad=8 + 15 * lines)


def _titled(axes: Axes, theme: Theme, title: str, pad: float | None = None) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=theme.text, pad=pad)


def _time_unit(hours: float) -> tuple[str, float]:
    """A suitable unit for a span of time, and the number of these units in an hour."""
    return ("h", 1.0) if hours >= 3 else ("min", 60.0) if hours >= 1 / 20 else ("s", 3600.0)


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reduce to at most MAX_POINTS points, which are medians of consecutive parts."""
    if len(x) <= MAX_POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), MAX_POINTS)
    return np.array([np.median(x[part]) for part in parts]), np.array([np.median(y[part]) for part in parts])


def _running_median(values: np.ndarray, width: int) -> np.ndarray:
    half = width // 2
    return np.array([np.median(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))])
