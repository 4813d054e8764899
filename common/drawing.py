"""What all pictures of a run are drawn with: matplotlib, and its letters."""

from __future__ import annotations

import functools
import importlib
import logging
from pathlib import Path
from typing import Any

from PIL import ImageFont


def matplotlib() -> Any:
    """The package, which is slow to import, and most processes of a run draw nothing. Where the home folder cannot be
    written it works with a temporary one, and its word on that is of no use here."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    package = importlib.import_module("matplotlib")
    package.rcParams["text.parse_math"] = False  # a name with two dollar signs is no formula
    return package


@functools.cache
def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans as matplotlib has it: the same on every machine. `size` in pixels."""
    name = f"DejaVuSans{'-Bold' * bold}.ttf"
    return ImageFont.truetype(str(Path(matplotlib().get_data_path()) / "fonts" / "ttf" / name), size)


def fitting(text: str, font: ImageFont.FreeTypeFont, width: float) -> str:
    """The text, cut with an ellipsis to fit into `width` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"
