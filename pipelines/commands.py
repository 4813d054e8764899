"""The commands of `python -m pipelines`. Each returns an exit code or raises DataError."""

from __future__ import annotations

import dataclasses
import json
import math

from rich.console import Console
from rich.table import Table

from common import files, plugins
from common.command_line import option_name, part_of
from pipelines import DataError, ImageTransform, LoaderConfig, open_loader
from pipelines.bench import STAGE_TITLES, LoaderSpeed, bench_settings, bench_stages
from pipelines.make_records import (
    Options,
    journal_path,
    new_record_path,
    plan_files,
    plan_train_tar,
    plan_val_tar,
    share_records,
    tar_kind,
    with_classes,
    write_records,
)
from pipelines.options import BenchOptions, MakeRecordsOptions, MakeSamplesOptions, ShowOptions, VerifyOptions
from pipelines.samples import NUM_TRAIN, NUM_VAL, PATTERNS, data_path, make_samples
from pipelines.show import augmentation_sheet, contact_sheet, save
from pipelines.sources import class_list, open_source, read_classes, same_images, splits_of
from pipelines.transform import OF_POLICIES, Augmentation
from pipelines.verify import (
    Report,
    class_remarks,
    leave_out_duplicates,
    name_near_copies,
    print_report,
    verify_split,
    write_clean,
)


def make_records(options: MakeRecordsOptions) -> int:
    """Convert images to RecordIO."""
    how = Options(options.resize, options.quality, options.seed, options.num_threads, options.on_bad_image == "skip",
                  options.max_pixels)
    source, output, labels, classes = options.source, options.output, options.labels, options.classes
    kind = tar_kind(source) if source.is_file() and source.suffix == ".tar" else "files"
    if labels and kind != "val":
        raise DataError(f"{source}: --labels {labels} is for ILSVRC2012_img_val.tar alone; leave it out")
    if kind in ("train", "val"):
        if options.val_split:
            raise DataError(f"{source}: --val-split {options.val_split:g} is for data without validation images, and "
                            "ILSVRC2012 has them: leave it out")
        known = class_list(classes, separator=None) if classes else read_classes(output)
        if options.split not in (None, kind):
            raise DataError(f"{source}: holds the {kind} images, not the {options.split} images; leave out --split")
        plans = {kind: plan_train_tar(source, known) if kind == "train" else plan_val_tar(source, labels, known)}
    else:
        if classes:
            raise DataError(f"{source}: --classes {classes} is only for ILSVRC2012's tar files: leave it out, and "
                            "list the classes in a classes.txt beside the class folders or the list")
        both = ["train", "val"] if options.val_split else splits_of(str(source))
        names = [options.split] if options.split else both
        if any(journal_path(output, name).exists() for name in names):  # interrupted: skip the splits that are complete
            names = [name for name in names if not (output / f"{name}.rec").exists()]
        reading = {"val_split": options.val_split, "val_group_by": options.val_group_by,
                   "first_label": options.first_label}
        plans = {name: plan_files(source, name, **reading) for name in names}
        if "val" in plans and (of_training := plans["train"].classes if "train" in plans else read_classes(output)):
            plans["val"] = with_classes(plans["val"], of_training, f"{source}: val")
    for name in plans:
        new_record_path(output, name)  # raises before anything is written if any of the files exists
    for remark in dict.fromkeys(remark for plan in plans.values() for remark in plan.remarks):
        print(remark)
    for name, plan in plans.items():
        count, skipped = write_records(plan, output, name, how)
        for image, reason in skipped:
            print(f"skipped {image}: {reason}")
        print(f"{output / name}.rec: {count:,} images of {len(plan.classes):,} classes")
    if kind == "files" and not options.split and not options.val_split and same_images(source):
        share_records(output)
        print(f"{output}/val.rec: the same images, as {source} has no validation images of its own")
    return 0


def verify(options: VerifyOptions) -> int:
    """Look for unusable images. Returns 1 if some images are unusable and --write-clean has not left them out."""
    console = Console()
    unusable = 0
    for report in _reports(options):
        print_report(report, console)
        if options.write_clean_:
            write_clean(report)
            print(f"{report.clean_path}: {len(report.usable):,} usable images")
        else:
            unusable += report.num_unusable
    return 1 if unusable else 0


def _reports(options: VerifyOptions) -> list[Report]:
    """A report on each requested split; training images that also occur in validation count as duplicates."""
    data, num_classes = data_path(options.data), options.num_classes
    in_val: set[str] = set()
    if options.val_split:
        if options.split:
            raise DataError(f"--val-split {options.val_split:g} compares two parts of the training images: leave out "
                            f"--split {options.split}")
        part = open_source(data, "val", num_classes, options.val_split, options.val_group_by, options.first_label,
                           options.labels)
        in_val = {part.name(i) for i in range(len(part))}
    splits = [options.split] if options.split else ["train"] if in_val else splits_of(data)
    found = {split: verify_split(data, split, options.num_threads, num_classes, options.max_pixels,
                                 options.write_clean_, options.first_label, options.labels, options.near_copies)
             for split in splits}
    if in_val:
        found["train"] = found["train"]._replace(remarks=list(dict.fromkeys([*found["train"].remarks, *part.remarks])))
        found["train"] = leave_out_duplicates(found["train"], [u for u in found["train"].usable if u.name in in_val],
                                              found["train"].classes, is_part=True)
    elif len(found) == 2:
        said = found["train"].remarks
        found["train"] = leave_out_duplicates(found["train"], found["val"].usable, found["val"].classes, is_part=False)
        remarks = [*found["val"].remarks, *class_remarks(*(found[split] for split in ("train", "val")))]
        found["val"] = found["val"]._replace(remarks=[remark for remark in remarks if remark not in said])
    if options.near_copies:  # validation comes first, so that a training image counts as the copy
        order = sorted(found, reverse=True)
        found |= dict(zip(order, name_near_copies([found[split] for split in order]), strict=True))
    return list(found.values())


def bench(options: BenchOptions) -> int:
    """Print the speed of the loader alone, and write it to a file if one is given."""
    config = LoaderConfig(
        data=data_path(options.data),
        split=options.split,
        batch_size=options.batch_size,
        image_size=options.image_size,
        dtype=options.dtype,
        channels=options.channels,
        device=options.device,
        num_threads=options.num_threads,
        hw_decoder_load=options.hw_decoder_load,
        cache_gib=options.cache,
        on_bad_image=options.on_bad_image,
    )
    if options.json_:
        files.check_place(options.json_, "give another --json")
    if not 0 < options.seconds < math.inf:
        raise DataError(f"seconds is {options.seconds:g}; give the time for each stage, above 0")
    title = (f"{options.data} {options.split}, {options.device}, batch {options.batch_size}, {options.image_size} px, "
             f"{options.dtype}")
    stages = bench_stages(config, options.seconds)
    rows = {STAGE_TITLES[stage]: (options.batch_size, speed) for stage, speed in stages.items()}
    _print_speeds(title, "up to this stage", rows)
    settings = list(bench_settings(config, options.seconds)) if options.sweep else []
    if settings:
        named = {", ".join(f"{name} {value}" for name, value in changes.items()) or "as above": (changes, speed)
                 for changes, speed in settings}
        rows = {name: (changes.get("batch_size", options.batch_size), speed)
                for name, (changes, speed) in named.items()}
        _print_speeds(title, "with this changed", rows)
    if options.json_:
        record = {
            "config": dataclasses.asdict(config),
            "unit": "images/sec",
            "stages": [{"stage": stage, **speed._asdict()} for stage, speed in stages.items()],
            "settings": [{"changes": changes, **speed._asdict()} for changes, speed in settings],
        }
        files.write(options.json_, json.dumps(record, indent=1).encode() + b"\n")
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


def show(options: ShowOptions) -> int:
    """Write a contact sheet of samples. Raises UserError, also for an option that would have no effect on the samples.
    """
    plugins.load(options.plugin)
    given = [name for name, default in vars(Augmentation()).items() if getattr(options, name) != default]
    if given and options.split == "val":
        raise DataError(f"{option_name(given[0])} is for training images, and --split val shows those of validation: "
                        "leave out one of them")
    for name in given:
        policies = OF_POLICIES.get(name, (options.auto_augment,))
        if options.auto_augment not in policies:
            raise DataError(f"{option_name(name)} is for --auto-augment {' or '.join(policies)}, and this is "
                            f"{options.auto_augment}: leave it out, or give --auto-augment {policies[0]}")
    config = LoaderConfig(
        data=data_path(options.data),
        labels=options.labels,
        split=options.split,
        batch_size=1,
        image_size=options.image_size,
        seed=options.seed,
        transform=part_of(ImageTransform, vars(options)),
        device=options.device,
        on_bad_image=options.on_bad_image,
    )
    title = f"{options.data}: {options.split}, {options.image_size} px"
    if options.each:
        sheet = augmentation_sheet(config, options.columns, title)
    else:
        with open_loader(config) as loader:
            sheet = contact_sheet(loader, options.rows, options.columns, title)
    save(sheet, options.output)
    print(options.output)
    return 0


def make_sample_set(options: MakeSamplesOptions) -> int:
    """Draw the built-in sample set."""
    num_train = NUM_TRAIN if options.num_train is None else options.num_train
    num_val = NUM_VAL if options.num_val is None else options.num_val
    made = make_samples(options.output, num_train, num_val, options.seed, options.num_threads)
    already = "" if made else " (was there already)"
    print(f"{options.output}: {num_train} training and {num_val} validation images of each of {len(PATTERNS)} "
          f"classes{already}")
    return 0
