"""Prediction: print the most likely classes of given image files. `predict_to_file` serves large numbers of images.

    python -m train predict --checkpoint runs/my-run picture1.jpg folder/ [--json] [--contact-sheet sheet.png]
    python -m train predict --checkpoint runs/my-run folder/ --output predictions.csv
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common import files
from common.drawing import fitting, font
from pipelines import DataError
from train.classes import printable
from train.commands.predict_to_file import name_damaged, predict_to_file
from train.errors import TrainError
from train.image_paths import image_paths
from train.options.commands import PredictOptions
from train.prediction import Prediction, Predictor
from train.processes.distributed import Workers


def main(values: Mapping[str, Any]) -> None:
    """Predict the classes of images and print them. Raises UserError."""
    options, workers = PredictOptions(**values), Workers()
    if not options.checkpoint:
        raise TrainError("prediction needs trained weights: give --checkpoint with a run folder, a checkpoint or a "
                         "file of weights", on_all_ranks=True)
    if options.output:
        predict_to_file(options, values, workers)
        return
    if workers.size > 1:
        raise TrainError("several processes can only predict into a file: give --output, or use "
                         "python -m train predict",
                         on_all_ranks=True)
    options = replace(options, images=tuple(image_paths(options.images)))
    if options.contact_sheet:
        _check_sheet(Path(options.contact_sheet), options.images)
    found = predict(options)
    predictions = [prediction for prediction in found if not prediction.error]
    for file in sorted(prediction.file for prediction in found if prediction.error):
        print(f"skipped, not a readable image: {file}", file=sys.stderr)
    if options.contact_sheet:
        files.write(Path(options.contact_sheet), contact_sheet(predictions))
    if options.json:
        print(json.dumps([_plain(prediction) for prediction in predictions], indent=2))
    else:
        _print(predictions)


def predict(options: PredictOptions) -> list[Prediction]:
    """Predictions for the given image files, in their order, with pictures. Predictions of unreadable images have an
    `error`. Raises TrainError or DataError for a user's mistake, or if no image is readable."""
    network = Predictor.load(options)
    predictions = network.predict(options.images, options.top, options.on_bad_image, keep_pictures=True)
    network.close()
    bad = [prediction for prediction in predictions if prediction.error]
    if len(bad) == len(predictions):
        raise DataError(f"none of the {len(bad)} images can be decoded, for example {bad[0].image}: {bad[0].error}; "
                        "replace them")
    name_damaged([(str(each.image), each.damage) for each in predictions if each.damage])
    return predictions


def _check_sheet(sheet: Path, images: Sequence[Path]) -> None:
    """Raise UserError if the sheet would replace one of the images, or cannot be written."""
    if sheet.suffix.lower() != ".png":
        raise TrainError(f"--contact-sheet {sheet} must end in .png: the sheet is a PNG image")
    if sheet.resolve() in {image.resolve() for image in images}:
        raise TrainError(f"--contact-sheet {sheet} is one of the images, which it would replace: give another name")
    files.check_place(sheet, "give another --contact-sheet")


def _plain(prediction: Prediction) -> dict[str, object]:
    guesses = [{"class": g.name, "index": g.index, "probability": g.probability} for g in prediction.guesses]
    return {"file": str(prediction.file), "predictions": guesses}


def _print(predictions: Sequence[Prediction]) -> None:
    console = Console(highlight=False)
    for prediction in predictions:
        console.print(str(prediction.file), style="bold", markup=False, soft_wrap=True)
        table = Table.grid(padding=(0, 2))
        for guess in prediction.guesses:
            bar = "━" * round(20 * guess.probability)
            table.add_row("", f"{guess.probability:6.1%}", f"{bar:20}", escape(guess.name))
        console.print(table)


# --- the contact sheet ---

_CELL, _GAP, _LINE, _GUESSES = 224, 20, 20, 3  # pixels: a picture, a gap, a line of text; lines of guesses
_PAPER, _INK, _FAINT, _BAR = "#ffffff", "#1f2328", "#6e7781", "#d6e6f7"


def contact_sheet(predictions: Sequence[Prediction], columns: int = 6) -> bytes:
    """A PNG with every picture, its file name and its three most likely classes, each class over a bar whose length
    shows the probability.

    Raises TrainError if there is no prediction to show.
    """
    if not predictions:
        raise TrainError("there is no prediction to draw on the contact sheet: all images were skipped")
    columns = min(columns, len(predictions))
    rows = math.ceil(len(predictions) / columns)
    height = _CELL + (1 + _GUESSES) * _LINE + 8
    sheet = Image.new("RGB", (columns * (_CELL + _GAP) + _GAP, rows * (height + _GAP) + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    regular, bold = font(13), font(13, bold=True)
    for i, prediction in enumerate(predictions):
        x = _GAP + i % columns * (_CELL + _GAP)
        y = _GAP + i // columns * (height + _GAP)
        assert prediction.picture is not None
        sheet.paste(Image.fromarray(prediction.picture).resize((_CELL, _CELL), Image.Resampling.BICUBIC), (x, y))
        y += _CELL + 6
        # the folder is shown too, because it is often the true class
        name = printable(str(Path(*prediction.file.parts[-2:])))
        draw.text((x, y), fitting(name, regular, _CELL), _FAINT, regular)
        for rank, guess in enumerate(prediction.guesses[:_GUESSES]):
            y += _LINE
            letters = bold if rank == 0 else regular
            draw.rectangle((x, y - 1, x + round(_CELL * guess.probability), y + _LINE - 4), _BAR)
            percent = f"{guess.probability:.1%}"
            right = x + _CELL - letters.getlength(percent) - 4
            draw.text((x + 4, y), fitting(printable(guess.name), letters, right - x - 12), _INK, letters)
            draw.text((right, y), percent, _INK, letters)
    png = io.BytesIO()
    sheet.save(png, "PNG")
    return png.getvalue()
