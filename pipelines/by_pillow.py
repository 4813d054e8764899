"""Decodes valid images with Pillow if DALI decodes them wrongly or refuses them.

An image's header tells whether DALI decodes it wrongly. These cases were found by comparing DALI and Pillow on all
kinds of supported files (DALI 2.4; tests/pipelines/test_kinds_of_images.py). DALI inverts a CMYK JPEG without Adobe's
marker, takes a PPM's largest value for 255 whatever its header says, blends a grey TIFF with its alpha channel, takes
L*a*b* for RGB, and refuses some WebP files with EXIF data.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

# (offset, count) -> `count` bytes of an encoded image from `offset` on; fewer at its end
Read = Callable[[int, int], bytes]

_STANDALONE = frozenset({0x01, *range(0xD0, 0xDA)})  # JPEG markers that no segment follows
_NO_FRAMES = frozenset({0xC4, 0xC8, 0xCC})  # JPEG markers from 0xC0 to 0xCF begin a frame, except these
_ADOBE, _SCAN, _MOST_SEGMENTS = 0xEE, 0xDA, 1000
_BLANK = rb"(?:\s|#[^\n]*\n)+"
_PNM = re.compile(rb"P[2356]" + _BLANK + rb"\d+" + _BLANK + rb"\d+" + _BLANK + rb"(\d+)")
_PNM_VALUES = (255, 65535)  # values of the header field "maxval" that DALI reads correctly
# Pillow modes of TIFF images that DALI reads correctly
_TIFF_MODES = frozenset({"L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16B"})
_HEADER = 4096  # bytes of a header that are read at first
_LARGEST_16_BIT = 65535


def reason_for_pillow(read: Read) -> str:
    """The reason, found in its header, why Pillow must decode an image; "" for nearly all images."""
    beginning = read(0, 4)
    if beginning[:2] == b"\xff\xd8":
        return _of_jpeg(read)
    if beginning == b"RIFF" and read(8, 8) == b"WEBPVP8X":
        return _of_webp(read)
    if re.match(rb"P[2356]\s", beginning):
        match = _PNM.match(read(0, _HEADER))
        is_other = match and int(match[1]) not in _PNM_VALUES
        return f"its largest value is {int(match[1])}" if match and is_other else ""
    if beginning in (b"II*\0", b"MM\0*"):
        return _of_tiff(read)
    return ""


def reason_for_pillow_of_file(path: bytes) -> str:
    """`reason_for_pillow` for an image file; usually needs one read. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        beginning = os.pread(descriptor, _HEADER, 0)
        end = os.fstat(descriptor).st_size

        def read(at: int, size: int) -> bytes:
            is_read = at + size <= len(beginning)
            return beginning[at : at + size] if is_read else os.pread(descriptor, min(size, max(0, end - at)), at)

        return reason_for_pillow(read)
    finally:
        os.close(descriptor)


def _of_jpeg(read: Read) -> str:
    """Walk through the segments up to the frame header; in a CMYK image, up to the first scan."""
    at, is_cmyk = 2, False
    for _ in range(_MOST_SEGMENTS):
        head = read(at, 10)
        if len(head) < 4 or head[0] != 0xFF:
            return ""  # damaged: the decoders will report it
        kind = head[1]
        if kind == _SCAN:
            return "it is CMYK without Adobe's marker" if is_cmyk else ""
        if kind == _ADOBE and head[4:9] == b"Adobe":
            return ""
        if 0xC0 <= kind <= 0xCF and kind not in _NO_FRAMES:
            frame = read(at + 4, 6)  # precision, height, width, components
            if len(frame) < 6 or frame[0] != 8:
                return f"it has {frame[0]} bits a value" if frame else ""
            if frame[5] != 4:
                return ""
            is_cmyk = True
        at += 1 if kind == 0xFF else 2 if kind in _STANDALONE else 2 + int.from_bytes(head[2:4], "big")
    return ""


def _of_webp(read: Read) -> str:
    """The reason for a WebP file with EXIF data behind a chunk of odd size.

    nvImageCodec ignores the padding byte after this chunk, and so does not find the EXIF data.
    """
    at, is_odd = 12, False
    for _ in range(_MOST_SEGMENTS):
        head = read(at, 8)
        if len(head) < 8 or head[:4] == b"EXIF":
            return "its EXIF data lie behind a chunk of odd size" if is_odd and len(head) == 8 else ""
        size = int.from_bytes(head[4:], "little")
        is_odd = is_odd or size % 2 == 1
        at += 8 + size + size % 2
    return ""


def _of_tiff(read: Read) -> str:
    try:
        with Image.open(io.BytesIO(read(0, 1 << 40))) as image:
            return "" if image.mode in _TIFF_MODES else f"it is a TIFF of mode {image.mode}"
    except Exception:  # damaged: the decoders will report it
        return ""


def by_pillow(encoded: bytes) -> bytes:
    """Decode an image with Pillow and return it upright, as an 8-bit RGB PNG; any error of Pillow's passes through."""
    with Image.open(io.BytesIO(encoded)) as image:
        buffer = io.BytesIO()
        upright_rgb(image).save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()


def upright_rgb(image: Image.Image) -> Image.Image:
    """The image turned upright by its EXIF orientation, in 8-bit RGB. Any error of Pillow's passes through.

    Raises ValueError for pixels whose range is unknown: floating-point numbers, and integers of more than 16 bits.
    """
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "F":
        raise ValueError("its pixels are floating-point numbers; convert it to 8 bits")
    if upright.mode.startswith("I"):  # 16-bit values, which Pillow would clip at 255
        pixels = np.asarray(upright)
        if pixels.min() < 0 or pixels.max() > _LARGEST_16_BIT:
            raise ValueError("its pixels are not numbers of 16 bits; convert it to 8 bits")
        upright = Image.fromarray((pixels >> 8).astype(np.uint8))
    return upright.convert("RGB")


class PillowImages:
    """Images that Pillow has decoded once; they stay as PNG files in a temporary folder until `close`."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: dict[int, Path] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, i: int) -> bool:
        return i in self._files

    def add(self, i: int, encoded: bytes) -> None:
        """Decode and keep image `i`. Raises OSError if the disk is full; any error of Pillow's passes through."""
        with self._lock:  # several threads add images
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="resnet-mxnet-")
        path = Path(self._folder.name, f"{i}.png")
        path.write_bytes(by_pillow(encoded))
        self._files[i] = path

    def feed(self, i: int, feeds: str) -> np.ndarray:
        """The graph's input for image `i`, in the form of Source.feed: the PNG's "bytes" or its path ("paths")."""
        path = self._files[i]
        return np.frombuffer(os.fsencode(path), np.uint8) if feeds == "paths" else np.fromfile(path, np.uint8)

    def close(self) -> None:
        if self._folder:
            self._folder.cleanup()
        self._folder = None
        self._files.clear()
