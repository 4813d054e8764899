"""The options of this package's commands; imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from common.command_line import REPEATABLE
from pipelines.transform import ImageTransform, SizeLimit

SAMPLES = "samples"  # value of --data that stands for the built-in sample set
# ImageNet-21k has 21,841 classes; a million give ResNet-50 a classifier of 8 GB. The limit catches damaged labels:
# without it, the class names up to a huge label would fill the memory.
MAX_CLASSES = 1_000_000
Split = Literal["train", "val"]
GroupBy = Literal["image", "folder"]  # with --val-split: whether images are assigned singly or by folder
FirstLabel = Literal["auto", "0", "1"]  # for TFRecord files: the label of the first class
Labels = Literal["auto", "fine", "coarse"]  # for CIFAR-100's own files; auto: fine
AUTO: Literal["auto"] = "auto"  # decided by the data
OptionalFile = Annotated[Path | None, "FILE"]


@dataclass(frozen=True)
class MakeRecordsOptions(SizeLimit):
    """Convert class folders, shards or ILSVRC2012 tar files to RecordIO.

    Writes OUTPUT/train.rec, train.idx (or val) and classes.txt. The same command resumes an interrupted conversion.
    """

    source: Path
    """A folder with train/ and val/, a folder of class folders or of shards (WebDataset, TFRecord), a tar shard, a
    .lst file, ILSVRC2012_img_train.tar or ILSVRC2012_img_val.tar."""
    output: Path
    """The folder to write into."""
    split: Split | None = None
    """The split to convert; default: all splits that SOURCE has."""
    val_split: float = 0.0
    """For data without val: write this fraction of each class's images as val, the images that training with the
    same --val-split would set aside."""
    val_group_by: GroupBy = "image"
    """Which images --val-split keeps together, as in training."""
    first_label: FirstLabel = "auto"
    """For TFRecord files: the label of the first class, as in training."""
    labels: OptionalFile = None
    """Labels of the validation tar: a synset on each line, or lines of file name and label."""
    classes: OptionalFile = None
    """List of synsets in the order of their labels, perhaps with names to show (synset_words.txt)."""
    resize: int = 0
    """Shrink images to this many pixels on the shorter side; 0 copies them unchanged."""
    quality: int = 95
    """JPEG quality of images that are shrunk."""
    seed: int = 0
    """Seed of the order in which images are written."""
    num_threads: int = 0
    """0 takes all cores."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What to do with files that are not images (with --resize: images that cannot be decoded)."""


@dataclass(frozen=True)
class VerifyOptions(SizeLimit):
    """Find truncated, empty, non-image, CMYK and mislabelled images, images that have two labels, and training images
    that are in validation too; exit code 1 if some are unusable, 0 once --write-clean leaves them out."""

    data: str
    """Where the images are, in any of the forms of docs/data.md; samples: the built-in sample set."""
    split: Split | None = None
    """The split to check; default: all splits that DATA has."""
    val_split: float = 0.0
    """For data without val: the fraction set aside for validation, as in training, to find images on both sides."""
    val_group_by: GroupBy = "image"
    """Which images --val-split keeps together, as in training."""
    first_label: FirstLabel = "auto"
    """For TFRecord files: the label of the first class, as in training."""
    labels: Labels = "auto"
    """For CIFAR-100's own files: the 100 fine labels or the 20 coarse ones; auto: fine."""
    near_copies: bool = False
    """Also find near copies: the same picture at another size or quality, by a perceptual hash (docs/data.md)."""
    write_clean_: bool = False
    """Write an .idx (RecordIO) or a .lst (folders) without the unusable images, which the loader then reads; an
    existing one is kept as NAME.orig. A missing or wrong .idx is rebuilt from the .rec file."""
    num_classes: int | None = None
    """Number of classes, for a .rec file without a classes.txt."""
    num_threads: int = 0
    """0 takes all cores."""


@dataclass(frozen=True)
class BenchOptions:
    """Measure the loader alone: images/sec up to each of its stages."""

    data: str
    """Where the images are, in any of the forms of docs/data.md; samples: the built-in sample set."""
    split: Split = "train"
    """train decodes a random window of each image, val all of it."""
    batch_size: int = 32
    """Images in a batch."""
    image_size: int = 224
    """Pixels, height and width."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the batches."""
    channels: Literal[3, 4] = 3
    """4 adds a channel of zeros."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Where to decode and augment."""
    num_threads: int = 0
    """CPU threads; 0 takes all cores."""
    hw_decoder_load: float | None = None
    """On the GPU, the fraction of the images that its JPEG engine decodes; default: 0.65."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What to do with images that cannot be decoded: stop, or measure without them."""
    cache: float = 0.0
    """GiB of memory; a split that fits into it is decoded before the measurement, and fed as pixels."""
    seconds: float = 4.0
    """Time for each stage or setting."""
    sweep: bool = False
    """Also measure the loader with other settings: JPEG engine's fraction, threads, prefetch, batch size, CPU."""
    json_: OptionalFile = None
    """Also write the figures, with all raw times, to this JSON file."""


@dataclass(frozen=True, kw_only=True)  # so that fields without a default may follow those of ImageTransform
class ShowOptions(ImageTransform):
    """Write a contact sheet (PNG, or JPEG) of augmented samples with their class names: what the network sees."""

    data: str
    """Where the images are, in any of the forms of docs/data.md; samples: the built-in sample set; synthetic: generated
    images."""
    output: Path
    """The file; .jpg makes it a JPEG."""
    plugin: Annotated[tuple[str, ...], "FILE", REPEATABLE] = ()
    """Python file with augmentations for --augment, as in training."""
    labels: Labels = "auto"
    """For CIFAR-100's own files: name the 100 fine classes or the 20 coarse ones; auto: fine."""
    split: Split = "train"
    """train shows augmented training samples, val shows validation samples."""
    each: bool = False
    """Show one row for each augmentation alone, always with the same images; other augmentation options are ignored."""
    image_size: int = 224
    """Pixels, height and width."""
    rows: int = 4
    """Rows of the sheet."""
    columns: int = 7
    """Columns of the sheet."""
    seed: int = 0
    """Another seed shows other samples."""
    on_bad_image: Literal["error", "skip"] = "skip"
    """What to do with images that cannot be decoded."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Where to decode and augment."""


@dataclass(frozen=True)
class MakeSamplesOptions:
    """Draw the built-in sample set: twelve classes of textures as JPEG files in class folders."""

    output: Path
    """The folder to write; a set that is there already is not changed."""
    num_train: int | None = None
    """Training images of each class; default: as many as `python -m train --data samples` draws."""
    num_val: int | None = None
    """Validation images of each class; default: as many as `python -m train --data samples` draws."""
    seed: int = 0
    """Another seed draws other images."""
    num_threads: int = 0
    """0 takes all cores."""
