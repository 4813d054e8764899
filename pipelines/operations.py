"""The operations of TrivialAugment, RandAugment and AutoAugment on batches in the DALI graph, each image with its own
operation and magnitude, which come from outside (policies.py chooses them).

What an operation does is what Pillow does (ImageOps, ImageEnhance, Image.transform), which the policies were found with
and which torchvision and timm call. Magnitudes are Pillow's, too: an angle, a factor, a threshold.

Operations of one family are one DALI operator whose numbers differ from image to image: every warp is an affine map,
brightness, colour and grey are a matrix on the three channels, posterize, solarise and invert a few bits. The batch is
split by family (seven splits for fifteen operations), each operator sees its own images only, and nobody touches
those that stay as they are. So a batch costs about 35 small launches, and less than two passes over its pixels.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Any, NamedTuple

import numpy as np
import nvidia.dali.math as dali_math
from nvidia import dali

# DALI makes its operators when it is imported, so type checkers do not know them.
fn: Any = dali.fn
types: Any = dali.types

LUMA = np.array((0.299, 0.587, 0.114), np.float32)  # of R, G, B: ITU-R BT.601, as Pillow's "L"
# Pillow cuts the fraction off where DALI rounds. Less than a half, so that what is whole stays so.
CUT = 0.498
# Pillow's ImageFilter.SMOOTH, less the image itself.
BLURRED_LESS_IMAGE = np.array([[1, 1, 1], [1, 5 - 13, 1], [1, 1, 1]], np.float32) / 13


class Operation(IntEnum):
    """What can be done to an image; its magnitude."""

    IDENTITY = 0
    SHEAR_X = auto()  # pixels to the left for each pixel from the top
    SHEAR_Y = auto()  # pixels to the top for each pixel from the left
    TRANSLATE_X = auto()  # pixels to the right
    TRANSLATE_Y = auto()  # pixels down
    ROTATE = auto()  # degrees, anticlockwise about the centre
    BRIGHTNESS = auto()  # factor; 0 is black
    COLOR = auto()  # factor; 0 is grey
    CONTRAST = auto()  # factor; 0 is the mean grey
    SHARPNESS = auto()  # factor; 0 is a little blurred
    POSTERIZE = auto()  # bits that are kept, 0 to 8
    SOLARIZE = auto()  # pixels from here on are inverted
    SOLARIZE_ADD = auto()  # added to pixels below 128, 0 to 128
    INVERT = auto()
    AUTO_CONTRAST = auto()
    EQUALIZE = auto()


class Family(IntEnum):
    """One branch of the graph."""

    NONE = 0
    WARP = auto()
    MATRIX = auto()
    BITS = auto()
    CONTRAST = auto()
    AUTO_CONTRAST = auto()
    SHARPNESS = auto()
    EQUALIZE = auto()


FAMILIES = {
    Operation.IDENTITY: Family.NONE,
    Operation.SHEAR_X: Family.WARP,
    Operation.SHEAR_Y: Family.WARP,
    Operation.TRANSLATE_X: Family.WARP,
    Operation.TRANSLATE_Y: Family.WARP,
    Operation.ROTATE: Family.WARP,
    Operation.BRIGHTNESS: Family.MATRIX,
    Operation.COLOR: Family.MATRIX,
    Operation.CONTRAST: Family.CONTRAST,
    Operation.SHARPNESS: Family.SHARPNESS,
    Operation.POSTERIZE: Family.BITS,
    Operation.SOLARIZE: Family.BITS,
    Operation.SOLARIZE_ADD: Family.BITS,
    Operation.INVERT: Family.BITS,
    Operation.AUTO_CONTRAST: Family.AUTO_CONTRAST,
    Operation.EQUALIZE: Family.EQUALIZE,
}


class Numbers(NamedTuple):
    """What the graph reads for one operation on each of N images."""

    family: Any  # (N,) int32, Family
    warp: Any  # (N, 2, 3) float32, from a place (x, y, 1) in the output to that in the input, in pixels
    matrix: Any  # (N, 3, 4) float32, from a colour (R, G, B, 1) to another
    factor: Any  # (N,) float32, of contrast
    kernel: Any  # (N, 3, 3) float32, what sharpness adds to the image
    threshold: Any  # (N,) int32, pixels from here on are inverted; 256: none
    mask: Any  # (N,) uint8, the bits that are kept
    lift: Any  # (N,) uint8, added to pixels below 128


def numbers(operation: np.ndarray, magnitude: np.ndarray, height: int, width: int) -> Numbers:
    """The numbers of one operation (N,) with its magnitude (N,) for each of N images of `height` x `width` pixels."""
    count, magnitude = len(operation), np.asarray(magnitude, np.float64)

    def of(*wanted: Operation, otherwise: float = 0.0) -> np.ndarray:
        return np.where(np.isin(operation, wanted), magnitude, otherwise)

    angle = np.deg2rad(of(Operation.ROTATE))
    warp = np.zeros((count, 2, 3))
    warp[:, 0, 0] = warp[:, 1, 1] = np.cos(angle)
    warp[:, 0, 1] = of(Operation.SHEAR_X) - np.sin(angle)
    warp[:, 1, 0] = of(Operation.SHEAR_Y) + np.sin(angle)
    # Pillow turns about the centre, and shears from the upper left corner.
    x, y = width / 2, height / 2
    warp[:, 0, 2] = (1 - np.cos(angle)) * x + np.sin(angle) * y - of(Operation.TRANSLATE_X)
    warp[:, 1, 2] = (1 - np.cos(angle)) * y - np.sin(angle) * x - of(Operation.TRANSLATE_Y)

    matrix = brightness_matrix(of(Operation.BRIGHTNESS, otherwise=1)) @ saturation_matrix(
        of(Operation.COLOR, otherwise=1)
    )
    kernel = (1 - of(Operation.SHARPNESS, otherwise=1))[:, None, None] * BLURRED_LESS_IMAGE
    threshold = np.where(operation == Operation.INVERT, 0, np.ceil(of(Operation.SOLARIZE, otherwise=256)))
    return Numbers(
        family=np.array(list(FAMILIES.values()), np.int32)[operation],
        warp=warp.astype(np.float32),
        matrix=np.concatenate([matrix, np.full((count, 3, 1), -CUT)], axis=2).astype(np.float32),
        factor=of(Operation.CONTRAST, otherwise=1).astype(np.float32),
        kernel=kernel.astype(np.float32),
        threshold=threshold.astype(np.int32),
        mask=(256 - 2 ** (8 - of(Operation.POSTERIZE, otherwise=8))).astype(np.uint8),
        lift=of(Operation.SOLARIZE_ADD).astype(np.uint8),
    )


def brightness_matrix(factor: np.ndarray) -> np.ndarray:
    """(N, 3, 3), of N factors."""
    return factor[:, None, None] * np.eye(3)


def saturation_matrix(factor: np.ndarray) -> np.ndarray:
    """(N, 3, 3), of N factors: 0 is grey of equal luma, 1 changes nothing."""
    return factor[:, None, None] * np.eye(3) + (1 - factor)[:, None, None] * LUMA


def applied(image: Any, these: Numbers, used: frozenset[Family], fill: float, size: Any, device: str) -> Any:
    """In a DALI graph with conditionals: the images (uint8, HWC, of equal size), each after its operation.

    `used` are the families that occur; others get no branch. `fill` is the grey (0 to 255) of what a warp brings in
    from outside the image, and `size` (N, 2) its height and width, both at least 3.
    """

    def on_device(number: Any) -> Any:
        return number.gpu() if device == "gpu" else number

    def warp() -> Any:
        return fn.warp_affine(image, matrix=these.warp, fill_value=fill, interp_type=types.INTERP_LINEAR)

    def matrix() -> Any:
        return fn.coord_transform(image, MT=these.matrix, dtype=types.UINT8)

    def bits() -> Any:
        lifted = image + on_device(these.lift) * (image < types.Constant(128, dtype=types.UINT8))
        inverted = lifted ^ (types.Constant(255, dtype=types.UINT8) * (image >= on_device(these.threshold)))
        return inverted & on_device(these.mask)

    def contrast() -> Any:
        factor = on_device(these.factor)
        return _cut(image * factor + dali_math.floor(mean_grey(image) + 0.5) * (1.0 - factor))

    def auto_contrast() -> Any:
        low, high = (reduce(image, axis_names="HW", keep_dims=True) for reduce in
                     (fn.reductions.min, fn.reductions.max))
        flat = fn.cast(high <= low, dtype=types.FLOAT)  # a channel of one value stays as it is
        scale = flat + (1.0 - flat) * 255.0 / dali_math.max(fn.cast(high, dtype=types.FLOAT) - low, 1.0)
        return _cut((image - (1.0 - flat) * low) * scale)

    def sharpness() -> Any:
        change = fn.filter(image, on_device(these.kernel), mode="valid", dtype=types.FLOAT)
        # Pillow leaves the outermost pixels as they are.
        whole = {"start": (-1, -1), "shape": fn.cast(size, dtype=types.INT32), "axis_names": "HW"}
        change = fn.slice(change, **whole, out_of_bounds_policy="pad")
        return _cut(image + change)

    def equalize() -> Any:
        return _equalized(image)

    branches = [
        (family, branch)
        for family, branch in (
            (Family.WARP, warp),
            (Family.MATRIX, matrix),
            (Family.BITS, bits),
            (Family.CONTRAST, contrast),
            (Family.AUTO_CONTRAST, auto_contrast),
            (Family.SHARPNESS, sharpness),
            (Family.EQUALIZE, equalize),
        )
        if family in used
    ]
    return _chosen(image, these.family, branches)


def _chosen(image: Any, family: Any, branches: list[tuple[Family, Any]]) -> Any:
    """The images, each after the branch of its family, if that is among these."""
    if not branches:
        return image
    (mine, branch), *others = branches
    if family == int(mine):
        result = branch()
    else:
        result = _chosen(image, family, others)
    return result


def mean_grey(image: Any) -> Any:
    """The mean luma of each image (1, 1, 1), on its device."""
    mean = fn.reductions.mean(image, axis_names="HW", keep_dims=True)
    return fn.reductions.sum(mean * types.Constant(LUMA[None, None], device=image.device), axis_names="C",
                             keep_dims=True)


def _cut(image: Any) -> Any:
    """As bytes, with the fraction cut off, as Pillow does it."""
    return fn.cast(image - CUT, dtype=types.UINT8)


def _equalized(image: Any) -> Any:
    """Pillow's ImageOps.equalize.

    Pillow maps a pixel by the number of darker ones, DALI (as OpenCV) by that of the pixels up to its own value. That of
    the inverted image is 255 less Pillow's, but for the scale: Pillow's is a whole number of pixels for each level.
    """
    white = types.Constant(255, dtype=types.UINT8)
    exact = white - fn.equalize(white - image)
    ones = fn.cast(image == fn.reductions.max(image, axis_names="HW", keep_dims=True), dtype=types.FLOAT)
    counted = fn.reductions.sum(1.0 - ones, axis_names="HW", keep_dims=True)  # pixels below the brightest value
    step = dali_math.floor(counted / 255.0)
    # Where there are too few, Pillow leaves the image alone.
    usable = fn.cast(step > 0, dtype=types.FLOAT)
    scaled = exact * (counted / (255.0 * dali_math.max(step, 1.0))) * usable + image * (1.0 - usable)
    return fn.cast(scaled, dtype=types.UINT8)
