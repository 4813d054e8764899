"""Many epochs of small batches, compared with the CPU's and with each other: one of several processes on one GPU.

    python tests/pipelines/repeat_batches.py TRAIN.rec DEVICE SEED LOADERS [press]

Prints one line of JSON: epochs made, images compared, and the images that were wrong. `press`: between the loaders,
take and give back memory of the GPU and of the host.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from common.mxnet_compat import mx
from pipelines import ImageTransform, LoaderConfig, open_loader
from pipelines.transform import STD

TRANSFORMS = [
    ImageTransform(crop_padding=9, cutout=0.3),  # with the cache, two wrong images occurred once
    ImageTransform(),
    ImageTransform(crop_padding=9, cutout=0.3, brightness=0.6, random_erasing=0.5),
]
READING: list[dict[str, Any]] = [{"cache_gib": 1.0}, {"decoder": "cpu"}, {"decoder": "gpu"}]
# Mean difference over an image, in levels of 255. Decoders and resizers differ by up to 3, two images by at least 30.
MOST_LEVELS = 12.0


EPOCHS = 10  # per loader, as starting a loader beside other processes takes seconds


@dataclass(frozen=True)
class Wrong:
    """An image of a batch that differs from the expected one."""

    case: str
    loader: int  # counted in this process
    batch: int  # counted through its epochs
    place: int
    levels: float  # mean difference from the CPU's image, in levels of 255


def batches(data: str, split: str, transform: ImageTransform, **options: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Yield pixels (N, H, W, 3) float32 and labels (N,) of each batch of the first epochs."""
    config = LoaderConfig(data=data, split=split, batch_size=4, image_size=24, num_threads=2, transform=transform,
                          **options)
    with open_loader(config) as loader:
        return [(batch.data.asnumpy()[: batch.num_valid].astype(np.float32), batch.label.asnumpy()[: batch.num_valid])
                for _ in range(EPOCHS) for batch in loader]


def compare(case: str, loader: int, expected: Any, found: Any) -> list[Wrong]:
    wrong = []
    for number, ((pixels, labels), (gpu_pixels, gpu_labels)) in enumerate(zip(expected, found, strict=True)):
        levels = np.abs(pixels - gpu_pixels).mean((1, 2, 3)) * float(np.mean(STD))
        places = np.flatnonzero((levels > MOST_LEVELS) | (labels != gpu_labels))
        wrong += [Wrong(case, loader, number, int(place), round(float(levels[place]), 1)) for place in places]
    return wrong


def press(rng: np.random.Generator, device: Any) -> None:
    """Allocate memory of odd sizes, write to it, and free it, again and again."""
    for size in rng.integers(1 << 10, 1 << 26, 4):
        mx.nd.full((int(size),), 7, ctx=device, dtype="uint8").copyto(mx.cpu())
        np.full(int(size), 7, np.uint8)


def main(data: str, device: str, seed: int, loaders: int, is_pressing: bool) -> None:
    rng = np.random.default_rng(seed)
    cases = [(split, place, reading) for place in range(len(TRANSFORMS)) for split in ("train", "val")
             for reading in READING]
    expected: dict[tuple[str, int], Any] = {}
    wrong: list[Wrong] = []
    num_images = 0
    for number in range(loaders):
        split, place, reading = cases[0 if number % 2 else int(rng.integers(len(cases)))]
        case = f"{split} {TRANSFORMS[place]} {reading}"
        if (split, place) not in expected:
            expected[split, place] = batches(data, split, TRANSFORMS[place])
        if is_pressing:
            press(rng, mx.gpu(0) if device == "gpu" else mx.cpu())
        options = {"device": "gpu", **reading} if device == "gpu" else {}
        found = batches(data, split, TRANSFORMS[place], **options)
        num_images += sum(len(labels) for _, labels in found)
        wrong += compare(case, number, expected[split, place], found)
    found_wrong = [asdict(each) for each in wrong]
    print(json.dumps({"epochs": loaders * EPOCHS, "images": num_images, "wrong": found_wrong}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), "press" in sys.argv[5:])
