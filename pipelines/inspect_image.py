"""Decodes an image with Pillow to find faults and other properties worth reporting."""

from __future__ import annotations

import io
import re
import warnings
from typing import NamedTuple

from PIL import Image, ImageFile, UnidentifiedImageError

from pipelines.by_pillow import reason_for_pillow
from pipelines.transform import MAX_PIXELS

# Formats that DALI's decoders read; Pillow reads more.
DECODABLE_FORMATS = frozenset({"JPEG", "MPO", "PNG", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000"})

Image.MAX_IMAGE_PIXELS = None  # no limit of Pillow, because the limit `max_pixels` is checked here

# Pillow mode -> pixels that DALI cannot decode
_UNDECODABLE_TIFF = {"I": "32-bit integers", "F": "floating-point numbers"}
_DOUBTFUL = re.compile(rb"II\*\0|MM\0\*|RIFF....WEBP|P[1-6]\s", re.DOTALL)


class Finding(NamedTuple):
    """A remark about one image."""

    kind: str  # "empty", "not an image", "truncated", "broken", "too large", "format", or "damaged", "CMYK", "16-bit",
    #            BY_PILLOW
    detail: str
    usable: bool  # whether the loader decodes the image nevertheless
    doubtful: bool = False  # whether DALI may decode the image although Pillow refuses it, as for some formats


BY_PILLOW = "by Pillow"
REFUSED = "cannot be decoded"  # argument of `verdict` in place of a message of DALI's decoder


def verdict(pillow: Finding | None, decoder: str) -> Finding | None:
    """Judge an image for training and `verify` from the finding of `inspect_image` and the message of DALI's decoder.

    `decoder` is "" if DALI decoded the image without a message, or REFUSED. DALI decodes as much as it can of a damaged
    image and writes a message; if there is a message and Pillow refuses the image, the image is not used.
    """
    if pillow and (pillow.kind in ("empty", "too large", "format", BY_PILLOW)):
        return pillow
    is_usable = pillow is None or pillow.usable
    if decoder == REFUSED:
        return Finding(BY_PILLOW, "DALI cannot decode it, so Pillow does", True) if is_usable else pillow
    if decoder:
        return Finding("damaged", f"the decoder says: {decoder}", True) if is_usable else pillow
    if pillow and pillow.doubtful:
        return Finding("damaged", f"Pillow says: {pillow.detail}; DALI decodes it", True)
    return pillow


def inspect_image(encoded: bytes, max_pixels: int = MAX_PIXELS, decode: bool = True) -> Finding | None:
    """The worst finding about an image, or None if it has no fault.

    Without `decode`, only the header is read. An image of more than `max_pixels` is never decoded.
    """
    if not encoded:
        return Finding("empty", "holds no bytes", False)
    reason = reason_for_pillow(lambda at, size: encoded[at : at + size])
    is_doubtful = not reason and _DOUBTFUL.match(encoded) is not None
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unusual metadata is not a fault
            with Image.open(io.BytesIO(encoded)) as image:
                image_format, mode = image.format or "unknown", image.mode
                if image.width * image.height > max_pixels:
                    size = f"{image.width:,} x {image.height:,}"
                    return Finding("too large", f"has {size} pixels, more than --max-pixels {max_pixels}", False)
                if decode:
                    image.draft("RGB", (1, 1))  # JPEG: decoding at 1/8 size still reads all of the data
                    image.load()
    except UnidentifiedImageError:
        return Finding("not an image", f"begins with {encoded[:8]!r}", False, is_doubtful)
    except Exception as error:  # for example struct.error, OverflowError, zlib.error; Pillow documents no complete list
        kind = "truncated" if "truncated" in str(error).lower() else "broken"
        return Finding(kind, " ".join(str(error).split()) or type(error).__name__, False, is_doubtful)
    if image_format not in DECODABLE_FORMATS:
        return Finding("format", f"{image_format} images cannot be decoded; convert it to JPEG", False)
    if image_format == "TIFF" and mode in _UNDECODABLE_TIFF:
        return Finding("format", f"TIFF of {_UNDECODABLE_TIFF[mode]} cannot be decoded; convert it to JPEG", False)
    if reason:
        return Finding(BY_PILLOW, f"{reason}, so Pillow decodes it", True)
    if mode == "CMYK":
        return Finding("CMYK", "is converted to RGB when it is read", True)
    if mode.startswith("I;16") or mode == "I":
        return Finding("16-bit", "is reduced to 8 bits when it is read", True)
    return None
