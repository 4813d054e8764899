"""The report of a run: report.md, report.html (one file, plots inlined), PNG plots, report.json and dawnbench.tsv.

    python -m train.report RUN_FOLDER        # makes the report of a run anew from its metrics.jsonl
"""

from __future__ import annotations

import base64
import html
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from train import files, plots
from train.errors import TrainError
from train.metrics import METRICS_FILE, EpochRow, RunRecord, Speed

WAIT_SHARE_THAT_LIMITS = 0.1  # of the step time; used only where the loader's own speed was not measured


@dataclass(frozen=True)
class Summary:
    """The figures that a report opens with. Throughputs are images/sec of all processes together, warm-up excluded.

    Total: steps from asking for the batch to updated parameters. Compute-only: the same without waiting for batches.
    Loader-only: the loader running alone. Whole run: all images over all the time, validation and the rest included.
    """

    total: Speed
    total_median: float
    total_spread: float  # half the interquartile range of the steps' speeds
    compute_images_per_sec: float
    loader_images_per_sec: float | None
    whole_run_images_per_sec: float
    loader_wait_share: float  # of the time of the steps counted
    num_steps_counted: int
    num_steps_warmup: int
    limit: str  # "loader" or "computation"
    limit_text: str
    time_split_seconds: dict[str, float]
    best: EpochRow | None  # the epoch with the highest validation top-1


def summarize(record: RunRecord) -> Summary:
    """Figures of a run from its raw step times. Raises TrainError for a run without a single step."""
    if not record.step_ms:
        raise TrainError(f"the run '{record.command}' has no finished step to report on: let it run longer")
    counted = record.counted_steps
    step_ms = np.asarray(record.step_ms)[counted]
    wait_ms = np.asarray(record.loader_wait_ms)[counted]
    compute_ms = np.asarray(record.compute_ms)[counted]
    speeds = record.images_per_step / (step_ms / 1e3)
    quartile1, median, quartile3 = np.percentile(speeds, (25, 50, 75))
    compute = record.images_per_step / (compute_ms.mean() / 1e3)
    wait_share = float(wait_ms.sum() / step_ms.sum())
    limit, text = _limit(compute, record.loader_images_per_sec, wait_share)
    split = {
        "computation": sum(record.compute_ms) / 1e3,
        "waiting for the loader": sum(record.loader_wait_ms) / 1e3,
        **record.phase_seconds,
    }
    split["set-up and other"] = max(record.seconds - sum(split.values()), 0.0)
    validated = [row for row in record.epochs if row.val_top1 is not None]
    return Summary(
        total=record.speed(),
        total_median=float(median),
        total_spread=float(quartile3 - quartile1) / 2,
        compute_images_per_sec=float(compute),
        loader_images_per_sec=record.loader_images_per_sec,
        whole_run_images_per_sec=record.images_per_step * len(record.step_ms) / record.seconds,
        loader_wait_share=wait_share,
        num_steps_counted=len(counted),
        num_steps_warmup=len(record.step_ms) - len(counted),
        limit=limit,
        limit_text=text,
        time_split_seconds=split,
        best=max(validated, key=lambda row: row.val_top1 or 0.0, default=None),
    )


def _limit(compute: float, loader: float | None, wait_share: float) -> tuple[str, str]:
    """Which of the two is slower, and that in words."""
    waiting = f"steps spend {wait_share:.1%} of their time waiting for a batch"
    if loader is None:
        if wait_share > WAIT_SHARE_THAT_LIMITS:
            return "loader", f"The loader limits this run: {waiting}."
        return "computation", f"Computation limits this run: {waiting}."
    if loader < compute:
        return "loader", (
            f"The loader limits this run: alone it delivers {loader:,.1f} images/sec, and the computation could take "
            f"{compute:,.1f}; {waiting}. More loader threads, images resized on disk or GPU decoding would help."
        )
    times = loader / compute
    return "computation", (
        f"Computation limits this run: it takes {compute:,.1f} images/sec, and the loader alone delivers "
        f"{loader:,.1f}, {f'{times:,.0f}' if times > 10 else f'{times:.1f}'} times as many; {waiting}."
    )


def write_report(folder: Path, record: RunRecord) -> Path:
    """Write all files of a report into `folder`; returns the path of report.md.

    Raises TrainError for a run without a single step and a folder that cannot be written.
    """
    summary = summarize(record)
    figures: dict[str, Callable[[plots.Theme], bytes]] = {
        "throughput.png": lambda theme: plots.throughput(record, theme),
        "time_split.png": lambda theme: plots.time_split(summary.time_split_seconds, theme),
    }
    if record.loss_curve:
        figures["loss.png"] = lambda theme: plots.loss(record, theme)
    if record.epochs:
        figures["accuracy.png"] = lambda theme: plots.accuracy(record, theme)
    light = {name: draw(plots.LIGHT) for name, draw in figures.items()}
    dark = {name: draw(plots.DARK) for name, draw in figures.items()}

    title, blocks = _contents(record, summary, list(figures))
    contents: dict[str, bytes] = {
        **light,
        "report.json": json.dumps({"summary": asdict(summary), **record.to_dict()}, indent=1).encode(),
        "report.md": _markdown(title, blocks).encode(),
        "report.html": _html(title, blocks, light, dark).encode(),
        "dawnbench.tsv": dawnbench_tsv(record).encode(),
    }
    for name, content in contents.items():
        files.write(folder / name, content)
    return folder / "report.md"


def dawnbench_tsv(record: RunRecord) -> str:
    """DAWNBench's table of the validated epochs, accuracies in percent.

    Source: README of github.com/stanford-futuredata/dawn-bench-entries, 'ImageNet Training'.
    """
    lines = ["epoch\thours\ttop1Accuracy\ttop5Accuracy"]
    for row in record.epochs:
        if row.val_top1 is not None and row.val_top5 is not None:
            lines.append(f"{row.epoch}\t{row.hours:.6f}\t{100 * row.val_top1:.3f}\t{100 * row.val_top5:.3f}")
    return "\n".join(lines) + "\n"


# --- contents: one list of blocks, rendered as Markdown and as HTML ---


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Plot:
    file: str
    caption: str


@dataclass(frozen=True)
class Tiles:
    """A few figures to see first: (value, what it is)."""

    figures: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: str = ""  # title under which HTML hides a long table


Block = Heading | Text | Code | Plot | Tiles | Table

CAPTIONS = {
    "throughput.png": "Speed of every training step over the time spent in steps.",
    "time_split.png": "All time of the run, from its start to its end.",
    "loss.png": "Mean training loss between two log lines; validation loss after an epoch.",
    "accuracy.png": "Share of images whose class is the first guess (top-1) or among the first five (top-5).",
}


def _contents(record: RunRecord, summary: Summary, figures: Sequence[str]) -> tuple[str, list[Block]]:
    title = f"ResNet-{record.config.get('depth', '?')}, {record.config.get('config', 'run')}: training report"
    where = ", ".join(record.hardware.get("gpus") or [record.hardware.get("cpu", "unknown CPU")])
    tiles = [(f"{summary.total.mean:,.1f}", "images/sec in total")]
    if summary.best and summary.best.val_top1 is not None and summary.best.val_top5 is not None:
        tiles += [(f"{summary.best.val_top1:.1%}", f"validation top-1, epoch {summary.best.epoch}")]
        tiles += [(f"{summary.best.val_top5:.1%}", "top-5 of the same epoch")]
    tiles += [(_duration(record.seconds), f"on {record.num_processes} process{'es' * (record.num_processes > 1)}")]
    blocks: list[Block] = [
        Tiles(tiles),
        Text(summary.limit_text),
        Text(f"Started {record.start_date} on {where}, {record.images_per_step} images per step, by:"),
        Code(record.command),
        Heading("Throughput"),
        _throughput_table(summary),
        Text(
            f"Counted are {summary.num_steps_counted:,} steps; the first {record.warmup_steps} steps of each session "
            f"({summary.num_steps_warmup:,} in all) are warm-up and excluded. Uncertainty and jitter as in "
            "tf_cnn_benchmarks: standard error of the mean, and 1.4826 x median absolute deviation."
        ),
        Plot("throughput.png", CAPTIONS["throughput.png"]),
        Heading("Time"),
        Plot("time_split.png", CAPTIONS["time_split.png"]),
        Table(
            ("part", "time", "share"),
            [
                (name, _duration(seconds), f"{seconds / max(sum(summary.time_split_seconds.values()), 1e-9):.1%}")
                for name, seconds in summary.time_split_seconds.items()
            ],
        ),
    ]
    if len(figures) > 2:
        blocks += [Heading("Learning")]
        blocks += [Plot(name, CAPTIONS[name]) for name in ("loss.png", "accuracy.png") if name in figures]
    if record.epochs:
        blocks += [_epoch_table(record)]
    if record.events:
        blocks += [Heading("Events"), _event_table(record)]
    blocks += [
        Heading("Machine and versions"),
        Table(("", ""), [(name.replace("_", " "), _plain(value)) for name, value in _environment(record).items()]),
        Heading("Configuration"),
        Table(("option", "value"), [(k, _plain(v)) for k, v in _flat(record.config).items()], folded="All options"),
    ]
    return title, blocks


def _throughput_table(summary: Summary) -> Table:
    total = summary.total
    loader = summary.loader_images_per_sec
    return Table(
        ("", "images/sec", ""),
        [
            ("total", f"{total.mean:,.1f}", f"+/- {total.uncertainty:,.1f} (jitter = {total.jitter:,.1f})"),
            ("total, median step", f"{summary.total_median:,.1f}", f"+/- {summary.total_spread:,.1f} (half IQR)"),
            ("compute-only", f"{summary.compute_images_per_sec:,.1f}", "steps without their wait for a batch"),
            ("loader-only", f"{loader:,.1f}" if loader else "not measured", "the loader running alone"),
            ("whole run", f"{summary.whole_run_images_per_sec:,.1f}", "training images over all the time of the run"),
        ],
    )  # fmt: skip


def _epoch_table(record: RunRecord) -> Table:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return Table(
        ("epoch", "time", "images/sec", "train loss", "train top-1", "val loss", "val top-1", "val top-5"),
        [
            (
                str(row.epoch), _duration(3600 * row.hours), number(row.images_per_sec, ",.1f"),
                number(row.train_loss, ".4f"), number(row.train_top1, ".2%"),
                number(row.val_loss, ".4f"), number(row.val_top1, ".2%"), number(row.val_top5, ".2%"),
            )
            for row in record.epochs
        ],
    )  # fmt: skip


def _event_table(record: RunRecord) -> Table:
    rows = []
    for event in record.events:
        rest = {key: value for key, value in event.items() if key not in ("event", "time", "step")}
        what = ", ".join(f"{key}: {_plain(value)}" for key, value in rest.items())
        rows.append((_duration(event["time"]), str(event.get("step", "")), event["event"].replace("_", " "), what))
    return Table(("time", "step", "event", ""), rows, folded=f"{len(rows)} events" if len(rows) > 12 else "")


def _environment(record: RunRecord) -> dict[str, Any]:
    return {**record.hardware, "processes": record.num_processes, "commit": record.git_commit, **record.versions}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return ", ".join(map(_plain, value)) or "none" if isinstance(value, (list, tuple)) else str(value)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if seconds >= 60 else f"{seconds:.1f} s"


# --- rendering ---


def _markdown(title: str, blocks: Sequence[Block]) -> str:
    parts = [f"# {title}"]
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"## {text}")
            case Text(text):
                parts.append(text)
            case Code(text):
                parts.append(f"    {text}")
            case Plot(file, caption):
                parts.append(f"![{caption}]({file})")
            case Tiles(figures):
                parts.append(" · ".join(f"**{value}** {what}" for value, what in figures))
            case Table(header, rows):
                lines = [header, ["---"] * len(header), *rows]
                cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
                parts.append("\n".join(f"| {' | '.join(line)} |" for line in cells))
    return "\n\n".join(parts) + "\n"


STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1f2328; --muted: #6e7781; --line: #e4e8ec; --soft: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --back: #0f1319; --text: #e6edf3; --muted: #8b949e; --line: #262c35; --soft: #171c24; }
}
body { background: var(--back); color: var(--text); font: 16px/1.55 system-ui, sans-serif; margin: 0; }
main { max-width: 56rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 1.25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.tile { background: var(--soft); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: .85rem; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--muted); font-weight: 600; }
th, td { padding: .3rem 1.25rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .8rem;
      white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
figure { margin: 1rem 0; }
img { width: 100%; height: auto; border-radius: .4rem; }
figcaption { color: var(--muted); font-size: .85rem; }
summary { cursor: pointer; }
"""


def _html(title: str, blocks: Sequence[Block], light: Mapping[str, bytes], dark: Mapping[str, bytes]) -> str:
    text_of = html.escape
    parts = []
    for block in blocks:
        match block:
            case Heading(text):
                parts.append(f"<h2>{text_of(text)}</h2>")
            case Text(text):
                parts.append(f"<p>{text_of(text)}</p>")
            case Code(text):
                parts.append(f"<pre>{text_of(text)}</pre>")
            case Plot(file, caption):
                parts.append(
                    f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{_data_url(dark[file])}">'
                    f'<img src="{_data_url(light[file])}" alt="{text_of(caption)}"></picture>'
                    f"<figcaption>{text_of(caption)}</figcaption></figure>"
                )
            case Tiles(figures):
                tiles = "".join(
                    f'<div class="tile"><b>{text_of(value)}</b><span>{text_of(what)}</span></div>'
                    for value, what in figures
                )
                parts.append(f'<div class="tiles">{tiles}</div>')
            case Table(header, rows, folded):
                head = "".join(f"<th>{text_of(cell)}</th>" for cell in header) if any(header) else ""
                body = "".join(f"<tr>{''.join(f'<td>{text_of(str(c))}</td>' for c in row)}</tr>" for row in rows)
                table = f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
                parts.append(f"<details><summary>{text_of(folded)}</summary>{table}</details>" if folded else table)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text_of(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>{text_of(title)}</h1>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def main(arguments: Sequence[str]) -> None:
    """Make the report of a run folder anew. Raises TrainError for a folder without a run's record."""
    usage = f"usage: python -m train.report RUN_FOLDER (the folder with a run's {METRICS_FILE})"
    if any(argument in ("-h", "--help") for argument in arguments):
        print(usage)
        return
    if len(arguments) != 1:
        raise TrainError(usage)
    folder = Path(arguments[0])
    path = folder / METRICS_FILE
    if not path.is_file():
        raise TrainError(f"there is no {METRICS_FILE} in {folder}: give the output folder of a training run")
    print(write_report(folder / "report", RunRecord.read_jsonl(path)))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TrainError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(2)
