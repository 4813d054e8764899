"""Pictures in HTML for notebooks: a network's predictions for images in any form."""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from train.classes import printable

PICTURE = 160  # pixels of a picture's longer side in a notebook
MOST_PICTURES = 24
BAR = "linear-gradient(90deg, rgba(11, 98, 196, .25) {:.0%}, transparent 0)"


def predictions_html(predictions: Sequence[Any]) -> str:
    """The first `Prediction`s with their pictures, and the most likely classes over bars whose length is the
    probability."""
    shown = "".join(map(_prediction, predictions[:MOST_PICTURES]))
    left = len(predictions) - MOST_PICTURES
    more = f"<p>and {left:,} more</p>" if left > 0 else ""
    return f'<div style="display: flex; flex-wrap: wrap; gap: 12px">{shown}</div>{more}'


def _prediction(prediction: Any) -> str:
    lines = [(html.escape(f"{guess.name} {guess.probability:.1%}"), guess.probability)
             for guess in prediction.guesses[:3]] or [(html.escape(prediction.error), 0.0)]
    texts = "".join(f'<div style="background: {BAR.format(share)}">{text}</div>' for text, share in lines)
    thumbnail = "" if prediction.error else inline(_thumbnail(prediction.image), "")
    name = html.escape(_name(prediction.image))
    return (f'<div style="width: {PICTURE}px; font-size: 85%; overflow-wrap: anywhere">{thumbnail}'
            f'<div style="color: grey">{name}</div>{texts}</div>')


def _name(image: Any) -> str:
    """The file's name with its folder, which is often the true class; "" for an image that is not a file."""
    return printable(str(Path(*Path(image).parts[-2:]))) if isinstance(image, (str, os.PathLike)) else ""


def _thumbnail(image: Any) -> bytes:
    """A PNG of an image in any form that `predict` accepts; empty if its file no longer exists."""
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


def inline(picture: bytes, style: str) -> str:
    """A PNG as HTML; "" for an empty one."""
    return f'<img style="{style}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">' if picture else ""
