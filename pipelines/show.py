"""A contact sheet of what the network sees: samples as they come out of the loader, with the names of their classes."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from common.files import write_bytes
from pipelines.errors import DataError
from pipelines.loader import Batch, Loader
from pipelines.transform import ImageTransform

_MARGIN, _GAP, _CAPTION = 24, 10, 22  # pixels
_BACKGROUND, _INK, _FAINT = (250, 250, 248), (40, 40, 40), (130, 130, 130)
_MOST_PIXELS = 10**8  # of a sheet: 0.3 GB
_LEAST_TILE = 112  # small images are enlarged to this, in whole steps, so that their pixels stay visible


def contact_sheet(loader: Loader, rows: int, columns: int, title: str) -> Image.Image:
    """The loader's next `rows * columns` images, un-normalised, each above its class name."""
    if rows < 1 or columns < 1:
        raise DataError(f"a sheet of {rows} rows and {columns} columns has no images; give at least 1 of each")
    pixels = loader.config.image_size
    tile = pixels * -(-_LEAST_TILE // pixels) if pixels < _LEAST_TILE else pixels
    width = 2 * _MARGIN + columns * (tile + _GAP) - _GAP
    top = _MARGIN + 40
    height = top + rows * (tile + _CAPTION + _GAP) - _GAP + _MARGIN
    if width * height > _MOST_PIXELS:
        raise DataError(
            f"a sheet of {rows} rows and {columns} columns has {width:,} x {height:,} pixels; ask for less"
        )
    batches = itertools.islice(loader, -(-rows * columns // loader.config.batch_size))
    samples = [sample for batch in batches for sample in _samples(batch, loader.config.transform)]
    sheet = Image.new("RGB", (width, height), _BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    pen.text((_MARGIN, _MARGIN - 4), title, _INK, _font(20))
    caption_font = _font(13)
    for i, (pixel_values, label) in enumerate(samples[: rows * columns]):
        x = _MARGIN + i % columns * (tile + _GAP)
        y = top + i // columns * (tile + _CAPTION + _GAP)
        sheet.paste(Image.fromarray(pixel_values).resize((tile, tile), Image.Resampling.NEAREST), (x, y))
        caption = _fit(pen, loader.class_names[label], caption_font, tile)
        pen.text((x, y + tile + 3), caption, _FAINT, caption_font)
    return sheet


def save_png(sheet: Image.Image, path: Path) -> None:
    """Write a picture in one step; raises DataError."""
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, buffer.getvalue())
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def _samples(batch: Batch, transform: ImageTransform) -> list[tuple[np.ndarray, int]]:
    images = batch.data.asnumpy()[: batch.num_valid, ..., :3].astype(np.float32) * transform.std + transform.mean
    pixels = np.clip(np.round(images), 0, 255).astype(np.uint8)
    return list(zip(pixels, batch.label.asnumpy()[: batch.num_valid].astype(int), strict=True))


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _fit(pen: ImageDraw.ImageDraw, text: str, font, width: int) -> str:
    """The text, shortened until it is at most `width` pixels wide."""
    shown = text
    while len(text) > 1 and pen.textlength(shown, font) > width:
        text = text[:-1]
        shown = text.rstrip(" ,") + "…"
    return shown
