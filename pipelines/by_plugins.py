"""Augmentations of plug-ins (`common/plugins.py`): part of the DALI graph, between the resize and all other
augmentations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from nvidia import dali

from common import plugins
from common.plugins import Registered
from pipelines.errors import DataError

KIND = "augmentation"
NUM_RANDOM = 8  # random numbers from 0 to 1 for each augmentation and image

fn: Any = dali.fn  # DALI makes its operators when it is imported
types: Any = dali.types


def changed(names: Sequence[str], images: Any, random: Any) -> Any:
    """The images after these augmentations, in this order. `random`: (len(names), NUM_RANDOM) for each image. Raises
    UserError."""
    for number, name in enumerate(names):
        images = _called(plugins.get(KIND, name), images, random[number])
    return images


def _called(each: Registered, images: Any, random: Any) -> Any:
    result = plugins.call(each, images, random)
    if not isinstance(result, dali.data_node.DataNode):
        raise DataError(f"the augmentation {each.name} ({each.place}) returned a {type(result).__name__}: return the "
                        "images, as an operator of nvidia.dali.fn gives them")
    return fn.reshape(result, layout="HWC")


def check(names: Sequence[str], image_size: int, device: str, device_id: int) -> None:
    """Try each augmentation on two images. Raises UserError unless the augmentation keeps the type and size of the
    images. Without this check, such an error would look like a broken image in the loader's graph.
    """
    for name in names:
        _check(plugins.get(KIND, name), image_size, device, device_id)


def _check(each: Registered, image_size: int, device: str, device_id: int) -> None:
    rng = np.random.default_rng(0)
    tried = [rng.integers(0, 256, (image_size, image_size, 3), np.uint8) for _ in range(2)]
    randoms = rng.random((2, NUM_RANDOM), np.float32)

    @dali.pipeline_def(batch_size=2, num_threads=1, prefetch_queue_depth=1,
                       device_id=device_id if device == "gpu" else None)  # type: ignore[arg-type]  # None is "no GPU"
    def graph() -> Any:
        images = fn.external_source(lambda: tried, layout="HWC", batch=True)
        random = fn.external_source(lambda: list(randoms), batch=True)
        return _called(each, images.gpu() if device == "gpu" else images, random)

    what = f"the augmentation {each.name} ({each.place})"
    try:
        (result,) = graph().run()
        found = [(result[i].shape(), np.dtype(types.to_numpy_type(result.dtype))) for i in range(2)]
    except (RuntimeError, TypeError, ValueError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise DataError(f"{what} fails on an image of {image_size}x{image_size} pixels: "
                        f"{lines[-1] if lines else type(error).__name__}") from error
    for shape, dtype in found:
        if (tuple(shape), dtype) != ((image_size, image_size, 3), np.uint8):
            raise DataError(f"{what} turns uint8 {(image_size, image_size, 3)} into {dtype} {tuple(shape)}: return "
                            "images of the same type and size")
