"""Compares GPU reports: writes comparison.md, comparison.html, comparison.json and a plot, with ratios to the first
report.

Two figures are compared if they agree in section, kernel or network, size and precision. Published tables often use
another batch size than a report, so the best figure over all batch sizes is compared too, as articles on GPUs do.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import UserError
from gpu_report import plots as gpu_plots
from gpu_report.figures import LESS_IS_BETTER, PRECISIONS, PRICE, Figure, Key, Report
from train.report.document import Block, Heading, Plot, Table, Text
from train.report.page import write_pages

Row = tuple[Key, list["Figure | None"]]  # one figure per report; None if the report lacks it
BATCH, BEST = "batch ", "best batch"


def write(folder: Path, reports: Sequence[Report]) -> None:
    """Write the comparison into `folder`. Raises UserError if no two of the reports have a figure in common."""
    rows = rows_of(reports)
    if not rows:
        found = "; ".join(f"{report.device}: {', '.join(report.sections) or 'no section'}" for report in reports)
        raise UserError(f"the reports have no figure in common ({found}): measure the same sections")
    devices = _names(reports)
    values = summary(rows, len(reports))
    has_prices = any(key.unit == PRICE for key, _ in rows)
    meaning = f"times as fast as {devices[0]}" + " (prices: as cheap)" * has_prices
    drawings = {"comparison.png": partial(gpu_plots.ratios, values, devices, meaning)} if values else {}
    blocks: list[Block] = [
        Text(f"Ratios are {meaning}: above 1 is better."),
        *_summary_blocks(values, devices, meaning),
        *[block for section in dict.fromkeys(key.section for key, _ in rows)
          for block in _section_blocks(section, [row for row in rows if row[0].section == section], devices)],
        *_missing(reports, devices),
        Heading("Sources"),
        Table(("", ""), [(device, _source(report)) for device, report in zip(devices, reports, strict=True)]),
    ]
    title = f"{devices[0]} beside {', '.join(devices[1:])}"
    write_pages(folder, title, blocks, drawings, _to_dict(rows, devices, values), "comparison")


def rows_of(reports: Sequence[Report]) -> list[Row]:
    """The figures that at least two reports have, in the order in which the reports first show them."""
    found = [{**report.figures(), **best_of_batches(report)} for report in reports]
    keys = dict.fromkeys(key for figures in found for key in figures)
    rows = [(key, [figures.get(key) for figures in found]) for key in keys if key.unit != "top-1 %"]
    return [row for row in rows if sum(figure is not None for figure in row[1]) >= 2 and not _is_said_twice(row, keys)]


def _is_said_twice(row: Row, keys: Collection[Key]) -> bool:
    """Whether the row repeats another row: the row of the best batch does, if only one batch size was measured."""
    return row[0].size == BEST and sum(key._replace(size=BEST) == row[0] for key in keys) == 2


def best_of_batches(report: Report) -> dict[Key, Figure]:
    """The fastest figure over all batch sizes, for each network and precision."""
    best: dict[Key, Figure] = {}
    for key, figure in report.figures().items():
        if key.size.startswith(BATCH) and key.unit not in LESS_IS_BETTER:
            whole = key._replace(size=BEST)
            if whole not in best or figure.value > best[whole].value:
                best[whole] = figure
    return best


def ratio(key: Key, figure: Figure | None, base: Figure | None) -> float:
    """The ratio of `figure` to `base`, where more than 1 means better. NaN if one of the two is missing."""
    if figure is None or base is None:
        return math.nan
    return base.value / figure.value if key.unit in LESS_IS_BETTER else figure.value / base.value


def summary(rows: Sequence[Row], num_reports: int) -> dict[str, list[float]]:
    """Geometric means of the ratios to the first report, by section, kind and precision; NaN if a group has no ratio.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for key, figures in rows:
        if figures[0] is not None:
            groups.setdefault((key.section, _kind(key), key.precision), []).append((key, figures))
    groups = {group: own for group, own in groups.items() if any(any(figures[1:]) for _, figures in own)}
    kinds = list(dict.fromkeys(group[:2] for group in groups))
    order = sorted(groups, key=lambda group: (kinds.index(group[:2]), _rank(group[2])))
    return {", ".join(filter(None, (section, kind, precision))): [
        _geometric_mean([ratio(key, figures[i], figures[0]) for key, figures in groups[section, kind, precision]])
        for i in range(num_reports)] for section, kind, precision in order}


def _kind(key: Key) -> str:
    """The figure's group in the plot: each network has its own group, all sizes of a kernel share a group, and prices
    are separate from times.
    """
    if key.unit == PRICE:
        return f"{key.what}, {PRICE}"
    return f"{key.what}, {key.size}" if key.size == BEST else key.what


def _rank(precision: str) -> int:
    return PRECISIONS.index(precision) if precision in PRECISIONS else -1


def _geometric_mean(values: Sequence[float]) -> float:
    known = [math.log(value) for value in values if math.isfinite(value)]
    return math.exp(sum(known) / len(known)) if known else math.nan


# --- contents ---


def _names(reports: Sequence[Report]) -> list[str]:
    """Names of the reports' devices. Reports with equal device names get their commit, or else their position, as a
    suffix.
    """
    names = [report.device for report in reports]
    commits = [str(report.about.get("commit") or "")[:7] for report in reports]
    for marks in (commits, [str(place) for place in range(1, len(reports) + 1)]):
        names = [f"{name} ({mark})" if mark and names.count(name) > 1 else name
                 for name, mark in zip(names, marks, strict=True)]
    return names


def _summary_blocks(values: Mapping[str, Sequence[float]], devices: Sequence[str], meaning: str) -> list[Block]:
    if not values:
        return [Text(f"{devices[0]} has no figure in common with the others; the ratios are among the others.")]
    rows = [(name, *(_times(value) for value in own[1:])) for name, own in values.items()]
    return [Heading("In one view"),
            Text("Geometric means over all sizes that both have measured."),
            Plot("comparison.png", f"{meaning[0].upper()}{meaning[1:]}."),
            Table(("", *devices[1:]), rows)]


def _section_blocks(section: str, rows: Sequence[Row], devices: Sequence[str]) -> list[Block]:
    header = ["", "size", "precision", *devices, *(f"ratio: {device}" for device in devices[1:])]
    cells = [(key.what, key.size, key.precision,
              *(_value(key, figure) for figure in figures),
              *(_times(ratio(key, figure, figures[0])) for figure in figures[1:])) for key, figures in rows]
    return [Heading(section.capitalize()),
            Table(header, cells, folded=f"{len(cells)} figures of {section}" if len(cells) > 30 else "")]


def _value(key: Key, figure: Figure | None) -> str:
    if figure is None:
        return "-"
    number = f"{figure.value:,.0f}" if figure.value >= 1000 else f"{figure.value:.3g}"
    where = f" ({figure.size})" if key.size == BEST else ""
    return f"{number} {key.unit}{where}"


def _times(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "-"


def _missing(reports: Sequence[Report], devices: Sequence[str]) -> list[Block]:
    """A note on each section that is in one report and missing in another."""
    measured = [[name for name, section in report.sections.items() if section.figures] for report in reports]
    names = dict.fromkeys(itertools.chain.from_iterable(measured))
    rows = [(device, ", ".join(missing)) for device, own in zip(devices, measured, strict=True)
            if (missing := [name for name in names if name not in own])]
    return [Heading("Missing sections"), Table(("report", "has not"), rows)] if rows else []


def _source(report: Report) -> str:
    """The origin of a report's figures: a source for published figures, otherwise date, commit and command."""
    urls = dict.fromkeys(figure.source for section in report.sections.values() for figure in section.figures
                         if figure.source)
    if urls:
        notes = [note for section in report.sections.values() for note in section.notes]
        return "; ".join([*urls, *filter(None, [report.about.get("note")]), *notes])
    about = report.about
    made = f"measured {about.get('date', '')}, commit {about.get('commit')}, by: {about.get('command', '')}"
    return ". ".join([made, *report.beside])


def _to_dict(rows: Sequence[Row], devices: Sequence[str], values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "devices": list(devices), "summary": {name: [known(each) for each in own] for name, own in values.items()},
        "rows": [{**key._asdict(), "figures": [figure and dataclasses.asdict(figure) for figure in figures],
                  "ratios": [known(ratio(key, figure, figures[0])) for figure in figures]} for key, figures in rows],
    }
