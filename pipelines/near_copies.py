"""Finds near copies of images: the same picture saved again, at another size or quality, or with slight edits.

The method is a difference hash (dHash, N. Krawetz, "Kind of Like That", 2013), by rows and by columns: an image is
shrunk to 9 x 9 grey pixels, and each of 128 bits says whether a pixel is brighter than its neighbour. Near copies
differ in few bits. Flat areas give random bits, so the thumbnails themselves are compared in the end. A crop, a turn or
a mirror image is not found.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image

SIDE = 9  # pixels of a thumbnail
NUM_WORDS = 8  # 16-bit parts of a hash; two hashes that differ in fewer bits than this have an equal part
MOST_GREY = 8.0  # mean difference of two near copies' thumbnails, of 255 grey levels
# An image is compared with this number of the following images, in the order of hashes, among images with an equal part
# of the hash
WINDOW = 64
_BITS = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


def thumbnail(encoded: bytes) -> bytes:
    """The 81 grey pixels of an image that can be decoded; b"" if Pillow cannot."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(encoded)) as image:
                image.draft("L", (8 * SIDE, 8 * SIDE))  # JPEG: decodes a smaller image, which is faster
                return image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX).tobytes()
    except Exception:  # Pillow documents no complete list of exceptions
        return b""


def near_copies(thumbnails: np.ndarray) -> list[tuple[int, int]]:
    """Pairs (earlier, later) of near copies among thumbnails, uint8 (N, 81): each later image is paired with the first
    image of which it is a copy. The time grows in proportion to N.
    """
    hashes = _hashes(thumbnails)
    first: dict[int, int] = {}
    for word in range(NUM_WORDS):
        parts = np.roll(hashes, -2 * word, axis=1)  # puts this part first
        order = np.lexsort(parts.T[::-1])
        parts = parts[order]
        for shift in range(1, min(WINDOW, len(order) - 1) + 1):
            near = np.flatnonzero((parts[shift:, :2] == parts[:-shift, :2]).all(axis=1))
            if not len(near):
                break
            differing = _BITS[parts[near + shift] ^ parts[near]].sum(axis=1)
            near = near[(differing < NUM_WORDS) & ((differing > 0) | (word == 0))]  # equal hashes: compared once
            pairs = np.sort(np.stack([order[near], order[near + shift]], axis=1), axis=1)
            grey = np.abs(thumbnails[pairs[:, 0]].astype(np.int16) - thumbnails[pairs[:, 1]]).mean(axis=1)
            for earlier, later in pairs[grey <= MOST_GREY].tolist():
                first[later] = min(earlier, first.get(later, earlier))
    return [(earlier, later) for later, earlier in sorted(first.items())]


def _hashes(thumbnails: np.ndarray) -> np.ndarray:
    """The hash of each thumbnail, uint8 (N, 16): 128 bits."""
    grey = thumbnails.reshape(-1, SIDE, SIDE)
    by_row, by_column = grey[:, :-1, 1:] > grey[:, :-1, :-1], grey[:, 1:, :-1] > grey[:, :-1, :-1]
    bits = np.stack([by_row, by_column], axis=1).reshape(len(grey), -1)
    return np.packbits(bits, axis=1)
