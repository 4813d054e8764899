"""Synthetic images: generated once, kept on the device, and returned repeatedly, so that loading costs nothing.

Every class has its own pattern, a smooth random field; an image is the pattern of its class plus noise. Training and
validation share the patterns but not the noise. So a network that learns reaches a high validation accuracy, and a
network that does not learn stays at chance.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from common.mxnet_compat import mx
from pipelines.loader import Batch, Loader, LoaderConfig

_NUM_DISTINCT = 1024  # images per process (fp16 at 224 pixels and 4 channels: 0.4 GB)
_PATTERN_CELLS = 7  # a pattern is an interpolated 7x7 grid, the size of ResNet's last feature map at 224 pixels
_PATTERNS_SEED = 2015


class SyntheticLoader(Loader):
    """A loader of random images whose labels can be learned."""

    def __init__(self, config: LoaderConfig, shard: tuple[int, int]):
        num_classes = config.num_classes or 10
        num_images = config.synthetic_images if config.split == "train" else max(1, config.synthetic_images // 10)
        names = [f"pattern {label}" for label in range(num_classes)]
        super().__init__(config, shard, num_images, [(name, name) for name in names])
        self._pool: list[tuple[Any, Any]] = []
        self._pool_size = 0  # pixels

    def close(self) -> None:
        self._pool.clear()

    def _load(self) -> Batch:
        count = self.config.batch_size
        pixels = self.config.size_in(self.epoch)
        if pixels != self._pool_size or not self._pool:
            self.close()  # free the old pool's memory first
            self._pool = self._make_pool(min(self.num_batches, max(2, _NUM_DISTINCT // count)), pixels)
            self._pool_size = pixels
        data, label = self._pool[(self.epoch * self.num_batches + self.batch) % len(self._pool)]
        rank, size = self.shard
        left = self.num_images - (self.batch * size + rank) * count
        return Batch(data, label, max(0, min(count, left)))

    def _make_pool(self, num_batches: int, pixels: int) -> list[tuple[Any, Any]]:
        config = self.config
        rng = np.random.default_rng([config.seed, config.split == "val", self.shard[0]])
        # Every image uses a different window of one noise field, because drawing noise for each image would take
        # minutes.
        noise = rng.standard_normal((2 * pixels, 2 * pixels, 3), np.float32)
        pool = []
        for _ in range(num_batches):
            labels = rng.integers(0, len(self.labels), config.batch_size)
            images = np.zeros((config.batch_size, pixels, pixels, config.channels), config.dtype)
            for image, label in zip(images, labels, strict=True):
                y, x = rng.integers(0, pixels + 1, 2)
                image[..., :3] = _pattern(int(label), pixels) + noise[y : y + pixels, x : x + pixels]
            context = config.context
            labels = np.array([self.labels[label] for label in labels])
            pool.append((mx.nd.array(images, context, images.dtype), mx.nd.array(labels, context, np.float32)))
        mx.nd.waitall()
        return pool


@functools.lru_cache(maxsize=64)
def _pattern(label: int, pixels: int) -> np.ndarray:
    """The pattern of a class: (pixels, pixels, 3) float32 with a standard deviation of about 1."""
    rng = np.random.default_rng([_PATTERNS_SEED, label])
    grid = rng.standard_normal((_PATTERN_CELLS, _PATTERN_CELLS, 3), np.float32)
    weights = _interpolation(pixels)
    columns = np.tensordot(weights, grid, axes=(1, 1))  # (x, cell of y, c)
    return np.tensordot(weights, columns, axes=(1, 1))


def _interpolation(pixels: int) -> np.ndarray:
    """Weights (pixels, cells) that interpolate linearly between the grid's points."""
    at = np.linspace(0, _PATTERN_CELLS - 1, pixels, dtype=np.float32)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(_PATTERN_CELLS, dtype=np.float32)))
