"""The operations of TrivialAugment, RandAugment and AutoAugment, each image with its own operation and magnitude, which
come from outside (policies.py chooses them): the numbers that they come down to, and what DALI does with these on the
CPU. On GPUs they go to kernels of our own (augment.py).

What an operation does is what Pillow does (ImageOps, ImageEnhance, Image.transform), which the policies were found with
and which torchvision and timm call. Magnitudes are Pillow's, too: an angle, a factor, a threshold.

Operations of one family are one computation whose numbers differ from image to image: every warp is an affine map,
brightness, colour and grey are a matrix on the three channels, posterize, solarise and invert a few bits. For DALI the
batch is split by family (seven splits for fifteen operations), each operator sees its own images only, and nobody
touches those that stay as they are: for TrivialAugment 13 of 14 images are touched, most of them once.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, auto
from typing import Any, NamedTuple

import numpy as np
import nvidia.dali.math as dali_math
from nvidia import dali

# DALI makes its operators when it is imported, so type checkers do not know them.
fn: Any = dali.fn
types: Any = dali.types

LUMA = np.array((0.299, 0.587, 0.114), np.float32)  # of R, G, B: ITU-R BT.601, as Pillow's "L"
YIQ = np.array([LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)])  # from R, G, B: NTSC, FCC 1953
RGB = np.linalg.inv(YIQ)
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


FAMILIES = {
    Operation.SHEAR_X: "warp",
    Operation.SHEAR_Y: "warp",
    Operation.TRANSLATE_X: "warp",
    Operation.TRANSLATE_Y: "warp",
    Operation.ROTATE: "warp",
    Operation.BRIGHTNESS: "matrix",
    Operation.COLOR: "matrix",
    Operation.CONTRAST: "contrast",
    Operation.SHARPNESS: "sharpness",
    Operation.POSTERIZE: "bits",
    Operation.SOLARIZE: "bits",
    Operation.SOLARIZE_ADD: "bits",
    Operation.INVERT: "bits",
    Operation.AUTO_CONTRAST: "auto_contrast",
    Operation.EQUALIZE: "equalize",
}


# For each family whether an operation, by its number, is of it.
_OF_FAMILY = {
    name: np.array([FAMILIES.get(each) == name for each in Operation]) for name in dict.fromkeys(FAMILIES.values())
}


class Numbers(NamedTuple):
    """What the graph reads for one operation on each of N images."""

    # (N,) bool, whether the image's operation is of that family:
    warp: Any
    matrix: Any
    bits: Any
    contrast: Any
    auto_contrast: Any
    sharpness: Any
    equalize: Any
    # The families' numbers:
    place: Any  # warp: (N, 2, 3) float32, from a place (x, y, 1) in the output to that in the input, in pixels
    colour: Any  # matrix: (N, 3, 4) float32, from a colour (R, G, B, 1) to another
    factor: Any  # contrast and sharpness: (N,) float32
    kernel: Any  # sharpness: (N, 3, 3) float32, what is added to the image, which follows from the factor
    threshold: Any  # bits: (N,) int32, pixels from here on are inverted; 256: none
    mask: Any  # bits: (N,) uint8, those that are kept
    lift: Any  # bits: (N,) uint8, added to pixels below 128


def numbers(operation: np.ndarray, magnitude: np.ndarray, height: int, width: int) -> Numbers:
    """The numbers of one operation (N,) with its magnitude (N,) for each of N images of `height` x `width` pixels."""
    count, magnitude = len(operation), np.asarray(magnitude, np.float64)

    def of(wanted: Operation, otherwise: float = 0.0) -> np.ndarray:
        return np.where(operation == wanted, magnitude, otherwise)

    angle = np.deg2rad(of(Operation.ROTATE))
    place = np.zeros((count, 2, 3))
    place[:, 0, 0] = place[:, 1, 1] = np.cos(angle)
    place[:, 0, 1] = of(Operation.SHEAR_X) - np.sin(angle)
    place[:, 1, 0] = of(Operation.SHEAR_Y) + np.sin(angle)
    # Pillow turns about the centre, and shears from the upper left corner.
    x, y = width / 2, height / 2
    place[:, 0, 2] = (1 - np.cos(angle)) * x + np.sin(angle) * y - of(Operation.TRANSLATE_X)
    place[:, 1, 2] = (1 - np.cos(angle)) * y - np.sin(angle) * x - of(Operation.TRANSLATE_Y)

    matrix = brightness_matrix(of(Operation.BRIGHTNESS, otherwise=1)) @ saturation_matrix(
        of(Operation.COLOR, otherwise=1)
    )
    sharpness = of(Operation.SHARPNESS, otherwise=1)
    kernel = (1 - sharpness)[:, None, None] * BLURRED_LESS_IMAGE
    threshold = np.where(operation == Operation.INVERT, 0, np.ceil(of(Operation.SOLARIZE, otherwise=256)))
    return Numbers(
        **{name: of_family[operation] for name, of_family in _OF_FAMILY.items()},
        place=place.astype(np.float32),
        colour=np.concatenate([matrix, np.full((count, 3, 1), -CUT)], axis=2).astype(np.float32),
        factor=(sharpness * of(Operation.CONTRAST, otherwise=1)).astype(np.float32),
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


def hue_matrix(degrees: np.ndarray) -> np.ndarray:
    """(N, 3, 3), of N angles by which colours turn about the grey axis, from red to green, and keep their luma.

    In YIQ, as DALI's `hue` does it. torchvision turns the hexagon of HSV, which is no matrix and moves the luma.
    """
    angle = np.deg2rad(degrees)
    turn = np.zeros((len(angle), 3, 3))
    turn[:, 0, 0] = 1
    turn[:, 1, 1] = turn[:, 2, 2] = np.cos(angle)
    turn[:, 1, 2], turn[:, 2, 1] = -np.sin(angle), np.sin(angle)
    return RGB @ turn @ YIQ


def colour_numbers(
    brightness: np.ndarray, contrast: np.ndarray, saturation: np.ndarray, hue: np.ndarray, is_grey: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Matrices (N, 3, 4) and parts (N,) of the mean grey that are added, for N images.

    They are brightness, contrast, saturation, hue (in degrees) and grey, one after the other, without the limits of a
    byte between them.
    """
    linear = hue_matrix(hue) @ saturation_matrix(saturation) @ brightness_matrix(brightness * contrast)
    linear = saturation_matrix(1.0 - is_grey) @ linear
    matrix = np.concatenate([linear, np.zeros((len(linear), 3, 1))], axis=2).astype(np.float32)
    return matrix, (brightness * (1 - contrast)).astype(np.float32)


def applied(images: Any, these: Numbers, used: frozenset[str], fill: float, size: Any) -> Any:
    """In a DALI graph on the CPU: the images (uint8, HWC, of equal size), each after its operation.

    `used` are the families that occur; others get no branch. `fill` is the grey (0 to 255) of what a warp brings in
    from outside the image, and `size` (N, 2) its height and width, both at least 3.
    """

    def warp(image: Any, place: Any) -> Any:
        return fn.warp_affine(image, matrix=place, fill_value=fill, interp_type=types.INTERP_LINEAR)

    def matrix(image: Any, colour: Any) -> Any:
        return fn.coord_transform(image, MT=colour, dtype=types.UINT8)

    def bits(image: Any, threshold: Any, mask: Any, lift: Any) -> Any:
        lifted = image + lift * (image < types.Constant(128, dtype=types.UINT8))
        return (lifted ^ (_white() * (image >= threshold))) & mask

    def contrast(image: Any, factor: Any) -> Any:
        return _cut(image * factor + dali_math.floor(mean_grey(image) + 0.5) * (1.0 - factor))

    def sharpness(image: Any, kernel: Any, size: Any) -> Any:
        change = fn.filter(image, kernel, mode="valid", dtype=types.FLOAT)
        # Pillow leaves the outermost pixels as they are.
        whole = {"start": (-1, -1), "shape": fn.cast(size, dtype=types.INT32), "axis_names": "HW"}
        return _cut(image + fn.slice(change, **whole, out_of_bounds_policy="pad"))

    for family, branch, values in (
        ("warp", warp, (these.place,)),
        ("matrix", matrix, (these.colour,)),
        ("bits", bits, (these.threshold, these.mask, these.lift)),
        ("contrast", contrast, (these.factor,)),
        ("auto_contrast", _auto_contrast, ()),
        ("sharpness", sharpness, (these.kernel, size)),
        ("equalize", _equalized, ()),
    ):
        if family in used:
            images = on_those(getattr(these, family), branch, images, *values)
    return images


def on_those(chosen: Any, change: Callable[..., Any], images: Any, *values: Any) -> Any:
    """The images, after `change` those for which `chosen` (N,) bool holds, which gets their part of the values.

    The others are not touched, or even copied. (These are the operators of DALI's `if`, without its translation of the
    source code around it, which takes seconds at each start.)
    """
    mine, others = fn._conditional.split(images, predicate=chosen)
    mine = change(mine, *(fn._conditional.split(value, predicate=chosen)[0] for value in values))
    return fn._conditional.merge(mine, others, predicate=chosen)


def mean_grey(image: Any) -> Any:
    """The mean luma of each image (1, 1, 1)."""
    return fn.coord_transform(fn.reductions.mean(image, axis_names="HW", keep_dims=True), M=LUMA.tolist())


def solarised(image: Any) -> Any:
    """Pillow's ImageOps.solarize: pixels from 128 on inverted."""
    return image ^ (_white() * (image >= types.Constant(128, dtype=types.UINT8)))


def _white() -> Any:
    return types.Constant(255, dtype=types.UINT8)


def _cut(image: Any) -> Any:
    """As bytes, with the fraction cut off, as Pillow does it."""
    return fn.cast(image - CUT, dtype=types.UINT8)


def _auto_contrast(image: Any) -> Any:
    """Pillow's ImageOps.autocontrast: each channel from 0 to 255; one of a single value stays as it is."""
    low = fn.reductions.min(image, axis_names="HW", keep_dims=True)
    high = fn.reductions.max(image, axis_names="HW", keep_dims=True)
    spread = fn.cast(high > low, dtype=types.FLOAT)
    scale = 1.0 - spread + spread * 255.0 / dali_math.max(high * 1.0 - low, 1.0)
    return _cut((image - spread * low) * scale)


def _equalized(image: Any) -> Any:
    """Pillow's ImageOps.equalize.

    Pillow maps a pixel by the number of darker ones, DALI (as OpenCV) by that of the pixels up to its own value. So the
    inverted image becomes 255 less Pillow's, but for the scale: Pillow's is a whole number of pixels for each level.
    """
    exact = _white() - fn.equalize(_white() - image)
    below = image < fn.reductions.max(image, axis_names="HW", keep_dims=True)
    counted = fn.reductions.sum(fn.cast(below, dtype=types.FLOAT), axis_names="HW", keep_dims=True)
    step = dali_math.floor(counted / 255.0)
    usable = fn.cast(step > 0.0, dtype=types.FLOAT)  # of fewer pixels Pillow leaves the image alone
    scaled = exact * (counted / (255.0 * dali_math.max(step, 1.0)))
    return fn.cast(usable * scaled + (1.0 - usable) * image, dtype=types.UINT8)
