"""Small generated data sets for the tests of the data pipelines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from image_helpers import encode, smooth_image, write_folder, write_records


@pytest.fixture(scope="session")
def numbered(tmp_path_factory) -> Path:
    """A RecordIO file of 37 images in 37 classes, so that a label identifies its image."""
    path = tmp_path_factory.mktemp("numbered") / "train.rec"
    rng = np.random.default_rng(37)
    sizes = rng.integers(40, 130, (37, 2))
    images = [encode(smooth_image(rng, int(width), int(height)), quality=95) for width, height in sizes]
    write_records(path, images, [float(i) for i in range(37)])
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """Class folders with 12 images of 3 classes."""
    write_folder(tmp_path / "images", 12, 3, seed=12)
    return tmp_path / "images"
