"""Options of the data: where the images are, what is done to them, and the loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.limits import AT_LEAST_1, BELOW_1, FRACTION, Limit, between
from pipelines import transform
from pipelines.options import MAX_CLASSES, SAMPLES, FirstLabel, GroupBy, Labels
from pipelines.transform import Augmentation, CentreCrop, Normalisation, SizeLimit

SYNTHETIC = "synthetic"  # value of `data` for generated images
MAX_THREADS = 1024  # of a loader; a process cannot have any number of them
MIN_IMAGE_SIZE = 32  # pixels; the network halves the image five times
MAX_IMAGE_SIZE = 8192  # pixels; one image of that in float32 is 0.8 GB


@dataclass(frozen=True)
class DataOptions:
    """Data."""

    data: Annotated[str, "PATH"] = SAMPLES
    """Folder or file of images, in any form of docs/data.md: folders of classes, RecordIO, WebDataset, TFRecord,
    CIFAR-10's and CIFAR-100's own files; samples: the built-in sample set; synthetic: generated images."""
    num_classes: int = 0
    """Classes of the network; 0: as many as the data has."""
    val_split: float = 0.0
    """For data without validation images: set this fraction of each class's images aside for validation, by a hash of
    the files' names, so that an image stays on its side when others are added; 0: none."""
    val_group_by: GroupBy = "image"
    """With --val-split, what stays on one side: each image by itself, or all images of a folder within a class (the
    frames of a video, the views of an item)."""
    first_label: FirstLabel = "auto"
    """For TFRecord files: the label of the first class; auto: 1 for image/class/label, as TensorFlow's ImageNet has it,
    unless a training image has the label 0; a network that is trained so remembers it."""
    labels: Labels = "auto"
    """For CIFAR-100's own files: the 100 fine labels or the 20 coarse ones; auto: fine, for a trained network those
    that it was trained on."""


@dataclass(frozen=True)
class BatchOptions:
    """Images."""

    batch_size: int = 256
    """Images per process in one forward pass."""


@dataclass(frozen=True)
class SizeOptions:
    """Images."""

    image_size: int = 224
    """Height and width of the network's input, in pixels."""


@dataclass(frozen=True)
class ImageOptions(Augmentation, SizeOptions):
    """Images."""

    mixup: float = 0.0
    """Mix each image and its label with another of its batch, by a share sampled from Beta(MIXUP, MIXUP); 0: no mixup.
    Training loss and accuracy are then those of the mixed images."""
    cutmix: float = 0.0
    """Put a box of another image of its batch into each one, and of its label as much into the target; the box has the
    area 1 - lambda, sampled from Beta(CUTMIX, CUTMIX). 0: no CutMix. With --mixup, each batch has one of the two."""
    cutmix_share: float = 0.5
    """With --mixup and --cutmix: which part of the batches has CutMix."""
    balance: float = 0.0
    """For classes of unequal size: draw a class's images in proportion to their number to the power of 1 - BALANCE; 1:
    every class equally often, 0.5: by the root of its size, 0: every image once. An epoch stays as long."""
    repeated_augmentation: int = 0
    """Repeated augmentation (arXiv:1901.09335): a batch holds so many copies of each of its images, augmented
    differently, and an epoch, as long as before, so much the fewer images (with --balance: of those drawn); 0: no
    copies."""


@dataclass(frozen=True)
class ResizingOptions:
    """Images."""

    first_image_size: int = 0
    """Progressive resizing: image size of the first epochs, which then rises to --image-size in multiples of 32
    pixels; 0: --image-size from the start."""
    resize_epochs: tuple[float, float] = (0.0, 0.0)
    """Progressive resizing: the epochs between which the image size rises, linearly."""


@dataclass(frozen=True)
class InferenceImageOptions(Normalisation, CentreCrop):
    """Images."""

    val_image_size: int = 0
    """Image size in validation and prediction, in pixels; 0: that of --image-size. A network sees objects larger in
    random crops than in whole images, so it does better on images about 1.15 to 1.3 times as large
    (arXiv:1906.06423)."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(SizeLimit):
    """Loader."""

    num_threads: int = 0
    """Threads of the loader per process; 0: one for each core that the process may use."""
    hw_decoder_load: float = -1.0
    """On a GPU, the part of the JPEGs that its JPEG engine decodes, from 0 to 1; -1: the largest that is nearly the
    fastest for this GPU, data and number of threads, found by a sweep of five seconds at the first start; 0.65 with
    --deterministic."""
    on_bad_image: Literal["skip", "error"] = "error"
    """What to do with an image that cannot be decoded."""


@dataclass(frozen=True)
class CacheOptions:
    """Loader."""

    cache: float = -1.0
    """GiB of host memory, per process and split, in which the images are kept decoded, so that each is decoded only
    once; a split that takes more is decoded in every epoch. -1: splits of up to 0.25 GiB; 0: none."""


LIMITS: dict[str, Limit] = {
    "num_classes": between(0, MAX_CLASSES),
    "val_split": BELOW_1,
    "batch_size": AT_LEAST_1,
    "image_size": between(MIN_IMAGE_SIZE, MAX_IMAGE_SIZE),
    **dict.fromkeys(("first_image_size", "val_image_size"),
                    (lambda value: value == 0 or MIN_IMAGE_SIZE <= value <= MAX_IMAGE_SIZE,
                     f"0, or from {MIN_IMAGE_SIZE} to {MAX_IMAGE_SIZE}")),
    "resize_epochs": (lambda value: 0 <= value[0] <= value[1], "two numbers of epochs from 0 on, the smaller first"),
    # Beta(100, 100) is 0.5 +/- 0.035: beyond, all images would be halves.
    **dict.fromkeys(("mixup", "cutmix"), between(0, 100)),
    **dict.fromkeys(("cutmix_share", "balance"), FRACTION),
    "repeated_augmentation": (lambda value: value == 0 or value >= 2, "0, or at least 2"),
    "num_threads": between(0, MAX_THREADS),
    "hw_decoder_load": (lambda value: value == -1 or 0 <= value <= 1, "a fraction from 0 to 1, or -1"),
    "cache": (lambda value: value == -1 or value >= 0, "0 or more, or -1"),
    "max_pixels": AT_LEAST_1,
    **transform.LIMITS,
}
