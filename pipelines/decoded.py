"""Decodes the images of a small data set once and keeps their pixels in memory.

For thumbnails, the CPU spends most of its time on handing each encoded image to DALI and decoding it, in every epoch.
Decoded images of one size are handed over as one array a batch, and need no decoding.
"""

from __future__ import annotations

import contextlib
import io
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from pipelines.dali_loader import DaliLoader
from pipelines.loader import LoaderConfig
from pipelines.recordio import BrokenRecordError
from pipelines.sources import Source

# A split up to this size is kept by default. CIFAR-10 takes 0.14 GiB. For photographs, the GPU's JPEG engine decodes
# faster than decoded pixels are copied to the GPU.
SMALL_GIB = 0.25
# Limits of a batch while the cache is filled: many thumbnails, because each batch has a fixed cost; few photographs,
# because they take memory.
_BATCH_BYTES, _MOST_IMAGES = 32 * 2**20, 1024

log = logging.getLogger("pipelines.decoded")


class DecodedSource(Source):
    """The images of another source, decoded. Feeding a broken image raises an exception, as in the original source."""

    feeds = "pixels"

    def __init__(
        self, source: Source, pixels: dict[int, np.ndarray], broken: dict[int, str], damaged: dict[int, str]
    ):
        self.path: Path = source.path
        self.classes, self.remarks = source.classes, source.remarks
        self.first_label, self.label_set = source.first_label, source.label_set
        self.cache_bytes = sum(image.nbytes for image in pixels.values())
        self.damaged = damaged
        self._source = source
        self._pixels = pixels  # image -> uint8 (height, width, 3); each image is either here or in `broken`
        self._broken = broken  # image -> reason
        self._labels = {i: source.label(i) for i in pixels}

    def __len__(self) -> int:
        return len(self._source)

    def name(self, i: int) -> str:
        return self._source.name(i)

    def stamp(self, i: int) -> str:
        return self._source.stamp(i)

    def label(self, i: int) -> int:
        if i in self._broken:
            raise BrokenRecordError(self._broken[i])
        return self._labels[i]

    def feed(self, i: int) -> np.ndarray:
        if i in self._broken:
            raise BrokenRecordError(self._broken[i])
        return self._pixels[i]

    def read(self, i: int) -> np.ndarray:
        return self._source.read(i)


def decode_once(config: LoaderConfig, source: Source) -> Source:
    """Decode the whole source if its pixels fit into `cache_gib`; otherwise return the source unchanged."""
    limit = (SMALL_GIB if config.cache_gib is None else config.cache_gib) * 2**30
    if not limit:
        return source
    image_bytes = _mean_decoded_bytes(source)
    num_bytes = len(source) * image_bytes
    batch_size = max(1, min(len(source), _MOST_IMAGES, int(_BATCH_BYTES / max(image_bytes, 1.0))))
    decoded = _decode(config, source, batch_size, limit) if num_bytes <= limit else None
    if not decoded and config.cache_gib:
        log.warning(
            "%s: the decoded %s images take about %.3g GiB, more than the cache of %g GiB; they are decoded in every "
            "epoch", config.data, config.split, num_bytes / 2**30, config.cache_gib,
        )
    return decoded or source


def _decode(config: LoaderConfig, source: Source, batch_size: int, limit: float) -> DecodedSource | None:
    """Decode all images on all CPU threads; returns None as soon as they take more than `limit` bytes."""
    # Split "val" gives every image once, in order and uncropped.
    whole = replace(config, split="val", device="cpu", batch_size=batch_size, on_bad_image="skip")
    pixels: dict[int, np.ndarray] = {}
    num_bytes = 0
    loader = DaliLoader(whole, (0, 1), source, stage="decode")
    with loader:
        while loader.batch < loader.num_batches:
            images, _, plan = loader.run()
            loader.batch += 1
            for place, i in enumerate(plan.indices[: plan.num_valid]):
                pixels[i] = np.array(images.at(place))
                num_bytes += pixels[i].nbytes
            if num_bytes > limit:
                return None
        return DecodedSource(source, pixels, loader.bad, loader.damaged)


def _mean_decoded_bytes(source: Source) -> float:
    """Mean bytes of a decoded image, estimated from the headers of a sample; 0 if no header can be read."""
    sizes = []
    for encoded in source.sample():
        with (
            contextlib.suppress(Exception),  # the file may be broken or not an image, which the decoder will report
            Image.open(io.BytesIO(encoded)) as image,
        ):
            sizes.append(3 * image.width * image.height)
    return float(np.mean(sizes)) if sizes else 0.0
