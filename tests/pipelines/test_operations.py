"""The operations of the policies, pixel by pixel against Pillow, which torchvision's functions call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from image_helpers import operated, smooth_image
from PIL import Image, ImageEnhance, ImageOps

from pipelines.operations import FAMILIES, Operation, numbers

# Magnitudes of each operation, from those that change nothing to beyond those of any policy.
MAGNITUDES: dict[Operation, tuple[float, ...]] = {
    Operation.IDENTITY: (0,),
    Operation.SHEAR_X: (0, 0.3, -0.99, 5),
    Operation.SHEAR_Y: (0, -0.3, 0.99, -5),
    Operation.TRANSLATE_X: (0, 32, -7, 31.5, 1000),
    Operation.TRANSLATE_Y: (0, -32, 5, -2.7, -1000),
    Operation.ROTATE: (0, 30, -135, 90, 180),
    Operation.BRIGHTNESS: (0, 0.01, 1, 1.99, 20),
    Operation.COLOR: (0, 0.01, 1, 1.99, 20),
    Operation.CONTRAST: (0, 0.01, 1, 1.99, 20),
    Operation.SHARPNESS: (0, 0.01, 1, 1.99, 20),
    Operation.POSTERIZE: (1, 2, 4, 8),
    Operation.SOLARIZE: (0, 127.5, 255, 256),
    Operation.SOLARIZE_ADD: (0, 77, 128),
    Operation.INVERT: (0,),
    Operation.AUTO_CONTRAST: (0,),
    Operation.EQUALIZE: (0,),
}
CASES = [(operation, magnitude) for operation, magnitudes in MAGNITUDES.items() for magnitude in magnitudes]
# Allowed difference from Pillow in levels of 255; other operations must be equal. Pillow rounds intermediate values
# (luma, blurred image, scale of the histogram) where DALI keeps floats, and factors multiply this rounding error.
TOLERANCE = {
    Operation.SHEAR_X: 1, Operation.SHEAR_Y: 1, Operation.ROTATE: 1, Operation.COLOR: 1, Operation.CONTRAST: 1,
    Operation.BRIGHTNESS: 1, Operation.SHARPNESS: 1, Operation.AUTO_CONTRAST: 1, Operation.EQUALIZE: 1,
}  # fmt: skip
BLENDS = (Operation.COLOR, Operation.CONTRAST, Operation.SHARPNESS)
TRANSLATIONS = (Operation.TRANSLATE_X, Operation.TRANSLATE_Y)
FILL = 40


def pillow(image: Image.Image, operation: Operation, magnitude: float) -> np.ndarray:
    """Apply the operation with Pillow, as torchvision and timm do."""

    def affine(*matrix: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR,
                               fillcolor=3 * (FILL,))

    calls: dict[Operation, Callable[[], Image.Image]] = {
        Operation.IDENTITY: lambda: image,
        Operation.SHEAR_X: lambda: affine(1, magnitude, 0, 0, 1, 0),
        Operation.SHEAR_Y: lambda: affine(1, 0, 0, magnitude, 1, 0),
        Operation.TRANSLATE_X: lambda: affine(1, 0, -magnitude, 0, 1, 0),
        Operation.TRANSLATE_Y: lambda: affine(1, 0, 0, 0, 1, -magnitude),
        Operation.ROTATE: lambda: image.rotate(magnitude, Image.Resampling.BILINEAR, fillcolor=3 * (FILL,)),
        Operation.BRIGHTNESS: lambda: ImageEnhance.Brightness(image).enhance(magnitude),
        Operation.COLOR: lambda: ImageEnhance.Color(image).enhance(magnitude),
        Operation.CONTRAST: lambda: ImageEnhance.Contrast(image).enhance(magnitude),
        Operation.SHARPNESS: lambda: ImageEnhance.Sharpness(image).enhance(magnitude),
        Operation.POSTERIZE: lambda: ImageOps.posterize(image, int(magnitude)),
        Operation.SOLARIZE: lambda: ImageOps.solarize(image, magnitude),  # type: ignore[arg-type]  # torchvision's
        Operation.SOLARIZE_ADD: lambda: image.point([i + int(magnitude) * (i < 128) for i in range(256)] * 3),
        Operation.INVERT: lambda: ImageOps.invert(image),
        Operation.AUTO_CONTRAST: lambda: ImageOps.autocontrast(image),
        Operation.EQUALIZE: lambda: ImageOps.equalize(image),
    }
    return np.asarray(calls[operation]())


def pictures(kind: str, rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """One picture for each of CASES."""
    smooth = np.stack([np.asarray(smooth_image(rng, width, height)) for _ in CASES])
    return {
        "smooth": smooth,
        "noise": rng.integers(0, 256, smooth.shape, np.uint8),
        "narrow": smooth // 4 + 70,
        "grey": np.repeat(smooth[..., :1], 3, axis=3),
        "flat": np.full_like(smooth, 77),
        "one channel": smooth * np.array([0, 1, 0], np.uint8),
    }[kind]


def away_from_the_edge(operation: Operation, magnitude: float, height: int, width: int) -> np.ndarray:
    """Whether a pixel comes from at least half a pixel inside or outside the image's edge. At the edge, DALI mixes
    pixels with the fill (a soft edge), while Pillow has a hard edge."""
    place = numbers(np.array([operation]), np.array([magnitude]), height, width).place[0].astype(float)
    x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    source = np.einsum("ij,jhw->ihw", place, np.stack([x, y, np.ones_like(x)]))
    limits = np.array([width, height])[:, None, None]
    beyond = np.maximum(-source, source - limits)  # distance outside the image in each direction, in pixels
    return (beyond.max(0) > 0.5 + 1e-3) | (beyond.max(0) < -0.5 - 1e-3) | (magnitude == 0)


@pytest.mark.long(but=["32-32-smooth-*", "32-32-noise-kernels", "3-5-*-cpu"])
@pytest.mark.parametrize("device", ["cpu", "kernels", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["smooth", "noise", "narrow", "grey", "flat", "one channel"])
@pytest.mark.parametrize("height, width", [(224, 224), (61, 47), (32, 32), (3, 5)])
def test_against_pillow(kind, height, width, device, rng):
    images = pictures(kind, rng, height, width)
    got = operated(images, *zip(*CASES, strict=True), FILL, device)
    for image, result, (operation, magnitude) in zip(images, got, CASES, strict=True):
        wanted = pillow(Image.fromarray(image), operation, magnitude).astype(int)
        is_part_of_a_pixel = operation in TRANSLATIONS and magnitude % 1 > 0
        tolerance = TOLERANCE.get(operation, int(is_part_of_a_pixel))
        tolerance *= max(1, abs(1 - magnitude)) if operation in BLENDS else 1
        difference = np.abs(result - wanted).max(-1)
        if FAMILIES.get(operation) == "warp":
            inner = away_from_the_edge(operation, magnitude, height, width)
            assert inner.mean() > 1 - 4 / min(height, width), "the edge is no wider than a few pixels"
            difference = difference * inner
        assert difference.max() <= tolerance, (operation, magnitude)
        if operation is Operation.IDENTITY or (magnitude == 1 and operation in (*BLENDS, Operation.BRIGHTNESS)):
            np.testing.assert_array_equal(result, image)


def test_torchvision_calls_pillow_like_that(rng):
    torchvision = pytest.importorskip("torchvision.transforms")
    image = Image.fromarray(pictures("smooth", rng, 61, 47)[0])
    for operation, magnitude in CASES:
        name = "".join(word.capitalize() for word in operation.name.split("_"))
        shears = operation in (Operation.SHEAR_X, Operation.SHEAR_Y)
        if operation is Operation.SOLARIZE_ADD or (operation in TRANSLATIONS and magnitude % 1):
            continue  # timm's
        if shears and abs(magnitude) > 1:
            continue  # more than any policy's
        given = magnitude - 1 if operation in (*BLENDS, Operation.BRIGHTNESS) else magnitude
        bilinear = torchvision.InterpolationMode.BILINEAR
        theirs = torchvision.autoaugment._apply_op(image, name, given, bilinear, 3 * [FILL])
        difference = np.abs(np.asarray(theirs).astype(int) - pillow(image, operation, magnitude))
        assert difference.max() <= shears, operation  # theirs go through arctan and tan, which moves a rounding


def test_a_batch_of_one_operation_and_a_single_image(rng):
    """Some branches of the graph then get no image."""
    images = pictures("smooth", rng, 20, 30)[:3]
    for operation in (Operation.IDENTITY, Operation.EQUALIZE):
        got = operated(images, 3 * [operation], [0, 0, 0])
        np.testing.assert_array_equal(got[:1], operated(images[:1], [operation], [0]))
        for image, result in zip(images, got, strict=True):
            assert np.abs(result - pillow(Image.fromarray(image), operation, 0).astype(int)).max() <= 1
