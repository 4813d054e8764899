"""What is wrong, or worth knowing, about an encoded image: found by decoding it with Pillow."""

from __future__ import annotations

import io
import warnings
from typing import NamedTuple

from PIL import Image, ImageFile, UnidentifiedImageError

from pipelines.transform import MAX_PIXELS

# What DALI's decoders read; Pillow knows more.
DECODABLE_FORMATS = frozenset({"JPEG", "MPO", "PNG", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000"})

Image.MAX_IMAGE_PIXELS = None  # ours is another one, `max_pixels`

_UNDECODABLE_TIFF = {"1": "1 bit", "I": "32-bit integers", "F": "floating-point numbers"}  # by Pillow's modes


class Finding(NamedTuple):
    """A remark about one image."""

    kind: str  # "empty", "not an image", "truncated", "broken", "too large", "format", or "damaged", "CMYK", "16-bit"
    detail: str
    usable: bool  # the loader decodes it all the same


def inspect_image(encoded: bytes, max_pixels: int = MAX_PIXELS, decode: bool = True) -> Finding | None:
    """The worst finding about an image, or None for one without fault; without `decode` only its header is read. One of
    more than `max_pixels` is not decoded."""
    if not encoded:
        return Finding("empty", "holds no bytes", False)
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata is no fault
            with Image.open(io.BytesIO(encoded)) as image:
                image_format, mode = image.format or "unknown", image.mode
                if image.width * image.height > max_pixels:
                    size = f"{image.width:,} x {image.height:,}"
                    return Finding("too large", f"has {size} pixels, more than --max-pixels {max_pixels}", False)
                if decode:
                    image.draft("RGB", (1, 1))  # JPEG: an eighth of the size is enough to walk through all of the data
                    image.load()
    except UnidentifiedImageError:
        return Finding("not an image", f"begins with {encoded[:8]!r}", False)
    except Exception as error:  # struct.error, OverflowError, zlib.error: no list has all that Pillow raises
        kind = "truncated" if "truncated" in str(error).lower() else "broken"
        return Finding(kind, " ".join(str(error).split()) or type(error).__name__, False)
    if image_format not in DECODABLE_FORMATS:
        return Finding("format", f"{image_format} images cannot be decoded; convert it to JPEG", False)
    if image_format == "TIFF" and mode in _UNDECODABLE_TIFF:
        return Finding("format", f"TIFF of {_UNDECODABLE_TIFF[mode]} cannot be decoded; convert it to JPEG", False)
    if mode == "CMYK":
        return Finding("CMYK", "is converted to RGB when it is read", True)
    if mode.startswith("I;16") or mode == "I":
        return Finding("16-bit", "is reduced to 8 bits when it is read", True)
    return None
