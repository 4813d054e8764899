"""The plots of a classifier, each in a light and a dark version, like the plots of `plots`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from train.recording.outcomes import NUM_BINS, Outcomes
from train.report import plots
from train.report.plots import Drawing, Theme

MAX_NUMBERED = 20  # classes; with more, cells have no room for a number
LONGEST_NAME = 24  # most letters of a name


def confusion(matrix: np.ndarray, names: Sequence[str], theme: Theme) -> Drawing:
    """The confusion matrix (classes, classes), with true classes as rows. A cell's shade shows the cell's share of its
    row. The diagonal has one colour, all other cells have another. With few classes, cells also show numbers of images.
    """
    count = len(names)
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    # The square root makes the few mistakes of a good network visible.
    strength = np.where(np.eye(count, dtype=bool), share, np.sqrt(share))[..., None]
    paper, right, wrong = (_rgb(color) for color in (theme.background, theme.series[0], theme.series[1]))
    ink = np.where(np.eye(count, dtype=bool)[..., None], right, wrong)
    size = min(max(3.2, 1.4 + 0.34 * count), 7.4)
    figure = plots._figure(max(plots.WIDTH, size + 0.6), size + 0.8, theme)
    axes = figure.add_subplot(facecolor=theme.background)
    cells = paper + strength * (ink - paper)
    axes.imshow(cells, interpolation="none", aspect="equal")  # "none": one pixel per cell
    axes.set_title("Confusion matrix", loc="left", fontsize=12, fontweight="bold", color=theme.text)
    letters = 9 if count <= MAX_NUMBERED else max(5.5, 9 * 30 / count)
    shown = [name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…" for name in names]
    axes.set_xticks(range(count), shown, rotation=90, fontsize=letters)
    axes.set_yticks(range(count), shown, fontsize=letters)
    axes.set_xlabel("taken for", color=theme.muted)
    axes.set_ylabel("true class", color=theme.muted)
    axes.tick_params(colors=theme.muted, length=0)
    axes.set_xticks(np.arange(count + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(count + 1) - 0.5, minor=True)
    axes.tick_params(which="minor", length=0)
    axes.grid(which="minor", color=theme.grid, linewidth=0.6)
    for side in axes.spines.values():
        side.set_color(theme.grid)
    if count <= MAX_NUMBERED:
        for row, column in np.argwhere(matrix):
            is_dark = cells[row, column] @ (0.299, 0.587, 0.114) < 0.55  # luma, ITU-R BT.601
            axes.text(column, row, f"{matrix[row, column]:,}", ha="center", va="center",
                      fontsize=8 if count <= 12 else 6.5, color="#ffffff" if is_dark else "#1f2328")
    return Drawing(figure)


def calibration(outcomes: Outcomes, theme: Theme) -> Drawing:
    """A calibration plot: accuracy and number of guesses in each bin of the guess's probability."""
    figure = plots._figure(plots.WIDTH, 4.6, theme)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    title = f"Calibration, ECE {100 * outcomes.calibration_error:.1f} %"
    plots._styled(upper, theme, title, "", "correct (%)")
    plots._styled(lower, theme, "", "probability of the guess (%)", "images (%)")
    images, right, sure = outcomes.bins[outcomes.bins[:, 0] > 0].T
    upper.plot((0, 100), (0, 100), "--", color=theme.muted, linewidth=1.2, label="perfect calibration")
    upper.plot(100 * sure / images, 100 * right / images, "o-", color=theme.series[0], linewidth=1.6, markersize=5,
               label="this network")
    upper.set_ylim(-2, 102)
    middles = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
    share = 100 * outcomes.bins[:, 0] / outcomes.num_images
    lower.bar(100 * middles, share, width=0.9 * 100 / NUM_BINS, color=theme.series[0])
    lower.set_xlim(0, 100)
    for axes in (upper, lower):
        axes.set_facecolor(theme.background)
    plots._legend(upper, theme)
    return Drawing(figure)


def _rgb(color: str) -> np.ndarray:
    """"#rrggbb" as three numbers from 0 to 1."""
    return np.frombuffer(bytes.fromhex(color[1:]), np.uint8) / 255
