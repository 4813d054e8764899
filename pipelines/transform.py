"""The options for transforming an image between its file and the network; imports nothing slow.

The options are declared once, for command lines, loaders and the DALI graph. To add an augmentation, add a field to
`Augmentation`, its limit to `LIMITS`, and its operator to pipelines/graph.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from common.command_line import REPEATABLE
from common.limits import FRACTION, PROBABILITY, Limit, between
from pipelines.errors import DataError

# Mean and standard deviation of ImageNet's training pixels, R, G, B, in units of 0 to 255 (the values of torchvision
# and of Gluon's model zoo).
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)
# This is far more than the pictures of a camera have, and 6.5 times the largest ImageNet image according to DALI's
# example (5,980 by 6,430 pixels; docs/examples/use_cases/pytorch/resnet50/main.py). An image with this number of pixels
# takes 0.75 GB of memory.
MAX_PIXELS = 250_000_000
MOST_OPERATIONS = 4  # RandAugment applies at most this many operations to an image


@dataclass(frozen=True, kw_only=True)  # kw_only, so that subclasses may add fields without a default
class SizeLimit:
    """Loader."""

    max_pixels: int = MAX_PIXELS
    """An image with more pixels (width times height in its header) counts as bad and is never decoded: a pixel takes
    three bytes of memory, and often several times that."""


@dataclass(frozen=True)
class Augmentation:
    """Images."""

    random_area: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest fraction of an image's area that a random training crop takes."""
    random_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width / height of a random training crop."""
    crop_padding: int = 0
    """Pad each side of a training image by this many pixels (of the stored image) in the mean colour, then crop to
    the stored size, instead of cropping a random area; 4 is usual for CIFAR-10. 0: off."""
    mirror: bool = True
    """Flip training images from left to right, each with probability 1/2."""
    cutout: float = 0.0
    """Fill a square at a random place of each training image with the mean colour; this is the square's side as a
    fraction of the image's side (arXiv:1708.04552: 0.25 to 0.5 for CIFAR-10). 0: off."""
    brightness: float = 0.0
    """Multiply each training image's pixels by a random number from 1 - BRIGHTNESS to 1 + BRIGHTNESS (0.4 is usual for
    photographs); 0: off."""
    contrast: float = 0.0
    """Scale each training image's contrast (its distance from the mean grey) by a random number from 1 - CONTRAST to
    1 + CONTRAST; 0: off."""
    saturation: float = 0.0
    """Scale each training image's saturation (its distance from the grey of equal brightness) by a random number from
    1 - SATURATION to 1 + SATURATION; 0: off."""
    hue: float = 0.0
    """Rotate each training image's colours by up to this fraction of the colour circle, at most 0.5; 0: off."""
    grey: float = 0.0
    """Make a training image grey with this probability (0.2 is usual)."""
    blur: float = 0.0
    """Blur a training image with this probability, by a Gaussian of a random standard deviation, 0.1 to 2 pixels."""
    solarise: float = 0.0
    """Invert a training image's pixels from 128 on with this probability."""
    auto_augment: Literal["none", "trivialaugment", "randaugment", "randaugment-timm", "autoaugment"] = "none"
    """Change each training image by random operations (shear, rotate, equalize, ...): one of random strength
    (trivialaugment, arXiv:2103.10158), several of equal strength (randaugment, arXiv:1909.13719, or
    randaugment-timm), or one of the pairs found for ImageNet (autoaugment, arXiv:1805.09501)."""
    randaugment_operations: int = 2
    """How many operations RandAugment applies to an image."""
    randaugment_magnitude: float = 9.0
    """Strength of RandAugment's operations, from 0 to 30; with randaugment-timm from 0 to 10."""
    randaugment_magnitude_std: float = 0.0
    """For randaugment-timm: draw each operation's strength from a normal distribution with this standard deviation."""
    random_erasing: float = 0.0
    """Fill a random rectangle, 2 to 33 % of a training image, with the mean colour, with this probability
    (arXiv:1708.04896; 0.1 to 0.25 is usual); 0: off."""
    augment: Annotated[tuple[str, ...], "NAME", REPEATABLE] = ()
    """Change training images by a plug-in's augmentation (--plugin, docs/extending.md), after the crop and before the
    other augmentations. If repeated, the augmentations are applied in the order given."""
    train_interpolation: Literal["same", "bilinear", "bicubic", "random"] = "same"
    """How training images are resized: same as validation images, or random: either of the two for each image."""


@dataclass(frozen=True)
class CentreCrop:
    """Images."""

    val_crop_fraction: float = 0.875
    """Fraction of an image's shorter side that the centre crop of validation and prediction takes (224 of 256 pixels).
    """


@dataclass(frozen=True)
class Normalisation:
    """Images."""

    mean: tuple[float, float, float] = MEAN
    """Red, green and blue, from 0 to 255, that are subtracted from each pixel: ImageNet's mean by default, and with
    trained weights the mean that they were trained with."""
    std: tuple[float, float, float] = STD
    """Red, green and blue that each pixel is then divided by, with defaults as for --mean."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How images are resized; the default with trained weights is the way that they were trained with."""


@dataclass(frozen=True)
class ImageTransform(Normalisation, CentreCrop, Augmentation):
    """All transforms of images, in training and in validation."""

    @property
    def changes_colours(self) -> bool:
        """Whether a colour matrix may change training images."""
        return any((self.brightness, self.contrast, self.saturation, self.hue, self.grey))

    @property
    def mean_colour(self) -> tuple[int, ...]:
        """`mean` as a pixel value: whole numbers from 0 to 255."""
        return tuple(min(max(round(value), 0), 255) for value in self.mean)

    def check(self) -> None:
        """Raise DataError for an invalid value."""
        for name, (is_good, words) in LIMITS.items():
            if not is_good(value := getattr(self, name)):
                shown = " ".join(f"{each:g}" for each in (value if isinstance(value, tuple) else (value,)))
                raise DataError(f"{name} is {shown}; it must be {words}")
        if self.auto_augment == "randaugment-timm" and self.randaugment_magnitude > 10:
            raise DataError(f"--randaugment-magnitude {self.randaugment_magnitude:g} is too large for "
                            "--auto-augment randaugment-timm, whose scale ends at 10: give 0 to 10, or --auto-augment "
                            "randaugment, whose scale ends at 30")


# option -> the values of `auto_augment` with which it has an effect
OF_POLICIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("randaugment_operations", "randaugment_magnitude"), ("randaugment", "randaugment-timm")),
    "randaugment_magnitude_std": ("randaugment-timm",),
}

MOST_PADDING = 256  # most pixels of padding; with more, most of a crop would be padding

LIMITS: dict[str, Limit] = {
    "random_area": (lambda value: 0.001 <= value[0] <= value[1] <= 1, "two fractions from 0.001 on, the smaller first"),
    "random_ratio": (
        lambda value: 0.01 <= value[0] <= value[1] <= 100, "two numbers from 0.01 to 100, the smaller first"
    ),
    "crop_padding": between(0, MOST_PADDING),
    **dict.fromkeys(("cutout", "brightness", "contrast", "saturation"), FRACTION),
    "hue": (lambda value: 0 <= value <= 0.5, "from 0 to 0.5, half of the colour circle"),
    **dict.fromkeys(("grey", "blur", "solarise", "random_erasing"), PROBABILITY),
    "randaugment_operations": between(1, MOST_OPERATIONS),
    "randaugment_magnitude": between(0, 30),
    "randaugment_magnitude_std": (lambda value: 0 <= value < math.inf, "0 or more"),
    "mean": (lambda value: all(0 <= number <= 255 for number in value), "three numbers from 0 to 255"),
    "std": (lambda value: all(0.1 <= number <= 1000 for number in value), "three numbers from 0.1 to 1000"),
    "val_crop_fraction": between(0.1, 1),
}
