"""Data preparation and inspection: `python -m pipelines COMMAND --help`."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.table import Table

from common.command_line import exit_code_of, run_command
from pipelines import DataError, LoaderConfig, open_loader
from pipelines.bench import STAGE_TITLES, LoaderSpeed, bench_settings, bench_stages
from pipelines.files import write_text
from pipelines.make_records import (
    Options,
    journal_path,
    new_record_path,
    plan_files,
    plan_train_tar,
    plan_val_tar,
    tar_kind,
    write_records,
)
from pipelines.samples import NUM_TRAIN, NUM_VAL, PATTERNS, make_samples
from pipelines.show import contact_sheet, save_png
from pipelines.sources import class_list, read_classes, splits_of
from pipelines.verify import print_report, verify_split, write_clean

Split = Literal["train", "val"]
OptionalFile = Annotated[Path | None, "FILE"]


def make_records(
    source: Path,
    output: Path,
    split: Split | None = None,
    labels: OptionalFile = None,
    classes: OptionalFile = None,
    resize: int = 0,
    quality: int = 95,
    seed: int = 0,
    num_threads: int = 0,
    on_bad_image: Literal["error", "skip"] = "error",
) -> int:
    """Convert class folders, shards or ILSVRC2012 tar files to RecordIO.

    Writes OUTPUT/train.rec, train.idx (or val) and classes.txt. Interrupted, the same command goes on where it stopped.

    Args:
        source: A folder with train/ and val/, a folder of class folders or of shards (WebDataset, TFRecord), a tar
            shard, a .lst file, ILSVRC2012_img_train.tar or ILSVRC2012_img_val.tar.
        output: The folder to write into.
        split: What to convert; default: all that SOURCE holds.
        labels: Labels of the validation tar: a synset on each line, or lines of file name and label.
        classes: List of synsets in the order of their labels, perhaps with names to show (synset_words.txt).
        resize: Shrink images to this many pixels on the shorter side; 0 copies them unchanged.
        quality: JPEG quality of images that are shrunk.
        seed: Seed of the order in which images are written.
        num_threads: 0 takes all cores.
        on_bad_image: What to do with files that are no images (with --resize: that cannot be decoded).
    """
    options = Options(resize, quality, seed, num_threads, on_bad_image == "skip")
    kind = tar_kind(source) if source.is_file() and source.suffix == ".tar" else "files"
    if labels and kind != "val":
        raise DataError(f"{source}: --labels {labels} is for ILSVRC2012_img_val.tar alone; leave it out")
    if kind in ("train", "val"):
        known = class_list(classes, separator=None) if classes else read_classes(output)
        if split not in (None, kind):
            raise DataError(f"{source}: holds the {kind} images, not {split}; leave --split out")
        plans = {kind: plan_train_tar(source, known) if kind == "train" else plan_val_tar(source, labels, known)}
    else:
        if classes:
            raise DataError(f"{source}: --classes {classes} is for ILSVRC2012's tar files; put a classes.txt beside it")
        names = [split] if split else splits_of(str(source))
        if any(journal_path(output, name).exists() for name in names):  # interrupted; what is whole is done
            names = [name for name in names if not (output / f"{name}.rec").exists()]
        plans = {name: plan_files(source, name) for name in names}
    for name in plans:
        new_record_path(output, name)  # nothing is written if one of them is there
    for name, plan in plans.items():
        count, skipped = write_records(plan, output, name, options)
        for image, reason in skipped:
            print(f"skipped {image}: {reason}")
        print(f"{output / name}.rec: {count:,} images of {len(plan.classes):,} classes")
    return 0


def verify(
    data: str,
    split: Split | None = None,
    write_clean_: bool = False,
    num_classes: int | None = None,
    num_threads: int = 0,
) -> int:
    """Find truncated, empty, non-image, CMYK and mislabelled images; exit code 1 if some are unusable.

    Args:
        data: Where the images are, in any of the forms of docs/data.md.
        split: What to look at; default: all that DATA holds.
        write_clean_: Write an .idx (RecordIO) or a .lst (folders) without the unusable ones, which the loader then
            uses; the former one is kept as NAME.orig. A missing or wrong .idx is made anew from the .rec file.
        num_classes: How many classes a .rec file without a classes.txt has.
        num_threads: 0 takes all cores.
    """
    console = Console()
    unusable = 0
    for name in [split] if split else splits_of(data):
        report = verify_split(data, name, num_threads, num_classes)
        print_report(report, console)
        if write_clean_:
            write_clean(report)
            print(f"{report.clean_path}: {len(report.clean_lines):,} usable images")
        else:
            unusable += report.num_unusable
    return 1 if unusable else 0


def bench(
    data: str,
    split: Split = "train",
    batch_size: int = 32,
    image_size: int = 224,
    dtype: Literal["float32", "float16"] = "float32",
    channels: Literal[3, 4] = 3,
    device: Literal["cpu", "gpu"] = "cpu",
    num_threads: int = 0,
    hw_decoder_load: float | None = None,
    cache: float = 0.0,
    seconds: float = 4.0,
    sweep: bool = False,
    json_: OptionalFile = None,
) -> int:
    """Measure the loader alone: images/sec up to each of its stages.

    Args:
        data: Where the images are, in any of the forms of docs/data.md.
        split: train decodes a random window of each image, val all of it.
        batch_size: Images in a batch.
        image_size: Pixels, height and width.
        dtype: Type of the batches.
        channels: 4 adds a channel of zeros.
        device: Where to decode and augment.
        num_threads: CPU threads; 0 takes all cores.
        hw_decoder_load: On the GPU, the part of the images that its JPEG engine decodes; default: 0.65.
        cache: GiB of memory; a split that takes no more is decoded before the measurement, and fed as pixels.
        seconds: Time for each stage or setting.
        sweep: Also measure the loader with other settings: part of the JPEG engine, threads, prefetch, batch size, CPU.
        json_: Write the figures there too, with all raw times.
    """
    config = LoaderConfig(
        data=data,
        split=split,
        batch_size=batch_size,
        image_size=image_size,
        dtype=dtype,
        channels=channels,
        device=device,
        num_threads=num_threads,
        hw_decoder_load=hw_decoder_load,
        cache_gib=cache,
    )
    if not 0 < seconds < math.inf:
        raise DataError(f"seconds is {seconds:g}; give the time for each stage, above 0")
    title = f"{data} {split}, {device}, batch {batch_size}, {image_size} px, {dtype}"
    stages = bench_stages(config, seconds)
    rows = {STAGE_TITLES[stage]: (batch_size, speed) for stage, speed in stages.items()}
    _print_speeds(title, "up to this stage", rows)
    settings = list(bench_settings(config, seconds)) if sweep else []
    if settings:
        named = {", ".join(f"{name} {value}" for name, value in changes.items()) or "as above": (changes, speed)
                 for changes, speed in settings}
        rows = {name: (changes.get("batch_size", batch_size), speed) for name, (changes, speed) in named.items()}
        _print_speeds(title, "with this changed", rows)
    if json_:
        record = {
            "config": vars(config),
            "unit": "images/sec",
            "stages": [{"stage": stage, **speed._asdict()} for stage, speed in stages.items()],
            "settings": [{"changes": changes, **speed._asdict()} for changes, speed in settings],
        }
        try:
            json_.parent.mkdir(parents=True, exist_ok=True)
            write_text(json_, json.dumps(record, indent=1) + "\n")
        except OSError as error:
            raise DataError(f"{json_}: cannot be written ({error.strerror}); choose another file") from None
    return 0


def _print_speeds(title: str, column: str, rows: dict[str, tuple[int, LoaderSpeed]]) -> None:
    """A table of batch size and speed by name."""
    table = Table(title=title, title_justify="left")
    table.add_column(column)
    table.add_column("images/sec", justify="right")
    table.add_column("ms a batch", justify="right")
    for name, (batch_size, (speed, spread, _)) in rows.items():
        table.add_row(name, f"{speed:,.0f} ± {spread:,.0f}", f"{batch_size * 1000 / speed:,.2f}")
    Console().print(table)


def show(
    data: str,
    output: Path,
    split: Split = "train",
    image_size: int = 224,
    rows: int = 4,
    columns: int = 7,
    seed: int = 0,
    random_area: tuple[float, float] = LoaderConfig.random_area,
    crop_padding: int = 0,
    cutout: float = 0.0,
    device: Literal["cpu", "gpu"] = "cpu",
) -> int:
    """Write a contact sheet (PNG) of augmented samples with their class names: what the network sees.

    Args:
        data: Where the images are, in any of the forms of docs/data.md, or "synthetic".
        output: The PNG file.
        split: train shows augmented samples, val those of the validation.
        image_size: Pixels, height and width.
        rows: Rows of the sheet.
        columns: Columns of the sheet.
        seed: Another seed shows other samples.
        random_area: Smallest and largest share of an image's area that a random crop takes.
        crop_padding: Pixels of padding for crops of the image's own size, instead of a random area; 0: off.
        cutout: Side of the square that is filled with the mean colour, as part of the image's side; 0: none.
        device: Where to decode and augment.
    """
    config = LoaderConfig(
        data=data, split=split, batch_size=1, image_size=image_size, seed=seed, random_area=random_area,
        crop_padding=crop_padding, cutout=cutout, device=device, on_bad_image="skip",
    )  # fmt: skip
    with open_loader(config) as loader:
        title = f"{data}: {split}, {image_size} px"
        save_png(contact_sheet(loader, rows, columns, title), output)
    print(output)
    return 0


def make_sample_set(
    output: Path, num_train: int = NUM_TRAIN, num_val: int = NUM_VAL, seed: int = 0, num_threads: int = 0
) -> int:
    """Draw the built-in sample set: twelve classes of textures as JPEG files in class folders.

    Args:
        output: The folder to write; a set that is there already is left as it is.
        num_train: Training images of each class.
        num_val: Validation images of each class.
        seed: Another seed draws other images.
        num_threads: 0 takes all cores.
    """
    made = make_samples(output, num_train, num_val, seed, num_threads)
    already = "" if made else " (was there already)"
    print(f"{output}: {num_train} training and {num_val} validation images of each of {len(PATTERNS)} classes{already}")
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "make-records": make_records,
    "verify": verify,
    "bench": bench,
    "show": show,
    "make-samples": make_sample_set,
}


def main(arguments: list[str]) -> int:
    """Run one command; its exit code. A user's mistake is printed in one sentence and gives 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for names of files that are not in its encoding
    return exit_code_of(partial(run_command, COMMANDS, arguments, prog="python -m pipelines"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
