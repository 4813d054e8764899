"""A finished or running run as arrays, and as HTML for a notebook."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from train.errors import TrainError
from train.prediction import Prediction
from train.recording.metrics import METRICS_FILE, EpochRow, RunRecord, accuracy_of
from train.report import plots

PICTURE = 160  # pixels of a picture's longer side in a notebook
MOST_PICTURES = 24
BAR = "linear-gradient(90deg, rgba(11, 98, 196, .25) {:.0%}, transparent 0)"


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
    pictures = "".join(_inline(picture, "width: 48%") for picture in drawn)
    return f"<p><b>{html.escape(str(folder))}</b></p><table>{table}</table>{pictures}"


def predictions_html(predictions: Sequence[Prediction]) -> str:
    """The first predictions with their pictures, the most likely classes over bars as long as their probabilities."""
    shown = "".join(map(_prediction, predictions[:MOST_PICTURES]))
    left = len(predictions) - MOST_PICTURES
    more = f"<p>and {left:,} more</p>" if left > 0 else ""
    return f'<div style="display: flex; flex-wrap: wrap; gap: 12px">{shown}</div>{more}'


def _prediction(prediction: Prediction) -> str:
    lines = [(html.escape(f"{guess.name} {guess.probability:.1%}"), guess.probability)
             for guess in prediction.guesses[:3]] or [(html.escape(prediction.error), 0.0)]
    texts = "".join(f'<div style="background: {BAR.format(share)}">{text}</div>' for text, share in lines)
    thumbnail = "" if prediction.error else _inline(_thumbnail(prediction.image), "")
    return f'<div style="width: {PICTURE}px; font-size: 85%">{thumbnail}{texts}</div>'


def _thumbnail(image: Any) -> bytes:
    """A PNG of an image in any of the forms that `predict` takes; empty if its file is gone meanwhile."""
    try:
        if isinstance(image, np.ndarray):
            image = Image.fromarray(image)
        elif not isinstance(image, Image.Image):
            image = Image.open(io.BytesIO(image) if isinstance(image, (bytes, bytearray, memoryview)) else image)
        small = ImageOps.exif_transpose(image).convert("RGB")
        small.thumbnail((PICTURE, PICTURE))
    except OSError:
        return b""
    content = io.BytesIO()
    small.save(content, "PNG")
    return content.getvalue()


def _inline(picture: bytes, style: str) -> str:
    return f'<img style="{style}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">' if picture else ""
