"""The report of a run: report.md, report.html (one file, with all plots in it), PNG plots, report.json and
dawnbench.tsv.

    python -m train.report.page RUN_FOLDER        # makes the report of a run again, from the run's metrics.jsonl
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common import files, plugins
from common.command_line import exit_code_of, given
from train.options.data import SYNTHETIC
from train.options.optimizer import LOSSES, SOFTMAX
from train.recording.metrics import EVALUATED, VALIDATION, RunRecord, accuracy_of, shown_interval
from train.report import classifier, language_model, plots, predictions
from train.report.classifier import Classifier
from train.report.document import Block, Code, Heading, Plot, Table, Text, Tiles, duration, html_page, markdown
from train.report.predictions import Predictions
from train.report.runs import Run
from train.report.summary import Summary, summarize


def write_report(folder: Path, record: RunRecord) -> Path:
    """Write all files of a report into `folder`; returns the path of report.md.

    Predictions and a classifier in the folder (`train.report.predictions`, `classifier`) are included.

    Raises UserError for a run without a single step, or a folder that cannot be written.
    """
    summary = summarize(record)
    figures: dict[str, Callable[[plots.Theme], plots.Drawing]] = {
        "throughput.png": lambda theme: plots.throughput(record, theme),
        "time_split.png": lambda theme: plots.time_split(summary.time_split_seconds, theme),
    }
    known = language_model.facts(record)
    if known:
        figures |= language_model.figures(record, known)
    elif record.loss_curve:
        figures["loss.png"] = lambda theme: plots.loss(record, theme)
    if any(point.power is not None or point.utilization is not None for point in record.gpu_curve):
        figures["gpu.png"] = lambda theme: plots.gpu(record, theme)
    if record.epochs and not known:
        figures["accuracy.png"] = lambda theme: plots.accuracy(record, theme)
    if record.plugin_metrics:
        figures["plugin_metrics.png"] = lambda theme: plots.plugin_metrics(record, theme)
    shown = predictions.read(folder)
    found = classifier.read(folder)
    title, blocks = _contents(record, summary, list(figures), shown, found)
    sheets = {predictions.PICTURE: plots.predictions(shown)} if shown else {}
    values: dict[str, Any] = {"summary": asdict(summary), **record.to_dict()}
    if known:
        values["language_model"] = language_model.to_dict(record, known)
    if found:
        figures |= found.figures
        sheets |= found.sheets
        values["classifier"] = found.to_dict()
    write_pages(folder, title, blocks, figures, values, sheets=sheets)
    if not known:
        files.write(folder / "dawnbench.tsv", dawnbench_tsv(record).encode())
    return folder / "report.md"


def write_validation(folder: Path, title: str, results: Tiles, command: str, found: Classifier,
                     skipped: Sequence[tuple[str, str]] = ()) -> Path:
    """Write the report of a validation into `folder`; returns the path of report.md. `skipped`: (image, reason). Raises
    UserError for a folder that cannot be written."""
    found.save(folder)
    blocks = [results, *_skipped([file for file, _ in skipped], "report.json"), Text("By:"), Code(command)]
    write_pages(folder, title, [*blocks, *found.blocks()], found.figures,
                {"command": command, "skipped": dict(skipped), "classifier": found.to_dict()}, sheets=found.sheets)
    return folder / "report.md"


def write_pages(
    folder: Path, title: str, blocks: Sequence[Block], figures: Mapping[str, Callable[[plots.Theme], plots.Drawing]],
    values: Mapping[str, Any], name: str = "report", sheets: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write the files of a report: PNG plots, `sheets` (PNG files of pictures), name.json with these values, name.md
    and name.html with these blocks. Raises UserError for a folder that cannot be written."""
    drawn = {file: draw(plots.LIGHT) for file, draw in figures.items()}
    light = {file: drawing.svg for file, drawing in drawn.items()}
    dark = {file: plots.darkened(light[file]) or draw(plots.DARK).svg for file, draw in figures.items()}
    contents: dict[str, bytes] = {
        **{file: drawing.png for file, drawing in drawn.items()},
        **sheets,
        f"{name}.json": json.dumps(values, indent=1).encode(),
        # File names may have bytes that are not text.
        f"{name}.md": markdown(title, blocks).encode(errors="replace"),
        f"{name}.html": html_page(title, blocks, light, dark).encode(errors="replace"),
    }
    for file, content in contents.items():
        files.write(folder / file, content)


def dawnbench_tsv(record: RunRecord) -> str:
    """DAWNBench's table of the validated epochs, accuracies in percent.

    Source: README of github.com/stanford-futuredata/dawn-bench-entries, 'ImageNet Training'.
    """
    lines = ["epoch\thours\ttop1Accuracy\ttop5Accuracy"]
    for row in record.epochs:
        if row.val_top1 is not None and row.val_top5 is not None:
            lines.append(f"{row.epoch}\t{row.hours:.6f}\t{100 * row.val_top1:.3f}\t{100 * row.val_top5:.3f}")
    return "\n".join(lines) + "\n"


# --- contents ---

NUM_NAMED = 3  # skipped images named at the top of a report

CAPTIONS = {
    "throughput.png": "Speed of every training step over the time spent in steps.",
    "time_split.png": "All time of the run, from the start of its command to its end.",
    "gpu.png": "Means between two log lines, over the time spent in steps.",
    "loss.png": "Mean training loss between two log lines; loss on whole images after an epoch.",
    "accuracy.png": "Share of images whose class is the first guess (top-1){}.",
    "plugin_metrics.png": "Metrics of plug-ins after each epoch, on the images that the accuracy is measured on.",
}


def _contents(
    record: RunRecord, summary: Summary, figures: Sequence[str], shown: Predictions | None, found: Classifier | None
) -> tuple[str, list[Block]]:
    """Title and blocks."""
    known = language_model.facts(record)
    name = f"{record.model or 'unknown network'}, {record.config.get('config', 'run')}"
    title = f"{language_model.name(record) if known else name}: training report"
    where = ", ".join(record.hardware.get("gpus") or [record.hardware.get("cpu", "unknown CPU")])
    tiles: list[tuple[str, str]] = []
    best_weights: list[Block] = []
    if known:
        tiles += language_model.tiles(record, known)
    elif summary.best and (best := summary.best.evaluation):
        likely = shown_interval(best.top1, best.num_images)
        tiles += [(f"{best.top1:.1%}", f"{accuracy_of(best.images)}, epoch {summary.best.epoch}"
                   + f"; 95 % interval: {likely}" * bool(likely))]
        best_weights += [_weights_shown(summary.best.epoch, shown, found)]
        tiles += [(f"{best.top5:.1%}", "top-5 of the same epoch")] * record.tells_top5
        if best.balanced_top1 is not None:
            tiles += [(f"{best.balanced_top1:.1%}", "balanced accuracy of the same epoch")]
        tiles += [(f"{value:.4g}", f"{name} of the same epoch") for name, value in summary.best.plugin_metrics.items()]
    tiles += [(f"{summary.total.mean:,.1f}", f"{record.examples}/sec in total")]
    tiles += [(duration(record.seconds), f"on {record.num_processes} process{'es' * (record.num_processes > 1)}")]
    if summary.price is not None:
        tiles += [(_amount(summary.price), "price of the run")]
    blocks: list[Block] = [
        Tiles(tiles),
        *best_weights,
        *_skipped(list(dict.fromkeys(event["file"] for event in record.events if event["event"] == "bad_image")),
                  "the events"),
        Text(f"Started {_date(record.start_date)} on {where}, {_images_per_step(record)} {record.examples} per step, "
             "by:"),
        Code(record.command),
    ]
    blocks += _learning(record, figures, known)
    if shown:
        blocks += [Heading("What it has learned"), shown.block(predictions.PICTURE, shown.caption)]
    if found:
        blocks += found.blocks(summary.best.epoch if summary.best else 0)
    blocks += [
        Heading("Throughput"),
        Text(summary.limit_text),
        _throughput_table(record, summary),
        Text(
            f"{summary.num_steps_counted:,} {'step is' if summary.num_steps_counted == 1 else 'steps are'} counted; "
            f"the first {record.warmup_steps} of each session "
            f"({summary.num_steps_warmup:,} in all) are warm-up and left out. Uncertainty and jitter as in "
            "tf_cnn_benchmarks: standard error of the mean, and 1.4826 x median absolute deviation."
        ),
        Plot("throughput.png", CAPTIONS["throughput.png"]),
        Heading("Time"),
        Plot("time_split.png", CAPTIONS["time_split.png"]),
        Table(
            ("part", "time", "share"),
            [
                (name, duration(seconds), f"{seconds / max(sum(summary.time_split_seconds.values()), 1e-9):.1%}")
                for name, seconds in summary.time_split_seconds.items()
            ],
        ),
    ]
    if record.start_seconds:
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in record.start_seconds.items())
        blocks += [Text(f"The start, before anything is recorded: {parts}.")]
    blocks += _gpu_blocks(record, summary, figures)
    if record.events:
        blocks += [Heading("Events"), _event_table(record)]
    blocks += [
        Heading("Machine and versions"),
        Table(("", ""), [(name, _plain(value)) for name, value in _environment(record).items()]),
        Heading("Configuration"),
        Table(("option", "value"), [(k, _plain(v)) for k, v in _flat(record.config).items()], folded="All options"),
    ]
    return title, blocks


def _weights_shown(epoch: int, shown: Predictions | None, found: Classifier | None) -> Text:
    """A sentence that states which weights the page describes."""
    of_others = {each.epoch for each in (shown, found) if each and each.epoch != epoch}
    what = "Accuracy" if of_others or not found else "Accuracy, classifier and pictures" if shown else (
        "Accuracy and classifier")
    verb = "is that" if what == "Accuracy" else "are those"
    return Text(f"{what} {verb} of epoch {epoch}, whose weights predict, validate and export take "
                f"(checkpoints/best.npz).")


def _learning(record: RunRecord, figures: Sequence[str], known: language_model.Facts | None) -> list[Block]:
    """Loss and accuracy by epoch."""
    blocks: list[Block] = []
    if record.loss_curve or record.epochs:
        blocks += [Heading("Learning")]
        top5 = " or among the first five (top-5)" * record.tells_top5
        plotted = ("loss.png", "accuracy.png", "plugin_metrics.png")
        blocks += [Plot(name, CAPTIONS[name].format(top5)) for name in plotted if name in figures and not known]
    if record.skipped_steps:
        blocks += [Text(f"{record.skipped_steps:,} of {len(record.step_ms):,} steps changed no weight, since a "
                        "gradient was not finite (the loss scale of float16 is halved then).")]
    if (loss := record.config.get("loss", SOFTMAX)) not in LOSSES:
        blocks += [Text(f"Trained with the loss {loss} of a plug-in "
                        f"({', '.join(map(plugins.brief, record.config.get('plugin', ())))}).")]
    if mixing := [f"--{name}" for name in ("mixup", "cutmix") if record.config.get(name)]:
        blocks += [Text(f"Training loss and accuracy are those of mixed images ({', '.join(mixing)}), which are harder "
                        "than whole ones.")]
    if known:
        blocks += language_model.blocks(record, known)
    elif record.epochs:
        blocks += [_epoch_table(record)]
    return blocks


def _images_per_step(record: RunRecord) -> str:
    """Images per step as text; if sessions differ, the number of each session."""
    sessions = record.session_images or [record.images_per_step]  # this list is empty in older reports
    return ", then ".join(str(number) for number, _ in itertools.groupby(sessions))


def _skipped(files: Sequence[str], all_in: str) -> list[Block]:
    """The number of skipped images, the first names, and the place of the full list; empty if no image was skipped."""
    if not files:
        return []
    named = ", ".join(files[:NUM_NAMED]) + ", ..." * (len(files) > NUM_NAMED)
    count = "1 image was" if len(files) == 1 else f"{len(files):,} images were"
    return [Text(f"{count} skipped, which cannot be decoded (see {all_in}): {named}")]


def _gpu_blocks(record: RunRecord, summary: Summary, figures: Sequence[str]) -> list[Block]:
    """The GPUs' readings and the price; nothing for a run on a CPU without a price."""
    problems = [event["problem"] for event in record.events if event["event"] == "gpu_readings"]
    rows: list[tuple[str, str, str]] = []
    if record.gpu_curve:
        several = " together" if record.num_processes > 1 else ""
        for name, value, form, what in (
            ("utilisation", summary.gpu_utilization, "{:.0%}", "of the time a kernel was running"),
            ("power", summary.gpu_power, "{:,.0f} W", f"of the GPU{'s' * bool(several)}{several}"),
            ("energy", summary.joules_per_image, "{:.3g} J", f"per {record.examples[:-1]}, in training steps"),
            ("memory", summary.gpu_memory, "{:.1f} GiB", "at most, of all programs together"),
            ("clock", summary.gpu_clock, "{:,.0f} MHz", "of the multiprocessors"),
            ("at the power limit", summary.gpu_power_capped, "{:.0%}", "of the time that limit held the clock down"),
        ):
            rows.append((name, "not known" if value is None else form.format(value), what))
    if summary.price is not None:
        rows.append(("price", _amount(summary.price), f"at {record.config['price_per_hour']:g} an hour"))
    blocks: list[Block] = []
    if rows or problems:
        blocks += [Heading("GPU and price" if record.gpu_curve or problems else "Price")]
    if rows:
        blocks += [Table(("", "", ""), rows)]
    if "gpu.png" in figures:
        blocks += [Plot("gpu.png", CAPTIONS["gpu.png"])]
    return blocks + [Text(f"{problem}.") for problem in dict.fromkeys(problems)]


def _amount(price: float) -> str:
    return f"{price:,.2f}" if price >= 1 else f"{price:.2g}"


def _throughput_table(record: RunRecord, summary: Summary) -> Table:
    total = summary.total
    loader = summary.loader_images_per_sec
    how = "synthetic images, nothing to load" if record.config.get("data") == SYNTHETIC else "the loader running alone"
    return Table(
        ("", f"{record.examples}/sec", ""),
        [
            ("total", f"{total.mean:,.1f}", total.spread),
            ("total, median step", f"{summary.total_median:,.1f}", f"+/- {summary.total_spread:,.1f} (half IQR)"),
            ("compute-only", f"{summary.compute_images_per_sec:,.1f}", "steps without their wait for a batch"),
            ("loader-only", f"{loader:,.1f}" if loader else "not measured", how),
            ("whole run", f"{summary.whole_run_images_per_sec:,.1f}",
             f"training {record.examples} over all the time of the run"),
        ],
    )


def _epoch_table(record: RunRecord) -> Table:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    seen = {row.evaluation.images for row in record.epochs if row.evaluation} or {VALIDATION}
    figures = (("top1", ".2%", "top-1"), *[("top5", ".2%", "top-5")] * record.tells_top5, ("loss", ".4f", "loss"))
    prefixes = {images: prefix for images, prefix in EVALUATED.items() if images in seen}
    headings = [f"val {name}" if images == VALIDATION else f"{name} on the {images}"
                for images in prefixes for *_, name in figures]
    some_skipped = any(row.skipped_images for row in record.epochs)
    return Table(
        ("epoch", *headings, *record.plugin_metrics, "train top-1", "train loss", "images/sec", "time",
         *["skipped"] * some_skipped),
        [
            (
                str(row.epoch),
                *(number(getattr(row, f"{prefix}_{field}"), form) for prefix in prefixes.values()
                  for field, form, _ in figures),
                *(number(row.plugin_metrics.get(name), ".4g") for name in record.plugin_metrics),
                number(row.train_top1, ".2%"), number(row.train_loss, ".4f"), number(row.images_per_sec, ",.1f"),
                duration(3600 * row.hours),
                *[f"{row.skipped_images:,}"] * some_skipped,
            )
            for row in record.epochs
        ],
    )


def _event_table(record: RunRecord) -> Table:
    rows = []
    for event in record.events:
        if event["event"] == language_model.EVENT:  # shown in a separate table
            continue
        rest = {key: value for key, value in event.items() if key not in ("event", "time", "step")}
        if "date" in rest:
            rest["date"] = _date(rest["date"])
        what = ", ".join(f"{key.replace('_', ' ')}: {_plain(value)}" for key, value in rest.items())
        rows.append((duration(event["time"]), str(event.get("step", "")), event["event"].replace("_", " "), what))
    return Table(("time", "step", "event", ""), rows, folded=f"{len(rows)} events" if len(rows) > 12 else "")


HARDWARE = {"cpu": "CPU", "cpu_cores": "CPU cores", "memory_gib": "memory, GiB", "gpus": "GPUs"}


def _environment(record: RunRecord) -> dict[str, Any]:
    hardware = {HARDWARE.get(name, name): value for name, value in record.hardware.items() if value != []}
    return {**hardware, "processes": record.num_processes, "commit": record.git_commit, **record.versions}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return ", ".join(map(_plain, value)) or "none" if isinstance(value, (list, tuple)) else str(value)


def _date(iso: str) -> str:
    return iso.replace("T", " ").replace("+00:00", " UTC")


@dataclass(frozen=True)
class ReportOptions:
    """Make the report of a run again."""

    run_folder: Path
    """Output folder of a training run, with its metrics.jsonl."""


def remake(run_folder: Path) -> None:
    """Make the report of a run again. Raises TrainError."""
    print(write_report(run_folder / "report", Run.read(run_folder).record))


def main() -> None:
    remake(**given(ReportOptions, sys.argv[1:], prog="python -m train.report.page"))


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
