"""Options of the data: where the images are, what is done to them, and the loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.limits import AT_LEAST_1, BELOW_1, FRACTION, Limit, between
from pipelines import transform
from pipelines.options import MAX_CLASSES, SAMPLES, FirstLabel, GroupBy, Labels
from pipelines.transform import Augmentation, CentreCrop, Normalisation, SizeLimit

SYNTHETIC = "synthetic"  # value of `data` for generated images
MAX_THREADS = 1024  # most threads of a loader; the system limits the threads of a process
MIN_IMAGE_SIZE = 32  # pixels; the network halves the image five times
MAX_IMAGE_SIZE = 8192  # pixels; one image of this size in float32 is 0.8 GB


@dataclass(frozen=True)
class DataOptions:
    """Data."""

    data: Annotated[str, "PATH"] = SAMPLES
    """Folder or file of images, in any form of docs/data.md: folders of classes, RecordIO, WebDataset, TFRecord,
    CIFAR-10's and CIFAR-100's own files. samples: the built-in sample set; synthetic: generated images."""
    num_classes: int = 0
    """Number of classes of the network; 0: the data's number."""
    val_split: float = 0.0
    """For data without validation images: the fraction of each class's images to set aside for validation; 0: none.
    Images are chosen by a hash of their file names, so adding others does not move them."""
    val_group_by: GroupBy = "image"
    """With --val-split, which images stay on one side: image: each is chosen by itself; folder: all images of a folder
    within a class stay together (the frames of a video, the views of an item)."""
    first_label: FirstLabel = "auto"
    """For TFRecord files: the label of the first class. auto: 1 for image/class/label, as in TensorFlow's ImageNet,
    unless a training image has the label 0; a trained network remembers it."""
    labels: Labels = "auto"
    """For CIFAR-100's own files: the 100 fine labels or the 20 coarse ones. auto: fine, or for a trained network the
    labels that it was trained on."""


@dataclass(frozen=True)
class BatchOptions:
    """Images."""

    batch_size: int = 256
    """Images per process in a forward pass."""


@dataclass(frozen=True)
class SizeOptions:
    """Images."""

    image_size: int = 224
    """Height and width of the network's input, in pixels."""


@dataclass(frozen=True)
class ImageOptions(Augmentation, SizeOptions):
    """Images."""

    mixup: float = 0.0
    """mixup: mix each image and its label with another one of the batch, with a share sampled from Beta(MIXUP, MIXUP);
    0: off. Training loss and accuracy are then measured on the mixed images."""
    cutmix: float = 0.0
    """CutMix: replace a box in each image by that of another image of the batch, and the same share of its label. The
    box has the area 1 - lambda, sampled from Beta(CUTMIX, CUTMIX); 0: off. With --mixup, each batch gets one of the
    two."""
    cutmix_share: float = 0.5
    """With --mixup and --cutmix: the share of batches that get CutMix."""
    balance: float = 0.0
    """For classes of unequal size: draw a class's images in proportion to its size to the power of 1 - BALANCE. 1:
    every class equally often; 0.5: by the root of its size; 0: every image once. The length of an epoch does not
    change."""
    repeated_augmentation: int = 0
    """Repeated augmentation (arXiv:1901.09335): a batch holds this many copies of each of its images, augmented
    differently; 0: off. An epoch keeps its length, so it has fewer different images (with --balance: of those
    drawn)."""


@dataclass(frozen=True)
class ResizingOptions:
    """Images."""

    first_image_size: int = 0
    """Progressive resizing: image size of the first epochs, which later rises to --image-size in multiples of 32
    pixels; 0: --image-size from the start."""
    resize_epochs: tuple[float, float] = (0.0, 0.0)
    """Progressive resizing: first and last epoch of the linear rise of the image size."""


@dataclass(frozen=True)
class InferenceImageOptions(Normalisation, CentreCrop):
    """Images."""

    val_image_size: int = 0
    """Image size in validation and prediction, in pixels; 0: as --image-size. Objects look larger in random crops
    than in whole images, so a size 1.15 to 1.3 times that of training gives a better accuracy (arXiv:1906.06423)."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions(SizeLimit):
    """Loader."""

    num_threads: int = 0
    """Loader threads per process; 0: one for each core that the process may use."""
    hw_decoder_load: float = -1.0
    """On a GPU, the share of JPEGs that its JPEG engine decodes, from 0 to 1. -1: the largest share with nearly the
    best speed for this GPU, data and number of threads, found by a sweep of five seconds at the first start; 0.65 with
    --deterministic."""
    on_bad_image: Literal["skip", "error"] = "error"
    """What to do with an image that cannot be decoded."""


@dataclass(frozen=True)
class CacheOptions:
    """Loader."""

    cache: float = -1.0
    """GiB of host memory, per process and split, for keeping images decoded, so that each is decoded only once. A split
    that needs more is decoded in every epoch. -1: splits of up to 0.25 GiB; 0: none."""


LIMITS: dict[str, Limit] = {
    "num_classes": between(0, MAX_CLASSES),
    "val_split": BELOW_1,
    "batch_size": AT_LEAST_1,
    "image_size": between(MIN_IMAGE_SIZE, MAX_IMAGE_SIZE),
    **dict.fromkeys(("first_image_size", "val_image_size"),
                    (lambda value: value == 0 or MIN_IMAGE_SIZE <= value <= MAX_IMAGE_SIZE,
                     f"0, or from {MIN_IMAGE_SIZE} to {MAX_IMAGE_SIZE}")),
    "resize_epochs": (lambda value: 0 <= value[0] <= value[1], "two numbers of epochs from 0 on, the smaller first"),
    # Beta(100, 100) is 0.5 +/- 0.035: with larger values both images would have equal shares
    **dict.fromkeys(("mixup", "cutmix"), between(0, 100)),
    **dict.fromkeys(("cutmix_share", "balance"), FRACTION),
    "repeated_augmentation": (lambda value: value == 0 or value >= 2, "0, or at least 2"),
    "num_threads": between(0, MAX_THREADS),
    "hw_decoder_load": (lambda value: value == -1 or 0 <= value <= 1, "a fraction from 0 to 1, or -1"),
    "cache": (lambda value: value == -1 or value >= 0, "0 or more, or -1"),
    "max_pixels": AT_LEAST_1,
    **transform.LIMITS,
}
