"""The base of all loaders: configuration, batches, and a position that can be saved and restored.

The content of a batch depends only on (seed, epoch, batch number). Global batch `k` holds images `k * B` to `(k + 1) *
B - 1` of the epoch's order, where B is the batch size times the number of processes; each process has its share of
them. So all processes have the same number of batches, and every validation image is in exactly one batch.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from common import plugins
from common.mxnet_compat import mx
from common.nvidia_gpus import find_gpus
from pipelines.errors import DataError, check_not_negative, check_positive
from pipelines.options import AUTO, FirstLabel, GroupBy, Labels
from pipelines.sources.base import Classes
from pipelines.transform import MAX_PIXELS, ImageTransform

_CHOICES = {
    "split": ("train", "val"),
    "dtype": ("float32", "float16"),
    "channels": (3, 4),
    "device": ("cpu", "gpu"),
    "decoder": ("auto", "cpu", "gpu"),
    "on_bad_image": ("error", "skip"),
    "val_group_by": ("image", "folder"),
    "first_label": (AUTO, "0", "1"),
    "labels": (AUTO, "fine", "coarse"),
}

# Options that, besides the seed, determine an epoch's images, with their values for saved positions that lack them.
_IN_THE_ORDER = {"val_split": 0, "val_group_by": "image", "balance": 0, "repeated_augmentation": 0, "labels": AUTO}


@dataclass(frozen=True)
class LoaderConfig:
    """The options of a loader; raises DataError for an invalid value, UserError for an augmentation that no plug-in
    has."""

    data: str  # a path as in sources/, or "synthetic"
    split: str = "train"  # "train" shuffles and augments, "val" does neither
    val_split: float = 0.0  # for data without a split "val": the fraction of the training images used as "val"
    val_group_by: GroupBy = "image"  # with val_split: single images are assigned, or each "folder" as a whole
    first_label: FirstLabel = AUTO  # for TFRecord files: the label of the first class, "0" or "1"
    labels: Labels = AUTO  # for CIFAR-100's own files: "fine" or "coarse"; auto: fine
    balance: float = 0.0  # training: 0 draws classes as often as they occur in the data, 1 draws all equally often
    repeated_augmentation: int = 0  # training: copies of each image in a global batch; 0: no copies
    batch_size: int = 32  # images per process
    image_size: int = 224  # pixels, height and width
    image_sizes: tuple[int, ...] = ()  # training: the sizes of the first epochs, one each; then image_size
    dtype: str = "float32"  # or "float16"
    channels: int = 3  # 3, or 4 with a fourth channel of zeros, for kernels that need aligned pixels
    device: str = "cpu"  # or "gpu": decode and augment there
    device_id: int = 0
    num_threads: int = 0  # CPU threads of this process; 0: all cores (several processes on a machine must share them)
    seed: int = 0
    transform: ImageTransform = field(default_factory=ImageTransform)  # how images are cropped and augmented
    on_bad_image: str = "error"  # or "skip": leave out images that cannot be decoded
    max_pixels: int = MAX_PIXELS  # an image with more pixels in its header counts as undecodable
    num_classes: int | None = None  # for synthetic data (default 10) and RecordIO files without classes.txt
    synthetic_images: int = 12_800  # images per epoch of synthetic training data; validation has a tenth
    prefetch: int = 3  # batches made ahead, so that one late batch does not delay the step
    decoder: str = "auto"  # device "gpu": decode on the "gpu" or the "cpu"; auto: thumbnails on the CPU
    hw_decoder_load: float | None = None  # device "gpu": fraction of images for the JPEG engine; None: measured once
    cache_gib: float | None = 0.0  # keep the decoded split in memory if it fits in this; None: if it is small

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise DataError(f"{name} is {value!r}; choose {' or '.join(repr(choice) for choice in choices)}")
        check_positive(batch_size=self.batch_size, image_size=self.image_size, synthetic_images=self.synthetic_images,
                       prefetch=self.prefetch, max_pixels=self.max_pixels,
                       num_classes=1 if self.num_classes is None else self.num_classes)
        if min(self.image_sizes, default=1) < 1:
            raise DataError(f"image_sizes has {min(self.image_sizes)}; every size must be at least 1")
        check_not_negative(num_threads=self.num_threads, seed=self.seed, device_id=self.device_id)
        if self.repeated_augmentation < 0 or self.repeated_augmentation == 1:
            raise DataError(f"repeated_augmentation is {self.repeated_augmentation}; it must be 0, or at least 2")
        self.transform.check()
        for name in self.transform.augment if self.split == "train" else ():
            plugins.get("augmentation", name)
        if self.split == "train" and self.transform.auto_augment != "none":
            smallest = min((self.image_size, *self.image_sizes))
            if smallest < 3:
                raise DataError(f"image_size is {smallest}, and {self.transform.auto_augment} needs at least 3 pixels")
        if not 0 <= self.balance <= 1:
            raise DataError(f"balance is {self.balance:g}; it must be from 0 to 1")
        if self.hw_decoder_load is not None and not 0 <= self.hw_decoder_load <= 1:
            raise DataError(f"hw_decoder_load is {self.hw_decoder_load:g}; it must be from 0 to 1")
        if self.cache_gib is not None and self.cache_gib < 0:
            raise DataError(f"cache_gib is {self.cache_gib:g}; it cannot be negative")

    def size_in(self, epoch: int) -> int:
        """Height and width of the images in an epoch, in pixels."""
        if self.split == "train" and epoch < len(self.image_sizes):
            return self.image_sizes[epoch]
        return self.image_size

    @property
    def reading(self) -> dict[str, Any]:
        """The arguments of `open_source` that decide how the data are read."""
        names = ("num_classes", "val_split", "val_group_by", "first_label", "labels")
        return {name: getattr(self, name) for name in names}

    @property
    def context(self) -> Any:
        """The MXNet device of the batches."""
        return mx.gpu(self.device_id) if self.device == "gpu" else mx.cpu()


class Batch(NamedTuple):
    """One batch of one process."""

    data: Any  # mx.nd (N, size, size, channels), normalised, `size` is the epoch's; read only
    label: Any  # mx.nd (N,) float32
    num_valid: int  # in validation < N if images ran out or were skipped; the rest is padding that must not count
    indices: Sequence[int] = ()  # the numbers in the split of the first `num_valid` images; empty for synthetic data


class Loader(ABC):
    """Iterating yields the remaining batches of the current epoch; after the last batch, the next epoch begins."""

    # For the error about a saved position: the options that must not change, and the alternative.
    _way_out = ("resume with the same data, seed, --labels, --val-split, --balance and --repeated-augmentation, or "
                "begin a new run on this data with the old run's weights (--weights RUN)")

    def __init__(self, config: LoaderConfig, shard: tuple[int, int], num_images: int, classes: Classes):
        if config.device == "gpu":
            require_gpu(config.device_id)
        self.config = config
        self.shard = shard
        self.num_images = num_images  # images in the whole split
        self.own_classes = self.classes = classes  # the data's own classes; the classes in the order of the labels
        self.labels: Sequence[int] = range(len(classes))  # the data's own class number -> label
        self.place = config.data  # the file or folder of the split, for messages
        self.remarks: Sequence[str] = ()  # sentences about data that are left out
        self.bad: dict[int, str] = {}  # image -> reason
        self.damaged: dict[int, str] = {}  # image that is used although damaged -> the decoder's message
        # Short hashes of some images of each class, by its folder, for training images in class folders. A repaired
        # image changes its hash; if all hashes of a class have changed, the class was replaced.
        self.stamps: dict[str, list[str]] = {}
        self.num_skipped = 0  # images skipped by this process in this epoch, or in the one that has just ended
        self.epoch = 0
        self.batch = 0  # the number of the next batch in this epoch
        global_batch = config.batch_size * shard[1]
        if config.split == "train":
            self.num_batches = num_images // global_batch  # each epoch leaves out a few images, in every epoch others
            if self.num_batches == 0:
                each = f" ({config.batch_size} on each of {shard[1]} processes)" if shard[1] > 1 else ""
                raise DataError(
                    f"{config.data}: {num_images} training images are fewer than one batch of {global_batch}{each}; "
                    "lower --batch-size or add images"
                )
            if config.repeated_augmentation > global_batch:
                raise DataError(
                    f"--repeated-augmentation {config.repeated_augmentation} is more than the {global_batch} images of "
                    "a batch, but all copies of an image must fit into one batch; lower --repeated-augmentation"
                )
        else:
            self.num_batches = -(-num_images // global_batch)

    def remarks_on_same_images(self, val: Loader | None) -> list[str]:
        """Sentences on images with two labels, or in both this split and the split of `val`, if they are cheap to find
        (pipelines/same_images.py)."""
        return []

    @property
    def class_names(self) -> list[str]:
        """The names to show, in the order of the labels."""
        return [shown for _, shown in self.classes]

    def count_classes_as(self, classes: Classes, labels: Sequence[int]) -> None:
        """From the next batch on, number the classes by `classes`: labels are indices into this list, and `labels[k]`
        is the label of the data's class k.
        """
        self.classes, self.labels = classes, labels

    def labels_met(self) -> Iterator[int]:
        """Yield the data's own number of each class that has images in the split, when the first image of this class is
        read.
        """
        return iter(range(len(self.labels)))

    def class_sizes(self) -> np.ndarray:
        """The number of images of each class in the whole split, by label; approximate for synthetic data."""
        return np.full(len(self.classes), max(1, self.num_images // len(self.classes)))

    def __iter__(self) -> Iterator[Batch]:
        if not self.batch:
            self.num_skipped = 0
        while self.batch < self.num_batches:
            batch = self._load()
            self.batch += 1  # before the yield: a `state` that the consumer takes points to the next batch
            yield batch
        self.epoch, self.batch = self.epoch + 1, 0

    def prepare(self) -> None:  # noqa: B027  # a loader whose batches cost nothing has nothing to prepare
        """Make the next batch now, so that the memory that batches need is allocated now."""

    def names(self, images: Sequence[int]) -> list[str]:
        """The files or records of some images of the split."""
        return [self._name(i) for i in images]

    @property
    def bad_images(self) -> list[tuple[str, str]]:
        """(file or record, reason) of the images that this process skipped."""
        return [(self._name(i), reason) for i, reason in sorted(self.bad.items())]

    @property
    def damaged_images(self) -> list[tuple[str, str]]:
        """(file or record, decoder's message) of the damaged images that this process used, as far as they can be
        decoded.
        """
        return [(self._name(i), message) for i, message in sorted(self.damaged.items())]

    @property
    def cache_bytes(self) -> int:
        """Bytes of memory that the decoded images take (`cache_gib`)."""
        return 0

    def _name(self, i: int) -> str:
        return f"image {i}"

    @abstractmethod
    def _load(self) -> Batch:
        """Load batch `batch` of epoch `epoch`."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and buffers."""

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _identity(self) -> dict[str, Any]:
        """The values that must not change between saving a position and restoring it."""
        config = self.config
        identity = {"split": config.split, "num_images": self.num_images, "seed": config.seed}
        return identity | {name: value for name, default in _IN_THE_ORDER.items()
                           if (value := getattr(config, name)) != default}

    @property
    def global_batch(self) -> int:
        """The number of images in a batch over all processes."""
        return self.config.batch_size * self.shard[1]

    def state(self) -> bytes:
        """The position, and the bad images met so far, as JSON."""
        position = {"epoch": self.epoch, "batch": self.batch, "global_batch": self.global_batch,
                    "num_skipped": self.num_skipped}
        rest = {"bad_images": list(self.bad.items()), "classes": self.stamps}
        return json.dumps(self._identity() | position | rest).encode()

    def restore(self, state: bytes) -> None:
        """Go to the position of `state`. The next batch is bit for bit the batch that would have followed.

        If the global batch size has changed, the next batch is the first that holds no image seen in this epoch; fewer
        images than one batch are skipped.
        """
        try:
            saved = json.loads(state)
            epoch, batch, global_batch = (int(saved[name]) for name in ("epoch", "batch", "global_batch"))
            num_skipped = int(saved.get("num_skipped", 0))  # older states lack this key
            if min(epoch, batch, global_batch, num_skipped) < 0:
                raise ValueError
            bad = {int(i): str(reason) for i, reason in saved["bad_images"]}
            # older states lack this key
            stamps = {str(name): list(each) for name, each in saved.get("classes", {}).items()}
        except (ValueError, KeyError, TypeError, OverflowError, AttributeError):
            raise DataError("the saved loader position cannot be read; use another checkpoint of its folder") from None
        for key, value in (_IN_THE_ORDER | self._identity()).items():
            before = saved.get(key, _IN_THE_ORDER.get(key, 0))
            if before != value:
                raise DataError(f"the saved loader position belongs to {key} {before}, but this loader has {value}; "
                                f"{self._way_out}")
        changed = [name for name, each in self.stamps.items() if not set(each) & set(stamps.get(name, each))]
        if changed:
            named = ", ".join(map(repr, changed[:3])) + ", ..." * (len(changed) > 3)
            raise DataError(f"the saved loader position belongs to other images of these classes: {named} (their "
                            f"folders may have been swapped or replaced); {self._way_out}")
        self.epoch, self.bad, self.num_skipped = epoch, bad, num_skipped
        self.batch = min(-(-batch * global_batch // self.global_batch), self.num_batches)


def require_gpu(device_id: int) -> None:
    """Raise DataError if batches cannot be placed on this GPU."""
    count = len(find_gpus())
    if device_id >= count:
        raise DataError(f"GPU {device_id} is requested, but CUDA finds {count} GPUs here; load on the CPU")
    if not mx.runtime.Features().is_enabled("CUDA"):
        raise DataError("batches on the GPU need MXNet with CUDA; install the extra gpu, or load on the CPU")
