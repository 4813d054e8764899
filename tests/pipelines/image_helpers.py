"""Generated images for the tests of the data pipelines, in folders and in RecordIO files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from nvidia import dali
from PIL import Image

from pipelines import ImageTransform
from pipelines.operations import FAMILIES, Numbers, applied, fn, numbers
from pipelines.recordio import pack_record

# All augmentations at once, each often.
EVERYTHING = ImageTransform(
    crop_padding=5, cutout=0.2, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, grey=0.3, blur=0.5, solarise=0.3,
    auto_augment="randaugment", random_erasing=0.5, train_interpolation="random",
)  # fmt: skip


def smooth_image(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """A picture without sharp edges, so that decoders and resizers of different make agree on it closely."""
    cells = rng.integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, image_format: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def write_folder(folder: Path, num_images: int, num_classes: int, seed: int) -> list[Path]:
    """Class folders c00, c01, ... with images of odd sizes; the files in the order in which the loader numbers them."""
    rng = np.random.default_rng(seed)
    files = []
    for i in range(num_images):
        path = folder / f"c{i % num_classes:02}" / f"{i:03}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        width, height = rng.integers(40, 130, 2)
        path.write_bytes(encode(smooth_image(rng, int(width), int(height)), quality=95))
        files.append(path)
    return sorted(files)


def write_records(path: Path, images: list[bytes], labels: list[float]) -> None:
    """A .rec file and its .idx."""
    path.parent.mkdir(parents=True, exist_ok=True)
    offset, lines = 0, []
    with path.open("wb") as file:
        for key, (image, label) in enumerate(zip(images, labels, strict=True)):
            lines.append(f"{key}\t{offset}\n")
            offset += file.write(pack_record(label, image, key))
    path.with_suffix(".idx").write_text("".join(lines))


def operated(
    images: np.ndarray,
    operations: Sequence[int],
    magnitudes: Sequence[float],
    fill: float = 0,
    device: str = "cpu",
) -> np.ndarray:
    """Images (N, H, W, 3), each after its operation, in one DALI graph."""
    count, height, width, _ = images.shape
    inputs = numbers(np.array(operations), np.array(magnitudes), height, width)
    size = np.full((count, 2), (height, width), np.float32)

    @dali.pipeline_def(batch_size=count, num_threads=1, device_id=0 if device == "gpu" else None)
    def graph():
        image, size_node, *nodes = fn.external_source(lambda: (images, size, *inputs), num_outputs=2 + len(inputs),
                                                      batch=True)
        image = fn.reinterpret(image, layout="HWC")
        image = image.gpu() if device == "gpu" else image
        return applied(image, Numbers(*nodes), frozenset(FAMILIES.values()), fill, size_node, device)

    pipeline = graph()
    pipeline.build()
    (result,) = pipeline.run()
    return (result.as_cpu() if device == "gpu" else result).as_array()
