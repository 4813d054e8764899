"""What is wrong, or worth knowing, about an encoded image: found by decoding it with Pillow."""

from __future__ import annotations

import io
import re
import warnings
from typing import NamedTuple

from PIL import Image, ImageFile, UnidentifiedImageError

from pipelines.by_pillow import reason_for_pillow
from pipelines.transform import MAX_PIXELS

# What DALI's decoders read; Pillow knows more.
DECODABLE_FORMATS = frozenset({"JPEG", "MPO", "PNG", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000"})

Image.MAX_IMAGE_PIXELS = None  # ours is another one, `max_pixels`

_UNDECODABLE_TIFF = {"I": "32-bit integers", "F": "floating-point numbers"}  # by Pillow's modes
_DOUBTFUL = re.compile(rb"II\*\0|MM\0\*|RIFF....WEBP|P[1-6]\s", re.DOTALL)


class Finding(NamedTuple):
    """A remark about one image."""

    kind: str  # "empty", "not an image", "truncated", "broken", "too large", "format", or "damaged", "CMYK", "16-bit",
    #            BY_PILLOW
    detail: str
    usable: bool  # the loader decodes it all the same
    doubtful: bool = False  # of a format in which DALI decodes some images that Pillow refuses


BY_PILLOW = "by Pillow"
REFUSED = "cannot be decoded"  # for `verdict`, in place of what DALI's decoder says


def verdict(pillow: Finding | None, decoder: str) -> Finding | None:
    """What training and `verify` make of an image, by what `inspect_image` found and what DALI's decoder said of it: ""
    where it decoded it without a word, or REFUSED.

    DALI draws what it can of a damaged image and says so; an image that Pillow refuses is not used then.
    """
    if pillow and (pillow.kind in ("empty", "too large", "format", BY_PILLOW)):
        return pillow
    is_usable = pillow is None or pillow.usable
    if decoder == REFUSED:
        return Finding(BY_PILLOW, "DALI cannot decode it: it is decoded by Pillow", True) if is_usable else pillow
    if decoder:
        return Finding("damaged", f"the decoder says: {decoder}", True) if is_usable else pillow
    if pillow and pillow.doubtful:
        return Finding("damaged", f"Pillow says: {pillow.detail}; DALI decodes it", True)
    return pillow


def inspect_image(encoded: bytes, max_pixels: int = MAX_PIXELS, decode: bool = True) -> Finding | None:
    """The worst finding about an image, or None for one without fault; without `decode` only its header is read. One of
    more than `max_pixels` is not decoded."""
    if not encoded:
        return Finding("empty", "holds no bytes", False)
    reason = reason_for_pillow(lambda at, size: encoded[at : at + size])
    is_doubtful = not reason and _DOUBTFUL.match(encoded) is not None
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
        return Finding("not an image", f"begins with {encoded[:8]!r}", False, is_doubtful)
    except Exception as error:  # struct.error, OverflowError, zlib.error: no list has all that Pillow raises
        kind = "truncated" if "truncated" in str(error).lower() else "broken"
        return Finding(kind, " ".join(str(error).split()) or type(error).__name__, False, is_doubtful)
    if image_format not in DECODABLE_FORMATS:
        return Finding("format", f"{image_format} images cannot be decoded; convert it to JPEG", False)
    if image_format == "TIFF" and mode in _UNDECODABLE_TIFF:
        return Finding("format", f"TIFF of {_UNDECODABLE_TIFF[mode]} cannot be decoded; convert it to JPEG", False)
    if reason:
        return Finding(BY_PILLOW, f"{reason}: it is decoded by Pillow", True)
    if mode == "CMYK":
        return Finding("CMYK", "is converted to RGB when it is read", True)
    if mode.startswith("I;16") or mode == "I":
        return Finding("16-bit", "is reduced to 8 bits when it is read", True)
    return None
