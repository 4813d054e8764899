"""A finished or running run as arrays, and as HTML for a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.pictures import inline
from train.recording.metrics import RunRecord, accuracy_of
from train.report import plots


def columns(rows: Sequence[Any]) -> dict[str, np.ndarray]:
    """The fields of dataclasses of one kind as arrays, with NaN for None; fields that are None in all rows are left
    out. Each plug-in metric is a separate column.
    """
    flat = [{**vars(row), **getattr(row, "plugin_metrics", {})} for row in rows]
    names = [name for name in dict.fromkeys(name for row in flat for name in row) if name != "plugin_metrics"]
    found = {name: [row.get(name) for row in flat] for name in names}
    return {name: np.array([np.nan if value is None else value for value in values])
            for name, values in found.items() if any(value is not None for value in values)}


def summary_html(folder: Path, record: RunRecord) -> str:
    """A table of a run's main figures, and its curves."""
    config, best = record.config, record.best
    rows = [("network", f"{record.model or '?'}, {record.num_classes or '?'} classes"),
            ("data", str(config.get("data", "?"))), ("epochs", f"{len(record.epochs)} of {config.get('epochs', '?')}")]
    if best and best.evaluation:
        rows.append((accuracy_of(best.evaluation.images), f"{best.evaluation.top1:.1%} (epoch {best.epoch})"))
    if len(record.counted_steps):
        rows.append((f"{record.examples}/sec", f"{record.speed().mean:,.1f}"))
    table = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in rows)
    drawn = [plots.accuracy(record, plots.LIGHT)] * bool(record.epochs)
    drawn += [plots.loss(record, plots.LIGHT)] * bool(record.loss_curve)
    pictures = "".join(inline(picture.png, "width: 48%") for picture in drawn)
    return f"<p><b>{html.escape(str(folder))}</b></p><table>{table}</table>{pictures}"
