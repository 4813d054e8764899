"""Images from a program (paths, encoded bytes, pixels, Pillow images), in order, for prediction.

DALI decodes paths and bytes, and prepares pixels like the images that it has decoded. So pixels that are equal to the
pixels of a file give the same batch as the file, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from pipelines.by_pillow import upright_rgb
from pipelines.dali_loader import THUMBNAIL_BYTES, DaliLoader, files_in_order
from pipelines.errors import DataError
from pipelines.loader import LoaderConfig
from pipelines.recordio import BrokenRecordError
from pipelines.sources import Source

KINDS = "a path, the bytes of an image file, a uint8 array (height, width, 3) in RGB, or a Pillow image"


class Given(NamedTuple):
    """An image as the program passed it."""

    feeds: str  # "paths", "bytes" or "pixels", as in Source
    content: Any  # a path; uint8 (bytes,); uint8 (height, width, 3); or the reason why Pillow cannot decode it
    name: str  # name in messages: the path, or "image 3"


def given(image: Any, number: int) -> Given:
    """The image `number` of a list. Raises DataError if it is not an image; a broken image raises an exception only
    when it is loaded.
    """
    name = f"image {number}"
    if isinstance(image, (str, os.PathLike)):
        return Given("paths", os.fspath(image), os.fspath(image))
    if isinstance(image, (bytes, bytearray, memoryview)):
        return Given("bytes", np.frombuffer(image, np.uint8), name)
    if isinstance(image, Image.Image):
        return Given("pixels", _pixels(image), getattr(image, "filename", "") or name)
    if not isinstance(image, np.ndarray):
        raise DataError(f"{name} is of the type {type(image).__name__}: give {KINDS}")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise DataError(f"{name} is an array of {image.dtype} with the shape {image.shape}: give {KINDS}")
    return Given("pixels", np.ascontiguousarray(image), name)


def _pixels(image: Image.Image) -> np.ndarray | str:
    try:
        return np.asarray(upright_rgb(image))
    except Exception as error:  # no list contains all exceptions that Pillow raises
        return f"Pillow cannot decode it ({' '.join(str(error).split())})"


class GivenSource(Source):
    """Encoded images or pixels in memory. An image's label is its position."""

    path = Path()

    def __init__(self, images: Sequence[Given]) -> None:
        self._images, self.feeds = images, images[0].feeds
        self.classes = [("", "")] * len(images)

    def __len__(self) -> int:
        return len(self._images)

    def name(self, i: int) -> str:
        return self._images[i].name

    def label(self, i: int) -> int:
        return i

    def feed(self, i: int) -> np.ndarray:
        content = self._images[i].content
        if isinstance(content, str):
            raise BrokenRecordError(content)
        if not len(content):
            raise BrokenRecordError("it has no bytes")
        return content

    def read(self, i: int) -> np.ndarray:
        if self.feeds == "pixels":
            raise BrokenRecordError("it is not encoded")
        return self.feed(i)


def source_of(images: Sequence[Given]) -> Source:
    """The source of one or more images of the same form."""
    return files_in_order([image.content for image in images]) if images[0].feeds == "paths" else GivenSource(images)


def has_thumbnails(source: Source) -> bool:
    """Whether a loader on a GPU decodes these images on the CPU. The decoder affects the pixels."""
    return source.feeds != "pixels" and 0 < source.mean_encoded_bytes < THUMBNAIL_BYTES


def open_in_order(source: Source, image_size: int, batch_size: int, **options: Any) -> DaliLoader:
    """The loader of a source's images in order, through the validation transform. Leaves out images that cannot be
    decoded (`Loader.bad`). `options`: further fields of LoaderConfig. A batch's `indices` are positions in the source;
    its first `num_valid` rows count."""
    config = LoaderConfig(data="files", split="val", image_size=image_size, batch_size=batch_size,
                          **options | {"on_bad_image": "skip"})
    return DaliLoader(config, (0, 1), source)
