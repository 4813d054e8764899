"""A finished or running run as arrays, and as HTML for a notebook."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.errors import TrainError
from train.pictures import inline
from train.recording.metrics import METRICS_FILE, EpochRow, RunRecord, accuracy_of
from train.report import plots


def record_of(folder: Path) -> RunRecord:
    """The record of the run in a folder. Raises TrainError if there is none."""
    try:
        return RunRecord.read_jsonl(folder / METRICS_FILE)
    except OSError as error:
        raise TrainError(f"cannot read {folder / METRICS_FILE} ({error.strerror}): give the folder of a run") from None


def runs_in(folder: Path) -> list[Path]:
    """The folders of runs in a folder, by name. Raises TrainError if there is no such folder."""
    if not folder.is_dir():
        raise TrainError(f"there is no folder {folder} with runs: give the folder that holds their folders")
    return sorted(path for path in folder.iterdir() if (path / METRICS_FILE).is_file())


def columns(rows: Sequence[Any]) -> dict[str, np.ndarray]:
    """The fields of dataclasses of one kind as arrays, with NaN for None; without fields that are None in all rows."""
    if not rows:
        return {}
    names = [field.name for field in dataclasses.fields(rows[0])]
    found = {name: [getattr(row, name) for row in rows] for name in names}
    return {name: np.array([np.nan if value is None else value for value in values])
            for name, values in found.items() if any(value is not None for value in values)}


def best_of(record: RunRecord) -> EpochRow | None:
    """The first epoch with the highest top-1 accuracy; None without a validation."""
    return max((row for row in record.epochs if row.evaluation), default=None,
               key=lambda row: row.evaluation.top1 if row.evaluation else 0.0)


def summary_html(folder: Path, record: RunRecord) -> str:
    """A table of a run's main figures, and its curves."""
    config, best = record.config, best_of(record)
    rows = [("network", f"{config.get('model', '?')}, {record.num_classes or '?'} classes"),
            ("data", str(config.get("data", "?"))), ("epochs", f"{len(record.epochs)} of {config.get('epochs', '?')}")]
    if best and best.evaluation:
        rows.append((accuracy_of(best.evaluation.images), f"{best.evaluation.top1:.1%} (epoch {best.epoch})"))
    if len(record.counted_steps):
        rows.append((f"{record.examples}/sec", f"{record.speed().mean:,.1f}"))
    table = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in rows)
    drawn = [plots.accuracy(record, plots.LIGHT)] * bool(record.epochs)
    drawn += [plots.loss(record, plots.LIGHT)] * bool(record.loss_curve)
    pictures = "".join(inline(picture, "width: 48%") for picture in drawn)
    return f"<p><b>{html.escape(str(folder))}</b></p><table>{table}</table>{pictures}"
