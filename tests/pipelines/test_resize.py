"""The resize of augment.cu against DALI's, which it reproduces, and Pillow's, which truncates weights at the border."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from image_helpers import augmented, smooth_image
from nvidia import dali
from PIL import Image

from pipelines import ImageTransform
from pipelines.augment import changes
from pipelines.graph import INTERPOLATIONS, Derived, ImageInputs, fn

DEVICES = ["kernels", pytest.param("gpu", marks=pytest.mark.gpu)]
OF_BYTES: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1)}  # no normalisation: the batch holds the pixels
# (height, width); the last ones shrink so much that one output column needs several chunks of CHUNK input columns.
SIZES = [(37, 51), (1, 1), (1, 300), (300, 1), (2, 3), (64, 96), (131, 97), (330, 333), (90, 4000), (4000, 70)]


def resized(images: list[np.ndarray], size: tuple[int, int], cubic: Any, mirror: Any, device: str, hole: Any = None,
            **options: Any) -> np.ndarray:
    """Resize with our kernels. `options`: other augmentations, which may run as rounds after the resize."""
    count = len(images)
    inputs = ImageInputs(None, None, mirror=np.broadcast_to(np.int32(mirror), count),
                         size=np.full((count, 2), size, np.float32), sigma=np.ones(count, np.float32), hole=hole)
    transform = ImageTransform(**OF_BYTES | options)
    values = Derived(cubic=cubic, blurred=np.zeros(count, bool))
    return augmented(images, transform, changes(transform, inputs, values, []), device, size=size)


def by_dali(images: list[np.ndarray], size: tuple[int, int], interpolation: str, device: str) -> np.ndarray:
    @dali.pipeline_def(batch_size=len(images), num_threads=1, device_id=0 if device == "gpu" else None)
    def graph() -> Any:
        image = fn.reinterpret(fn.external_source(lambda: images, batch=True), layout="HWC")
        image = image.gpu() if device == "gpu" else image
        return fn.resize(image, size=size, interp_type=INTERPOLATIONS[interpolation])

    pipeline = graph()
    pipeline.build()
    return pipeline.run()[0].as_cpu().as_array()


def noise(rng: np.random.Generator, sizes: list[tuple[int, int]] = SIZES) -> list[np.ndarray]:
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("size", [(32, 32), (64, 96), (23, 5), (7, 301)])
def test_it_is_dali_s(size, interpolation, device, rng):
    """Noise images, in which every weight shows, may differ in a few pixels by one level of 255. Bicubic differs more
    often, because DALI takes its weights from a table. The share is only checked for images of more than 3 rows and
    columns: in smaller ones, one value between two levels is repeated in many pixels."""
    images = noise(rng)
    large = [min(source) > 3 for source in SIZES]
    got = resized(images, size, interpolation == "bicubic", 0, device)
    for where in {"cpu", "gpu"} & {"cpu", device}:
        difference = np.abs(got - by_dali(images, size, interpolation, where))
        assert difference.max() <= 1
        assert (difference[large] > 0).mean() < (0.005 if interpolation == "bilinear" else 0.03)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_inside_it_is_pillow_s(interpolation, device, rng):
    """Smooth images, away from the border. Pillow rounds to bytes between the two directions, which also clips bicubic
    overshoots; so a few bytes differ by two levels."""
    shapes = [(120, 90), (331, 257), (40, 30)]
    images = [np.asarray(smooth_image(rng, width, height)) for height, width in shapes]
    got = resized(images, (64, 48), interpolation == "bicubic", 0, device)
    for image, result in zip(images, got, strict=True):
        wanted = Image.fromarray(image).resize((48, 64), Image.Resampling[interpolation.upper()])
        difference = np.abs(result - np.asarray(wanted))[3:-3, 3:-3]
        assert difference.max() <= (1 if interpolation == "bilinear" else 2)
        assert (difference > 1).mean() < 0.01


@pytest.mark.parametrize("device", DEVICES)
def test_mirror_and_interpolation_are_each_image_s_own(device, rng):
    images = noise(rng, [(50, 41), (13, 40), (80, 33), (60, 70)])
    mirror, cubic = np.array([0, 1, 0, 1]), np.array([True, True, False, False])
    got = resized(images, (24, 31), cubic, mirror, device)
    for i, (is_mirrored, is_cubic) in enumerate(zip(mirror, cubic, strict=True)):
        [wanted] = resized([images[i]], (24, 31), is_cubic, 0, device)
        np.testing.assert_array_equal(got[i], wanted[:, ::-1] if is_mirrored else wanted)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(32, 32), (7, 301)])
def test_a_square_that_is_cut_out(size, device, rng):
    """The result equals that of a window with the mean colour in the square, to the bit. Each image has its own square,
    which may lie partly outside. Widths and heights are chosen so that rounding does not decide on any edge."""
    mean, side = (90, 100, 110), 0.5
    images = noise(rng)
    hole = rng.integers(-4, 12, (len(images), 2)).astype(np.float32) / 16 + np.float32(1 / 64)
    cut = []
    for image, (x, y) in zip(images, hole, strict=True):
        height, width, _ = image.shape
        (left, right), (top, bottom) = ((int(max(at, 0) * pixels), int((at + side) * pixels))
                                        for at, pixels in ((x, width), (y, height)))
        cut.append(image.copy())
        cut[-1][top:bottom, left:right] = mean
    options = {"device": device, "mean": mean}
    np.testing.assert_array_equal(resized(images, size, False, 0, hole=hole, cutout=side, **options),
                                  resized(cut, size, False, 0, **options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(32, 32), (7, 301)])
def test_the_bytes_for_a_round_are_those_of_the_batch(size, device, rng):
    images = noise(rng)
    np.testing.assert_array_equal(resized(images, size, False, 1, device, blur=0.5),
                                  resized(images, size, False, 1, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cubic", [False, True])
def test_an_image_of_the_size_that_is_wanted_stays(cubic, device, rng):
    """Images that the graph has already resized pass unchanged."""
    [image] = noise(rng, [(57, 61)])
    np.testing.assert_array_equal(resized([image], (57, 61), cubic, 0, device)[0], image)
