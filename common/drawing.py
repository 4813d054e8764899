"""Provides matplotlib and its font for all plots and pictures of a run."""

from __future__ import annotations

import functools
import importlib
import logging
from pathlib import Path
from typing import Any

from PIL import ImageFont


def matplotlib() -> Any:
    """Import matplotlib, on demand: the import is slow, and most processes of a run draw nothing.

    If the home folder cannot be written, matplotlib uses a temporary folder. Its warning about this is suppressed.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    package = importlib.import_module("matplotlib")
    package.rcParams["text.parse_math"] = False  # a class name with two dollar signs must not be read as a formula
    return package


@functools.cache
def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """The DejaVu Sans that matplotlib ships, identical on every machine. `size` in pixels."""
    name = f"DejaVuSans{'-Bold' * bold}.ttf"
    return ImageFont.truetype(str(Path(matplotlib().get_data_path()) / "fonts" / "ttf" / name), size)


def fitting(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """The text, shortened with an ellipsis if it is wider than `width` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"
