"""Draws contact sheets of the network's input: samples as the loader returns them, with their class names."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from common.drawing import fitting, font
from common.files import write_bytes
from pipelines.errors import DataError
from pipelines.loader import Loader, LoaderConfig
from pipelines.opening import open_loader
from pipelines.transform import Augmentation

_MARGIN, _GAP, _CAPTION = 24, 10, 22  # pixels
_TOP = _MARGIN + 40
_BACKGROUND, _INK, _FAINT = (250, 250, 248), (40, 40, 40), (130, 130, 130)
_MOST_PIXELS = 10**8  # most pixels of a sheet, which take 0.3 GB
# pixels; a smaller image is enlarged to at least this size by an integer factor, so that its pixels stay visible
_LEAST_TILE = 112


# Each augmentation alone: its command-line option, and the fields of Augmentation.
ALONE: dict[str, dict[str, Any]] = {
    "none": {},
    "--mirror": {"mirror": True},
    "--random-area 0.08 1": {"random_area": (0.08, 1.0)},
    "--crop-padding 16": {"crop_padding": 16},
    "--cutout 0.4": {"cutout": 0.4},
    "--auto-augment trivialaugment": {"auto_augment": "trivialaugment"},
    "--auto-augment randaugment": {"auto_augment": "randaugment"},
    "--auto-augment randaugment-timm": {"auto_augment": "randaugment-timm", "randaugment_magnitude_std": 0.5},
    "--auto-augment autoaugment": {"auto_augment": "autoaugment"},
    "--brightness 0.6": {"brightness": 0.6},
    "--contrast 0.6": {"contrast": 0.6},
    "--saturation 0.9": {"saturation": 0.9},
    "--hue 0.5": {"hue": 0.5},
    "--grey 0.5": {"grey": 0.5},
    "--blur 0.5": {"blur": 0.5},
    "--solarise 0.5": {"solarise": 0.5},
    "--random-erasing 0.5": {"random_erasing": 0.5},
    "--train-interpolation random": {"train_interpolation": "random"},
}


def contact_sheet(loader: Loader, rows: int, columns: int, title: str) -> Image.Image:
    """Draw the loader's next `rows * columns` images, with normalisation undone, each above its class name."""
    if rows < 1 or columns < 1:
        raise DataError(f"a sheet of {rows} rows and {columns} columns has no images; give at least 1 of each")
    sheet = _Sheet(rows, columns, loader.config.image_size, title)
    for pixels, label in _samples(loader, rows * columns):
        sheet.add(pixels, loader.class_names[label])
    return sheet.image


def augmentation_sheet(config: LoaderConfig, columns: int, title: str) -> Image.Image:
    """Draw one row for each augmentation alone, with its option; each row shows the loader's first `columns` images."""
    if columns < 1:
        raise DataError(f"a sheet of {columns} columns has no images; give at least 1")
    sheet = _Sheet(len(ALONE), columns, config.image_size, title)
    for option, values in ALONE.items():
        transform = replace(config.transform, **_NOTHING | values)
        with open_loader(replace(config, split="train", transform=transform)) as loader:
            for number, (pixels, _) in enumerate(_samples(loader, columns)):
                sheet.add(pixels, "" if number else option, columns)
    return sheet.image


# Values of Augmentation's fields that change nothing.
_NOTHING = vars(Augmentation()) | {"mirror": False, "random_area": (1.0, 1.0)}


class _Sheet:
    """A picture of `rows` x `columns` tiles with captions; raises DataError if it would be too large."""

    def __init__(self, rows: int, columns: int, pixels: int, title: str):
        self._tile = pixels * -(-_LEAST_TILE // pixels) if pixels < _LEAST_TILE else pixels
        self._columns, self._count = columns, 0
        width = 2 * _MARGIN + columns * (self._tile + _GAP) - _GAP
        height = _TOP + rows * (self._tile + _CAPTION + _GAP) - _GAP + _MARGIN
        if width * height > _MOST_PIXELS:
            raise DataError(
                f"a sheet of {rows} rows and {columns} columns has {width:,} x {height:,} pixels; "
                "give fewer rows or columns, or smaller images"
            )
        self.image = Image.new("RGB", (width, height), _BACKGROUND)
        self._pen = ImageDraw.Draw(self.image)
        self._pen.text((_MARGIN, _MARGIN - 4), title, _INK, font(20))

    def add(self, pixels: np.ndarray, caption: str, columns: int = 1) -> None:
        """Add the next tile; its caption may be as wide as `columns` tiles."""
        row, column = divmod(self._count, self._columns)
        x, y = _MARGIN + column * (self._tile + _GAP), _TOP + row * (self._tile + _CAPTION + _GAP)
        tile = (self._tile, self._tile)
        self.image.paste(Image.fromarray(pixels).resize(tile, Image.Resampling.NEAREST), (x, y))
        caption = fitting(caption, font(13), columns * (self._tile + _GAP) - _GAP)
        self._pen.text((x, y + self._tile + 3), caption, _FAINT, font(13))
        self._count += 1


def save(sheet: Image.Image, path: Path) -> None:
    """Write a picture in one step: a JPEG if its suffix is .jpg or .jpeg, otherwise a PNG. Raises DataError."""
    buffer = io.BytesIO()
    sheet.save(buffer, "JPEG" if path.suffix.lower() in (".jpg", ".jpeg") else "PNG")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, buffer.getvalue())
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def _samples(loader: Loader, count: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield pixels (uint8) and label of each of the next `count` images."""
    transform = loader.config.transform
    for batch in itertools.islice(loader, -(-count // loader.config.batch_size)):
        images = batch.data.asnumpy()[: batch.num_valid, ..., :3].astype(np.float32) * transform.std + transform.mean
        pixels = np.clip(np.round(images), 0, 255).astype(np.uint8)
        number = min(count, batch.num_valid)
        yield from zip(pixels[:number], batch.label.asnumpy()[:number].astype(int), strict=True)
        count -= number
