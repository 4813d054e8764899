"""Data preparation and inspection: `python -m pipelines COMMAND --help`."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from pipelines import DataError, LoaderConfig, open_loader
from pipelines.bench import STAGE_TITLES, LoaderSpeed, bench_settings, bench_stages
from pipelines.files import write_text
from pipelines.make_records import (
    Options,
    journal_path,
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
AnySplit = Annotated[Split | None, tyro.conf.arg(metavar="{train,val}", help_behavior_hint="")]
OptionalPath = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
Data = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
Source = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
Output = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]


def make_records(
    source: Source,
    output: Output,
    split: AnySplit = None,
    labels: OptionalPath = None,
    classes: OptionalPath = None,
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
    for name, plan in plans.items():
        count, skipped = write_records(plan, output, name, options)
        for image, reason in skipped:
            print(f"skipped {image}: {reason}")
        print(f"{output / name}.rec: {count:,} images of {len(plan.classes):,} classes")
    return 0


def verify(
    data: Data,
    split: AnySplit = None,
    write_clean_index: Annotated[bool, tyro.conf.arg(name="write-clean")] = False,
    num_classes: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None,
    num_threads: int = 0,
) -> int:
    """Find truncated, empty, non-image, CMYK and mislabelled images; exit code 1 if some are unusable.

    Args:
        data: Where the images are, in any of the forms of docs/data.md.
        split: What to look at; default: all that DATA holds.
        write_clean_index: Write an .idx (RecordIO) or a .lst (folders) without the unusable ones, which the loader then
            uses; the former one is kept as NAME.orig. A missing or wrong .idx is made anew from the .rec file.
        num_classes: How many classes a .rec file without a classes.txt has.
        num_threads: 0 takes all cores.
    """
    console = Console()
    unusable = 0
    for name in [split] if split else splits_of(data):
        report = verify_split(data, name, num_threads, num_classes)
        print_report(report, console)
        if write_clean_index:
            write_clean(report)
            print(f"{report.clean_path}: {len(report.clean_lines):,} usable images")
        else:
            unusable += report.num_unusable
    return 1 if unusable else 0


def bench(
    data: Data,
    split: Split = "train",
    batch_size: int = 32,
    image_size: int = 224,
    dtype: Literal["float32", "float16"] = "float32",
    channels: Literal["3", "4"] = "3",
    device: Literal["cpu", "gpu"] = "cpu",
    num_threads: int = 0,
    hw_decoder_load: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None,
    cache: float = 0.0,
    seconds: float = 4.0,
    sweep: bool = False,
    json_file: Annotated[OptionalPath, tyro.conf.arg(name="json")] = None,
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
        json_file: Write the figures there too, with all raw times.
    """
    config = LoaderConfig(
        data=data,
        split=split,
        batch_size=batch_size,
        image_size=image_size,
        dtype=dtype,
        channels=int(channels),
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
    if json_file:
        record = {
            "config": vars(config),
            "unit": "images/sec",
            "stages": [{"stage": stage, **speed._asdict()} for stage, speed in stages.items()],
            "settings": [{"changes": changes, **speed._asdict()} for changes, speed in settings],
        }
        try:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            write_text(json_file, json.dumps(record, indent=1) + "\n")
        except OSError as error:
            raise DataError(f"{json_file}: cannot be written ({error.strerror}); choose another file") from None
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
    data: Data,
    output: Output,
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
    output: Output, num_train: int = NUM_TRAIN, num_val: int = NUM_VAL, seed: int = 0, num_threads: int = 0
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
    try:
        code = _parse(arguments)()
        sys.stdout.flush()
        return code
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python flushes at its end
        return 128 + signal.SIGPIPE
    except OSError as error:
        where, what = error.filename or "input or output", error.strerror or error
        print(f"error: {where}: {what}; check path, permissions and disk", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parse(arguments: list[str]) -> Callable[[], int]:
    """The command to run, with its options filled in; exits after --help."""

    def deferred(function: Callable[..., int]) -> Callable[..., Callable[[], int]]:
        # Tyro breaks an argument's help wherever its docstring does.
        function.__doc__ = re.sub(r"\n {12,}", " ", function.__doc__ or "")
        return functools.wraps(function)(lambda *values, **options: functools.partial(function, *values, **options))

    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    if name and name not in COMMANDS:
        raise DataError(f"there is no command {name!r}; there are: {', '.join(COMMANDS)}")
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.extras.subcommand_cli_from_dict(
                {name: deferred(command) for name, command in COMMANDS.items()},
                prog="python -m pipelines",
                description="Prepare and inspect image data.",
                config=(tyro.conf.FlagCreatePairsOff,),
                args=arguments,
            )
    except SystemExit as end:
        if not end.code:
            raise
    raise DataError(_one_sentence(errors.getvalue()))


def _one_sentence(box: str) -> str:
    """What tyro's framed message says: the first section, and the option that it takes for meant."""
    text = " ".join(line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰")))
    sections = [" ".join(part.split()) for part in re.split("[─-]{3,}", text) if part.strip()]
    # On a terminal without line drawing the title is not in the frame but in a section of its own.
    problem, *hints = sections if box.startswith("╭") else sections[1:]
    meant = next((re.search(r"--[\w-]+", hint) for hint in hints if hint.startswith("Perhaps you meant")), None)
    problem = re.sub(r"Missing from (.*?): (\S+) .*", r"\1 needs \2", problem)
    problem = problem.replace("invalid literal for int() with base 10:", "needs a whole number, not")
    problem = problem.replace("could not convert string to float:", "needs a number, not")
    problem = problem.removeprefix("Error parsing ").rstrip(". ")
    return problem + (f"; did you mean {meant[0]}?" if meant else "; see --help")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
