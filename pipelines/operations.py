"""The operations of TrivialAugment, RandAugment and AutoAugment: their numbers, and their DALI graph on the CPU.

policies.py chooses an operation and a magnitude for each image. This module computes Numbers from both, and applies the
Numbers to a batch with DALI on the CPU. On GPUs, our own kernels apply the Numbers (augment.py).

Each operation gives the result of Pillow's operation (ImageOps, ImageEnhance, Image.transform), because the policies
were found with Pillow, and torchvision and timm call Pillow. Magnitudes are Pillow's, too: an angle, a factor, a
threshold.

The operations of one family are one computation whose numbers differ from image to image. Every warp is an affine map;
brightness, colour and grey are a matrix on the three channels; posterize, solarise and invert change a few bits. DALI
splits the batch by family (seven splits for fifteen operations), so each operator processes only the images of its
family, and no other image is touched. With TrivialAugment, 13 of 14 images are touched, most of them once.
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

LUMA = np.array((0.299, 0.587, 0.114), np.float32)  # weights of R, G, B: ITU-R BT.601, as Pillow's "L"
YIQ = np.array([LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)])  # from R, G, B: NTSC, FCC 1953
RGB = np.linalg.inv(YIQ)
# Pillow truncates where DALI rounds, so this number is subtracted before rounding. It is just below 0.5, so that whole
# numbers stay unchanged.
CUT = 0.498
# Pillow's ImageFilter.SMOOTH, less the image itself.
BLURRED_LESS_IMAGE = np.array([[1, 1, 1], [1, 5 - 13, 1], [1, 1, 1]], np.float32) / 13


class Operation(IntEnum):
    """An operation on an image; the comment gives the meaning of its magnitude."""

    IDENTITY = 0
    SHEAR_X = auto()  # pixels to the left for each pixel from the top
    SHEAR_Y = auto()  # pixels to the top for each pixel from the left
    TRANSLATE_X = auto()  # pixels to the right
    TRANSLATE_Y = auto()  # pixels down
    ROTATE = auto()  # degrees, anticlockwise about the centre
    BRIGHTNESS = auto()  # factor; 0 is black
    COLOR = auto()  # factor; 0 is grey
    CONTRAST = auto()  # factor; 0 is the mean grey
    SHARPNESS = auto()  # factor; 0 is slightly blurred
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


# family -> bool by operation number: whether the operation belongs to the family
_OF_FAMILY = {
    name: np.array([FAMILIES.get(each) == name for each in Operation]) for name in dict.fromkeys(FAMILIES.values())
}


class Numbers(NamedTuple):
    """The graph's inputs for one operation on each of N images."""

    # (N,) bool, whether the image's operation belongs to the family:
    warp: Any
    matrix: Any
    bits: Any
    contrast: Any
    auto_contrast: Any
    sharpness: Any
    equalize: Any
    # The families' numbers:
    place: Any  # warp: (N, 2, 3) float32, maps a position (x, y, 1) in the output to a position in the input, in pixels
    colour: Any  # matrix: (N, 3, 4) float32, maps a colour (R, G, B, 1) to the new colour
    factor: Any  # contrast and sharpness: (N,) float32
    kernel: Any  # sharpness: (N, 3, 3) float32, filter whose output is added to the image; follows from the factor
    threshold: Any  # bits: (N,) int32, values from here on are inverted; 256: none
    mask: Any  # bits: (N,) uint8, the bits that are kept
    lift: Any  # bits: (N,) uint8, added to values below 128


def numbers(operation: np.ndarray, magnitude: np.ndarray, height: int, width: int) -> Numbers:
    """Compute the Numbers of one operation for each of N images of `height` x `width` pixels.

    `operation` (N,) and `magnitude` (N,) are the operation and the magnitude of each image.
    """
    count, magnitude = len(operation), np.asarray(magnitude, np.float64)

    def of(wanted: Operation, otherwise: float = 0.0) -> np.ndarray:
        return np.where(operation == wanted, magnitude, otherwise)

    angle = np.deg2rad(of(Operation.ROTATE))
    place = np.zeros((count, 2, 3))
    place[:, 0, 0] = place[:, 1, 1] = np.cos(angle)
    place[:, 0, 1] = of(Operation.SHEAR_X) - np.sin(angle)
    place[:, 1, 0] = of(Operation.SHEAR_Y) + np.sin(angle)
    # Pillow rotates about the centre, and shears from the upper left corner.
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
    """Matrices (N, 3, 3) that multiply a colour by N factors."""
    return factor[:, None, None] * np.eye(3)


def saturation_matrix(factor: np.ndarray) -> np.ndarray:
    """Matrices (N, 3, 3) for N saturation factors: 0 gives the grey of equal luma, 1 changes nothing."""
    return factor[:, None, None] * np.eye(3) + (1 - factor)[:, None, None] * LUMA


def hue_matrix(degrees: np.ndarray) -> np.ndarray:
    """Matrices (N, 3, 3) that rotate colours by N angles about the grey axis, from red to green, and keep their luma.

    The rotation is in YIQ, as in DALI's `hue`. torchvision rotates in HSV, which is not linear and changes the luma.
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
    """Matrices (N, 3, 4) for N images, and the fractions (N,) of an image's mean grey to add.

    They apply brightness, contrast, saturation, hue (in degrees) and grey in this order, without clipping to a byte in
    between.
    """
    linear = hue_matrix(hue) @ saturation_matrix(saturation) @ brightness_matrix(brightness * contrast)
    linear = saturation_matrix(1.0 - is_grey) @ linear
    matrix = np.concatenate([linear, np.zeros((len(linear), 3, 1))], axis=2).astype(np.float32)
    return matrix, (brightness * (1 - contrast)).astype(np.float32)


def applied(images: Any, these: Numbers, used: frozenset[str], fill: float, size: Any) -> Any:
    """In a DALI graph on the CPU, apply to each image (uint8, HWC, all of one size) its operation.

    `used` holds the families that occur; the graph has no branch for other families. `fill` is the grey level (0 to
    255) for positions at which a warp reads outside the image. `size` (N, 2) holds the images' height and width, both
    at least 3.
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
        # Pillow does not change the outermost pixels.
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
    """Apply `change` to the images where `chosen` (N,) bool is true; it also gets the values of these images.

    Other images are neither touched nor copied. The function uses the operators behind DALI's `if`. Using them directly
    avoids DALI's translation of the surrounding source code, which takes seconds at each start.
    """
    mine, others = fn._conditional.split(images, predicate=chosen)
    mine = change(mine, *(fn._conditional.split(value, predicate=chosen)[0] for value in values))
    return fn._conditional.merge(mine, others, predicate=chosen)


def mean_grey(image: Any) -> Any:
    """The mean luma of each image, (1, 1, 1)."""
    return fn.coord_transform(fn.reductions.mean(image, axis_names="HW", keep_dims=True), M=LUMA.tolist())


def solarised(image: Any) -> Any:
    """Pillow's ImageOps.solarize: inverts values from 128 on."""
    return image ^ (_white() * (image >= types.Constant(128, dtype=types.UINT8)))


def _white() -> Any:
    return types.Constant(255, dtype=types.UINT8)


def _cut(image: Any) -> Any:
    """Truncate to bytes, as Pillow does."""
    return fn.cast(image - CUT, dtype=types.UINT8)


def _auto_contrast(image: Any) -> Any:
    """Pillow's ImageOps.autocontrast: stretches each channel to 0 to 255; a channel of a single value does not change.
    """
    low = fn.reductions.min(image, axis_names="HW", keep_dims=True)
    high = fn.reductions.max(image, axis_names="HW", keep_dims=True)
    spread = fn.cast(high > low, dtype=types.FLOAT)
    scale = 1.0 - spread + spread * 255.0 / dali_math.max(high * 1.0 - low, 1.0)
    return _cut((image - spread * low) * scale)


def _equalized(image: Any) -> Any:
    """Pillow's ImageOps.equalize.

    Pillow maps a pixel by the number of darker pixels; DALI, like OpenCV, maps it by the number of pixels up to its own
    value. So DALI's result on the inverted image is 255 minus Pillow's result, except for the scale: Pillow rounds the
    number of pixels per level down to a whole number.
    """
    exact = _white() - fn.equalize(_white() - image)
    below = image < fn.reductions.max(image, axis_names="HW", keep_dims=True)
    counted = fn.reductions.sum(fn.cast(below, dtype=types.FLOAT), axis_names="HW", keep_dims=True)
    step = dali_math.floor(counted / 255.0)
    usable = fn.cast(step > 0.0, dtype=types.FLOAT)  # with fewer pixels, Pillow does not change the image
    scaled = exact * (counted / (255.0 * dali_math.max(step, 1.0)))
    return fn.cast(usable * scaled + (1.0 - usable) * image, dtype=types.UINT8)
