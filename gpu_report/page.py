"""The pages of a GPU report: report.md, report.html with its plots inside, PNG plots, and report.json."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from gpu_report import plots as gpu_plots
from gpu_report.datasheets import datasheet_of
from gpu_report.figures import PRICE, Figure, Report, Section, precisions_of, shown
from gpu_report.kernels import CONVOLUTION, COPY, GEMM, PASSES, TOTAL
from train.report.document import Block, Code, Heading, Plot, Table, Text, Tiles
from train.report.page import write_pages
from train.report.plots import Drawing, Theme

KERNELS = {GEMM: "Products of matrices", TOTAL: "Convolutions, all three passes together",
           **{f"{CONVOLUTION} {direction}": f"Convolutions, {direction}" for direction in PASSES}}
Drawings = dict[str, Callable[[Theme], Drawing]]  # file name -> function that draws the file


def check_page(report: Report) -> None:
    """Raise ValueError, with the place in the file, for a figure that no section measures and no page can show. A file
    that was edited by hand, or has published figures, may contain one.
    """
    for name in ("hardware", "versions"):
        if not isinstance(report.about.get(name, {}), dict):
            raise ValueError(f"about.{name} is {reprlib.repr(report.about[name])}")
    for name, section in report.sections.items():
        for i, figure in enumerate(section.figures):
            if not _has_place(name, figure):
                raise ValueError(f"sections.{name}.figures[{i}] is {figure.what}, {figure.size}, "
                                 f"{figure.precision or 'of no precision'}, in {figure.unit}")


def _has_place(section: str, figure: Figure) -> bool:
    """Whether the page has a place for the figure in this section."""
    match section:
        case "kernels":
            return figure.what == COPY or (figure.what in KERNELS and _is_timed(figure))
        case "recurrent":
            return _is_timed(figure)
        case "training":
            return _is_rate(figure) and re.match(r"ResNet-\d+,", figure.what) is not None
        case "inference":
            return _is_rate(figure) and re.fullmatch(r"batch \d{1,9}", figure.size) is not None
        case "cost":
            return figure.unit != "top-1 %" or "seconds" in figure.more
    return False


def _is_timed(figure: Figure) -> bool:
    """Whether the figure is a time, like the figures of kernels and layers."""
    return figure.unit == "ms" and bool(figure.precision) and "tflops" in figure.more


def _is_rate(figure: Figure) -> bool:
    """Whether the figure is a rate, like the figures of networks."""
    return figure.unit == "images/sec" and bool(figure.precision)


def write_page(folder: Path, report: Report) -> None:
    """Write all files of the report into `folder`. Raises UserError if the folder cannot be written."""
    drawings: Drawings = {}
    tiles = _tiles(report)
    blocks: list[Block] = [*([Tiles(tiles)] if tiles else []), *_made(report)]
    writers: dict[str, Callable[[Report, Section, Drawings], list[Block]]] = {
        "kernels": _kernels, "recurrent": _recurrent, "training": _training, "inference": _inference, "cost": _cost}
    for name, describe in writers.items():
        if section := report.sections.get(name):
            blocks += describe(report, section, drawings)
    blocks += [*_uncertain(report), *_left_out(report, [name for name in writers if name not in report.sections]),
               *_machine(report)]
    write_pages(folder, f"{report.device}: what it can do", blocks, drawings, report.to_dict())


def _tiles(report: Report) -> list[tuple[str, str]]:
    """The main figures, for the top of the page."""
    found = []
    for what, name, words in (
        (GEMM, "kernels", "TFLOP/s in the best product of matrices, {precision}"),
        (COPY, "kernels", "GB/s in a copy within its memory"),
        ("ResNet-50, 224 pixels", "training", "images/sec in training, ResNet-50, {precision}"),
        ("ResNet-50, 224 pixels", "inference", "images/sec in inference, ResNet-50, {precision}"),
    ):
        own = [figure for figure in _of(report, name) if figure.what == what]
        if own:
            best = max(own, key=_speed)
            found.append((_number(_speed(best)), words.format(precision=best.precision)))
    found += [(f"{figure.value:,.1f} s", f"{figure.size}, {figure.what}")
              for figure in _of(report, "cost") if figure.unit == "s" and figure.size.startswith("to ")]
    return found


def _of(report: Report, section: str) -> Sequence[Figure]:
    return report.sections[section].figures if section in report.sections else ()


def _speed(figure: Figure) -> float:
    return figure.more["tflops"] if figure.unit == "ms" else figure.value


def _made(report: Report) -> list[Block]:
    if "command" not in report.about:
        return []
    text = f"Measured {shown(str(report.about.get('date', '')))}, by:"
    return [Text(text), Code(str(report.about["command"])), *map(Text, report.beside)]


# --- the sections ---


def _kernels(report: Report, section: Section, drawings: Drawings) -> list[Block]:
    figures, sheet, share = section.figures, datasheet_of(report.device), "of_datasheet"
    promised = f"the datasheet's, without sparsity ({sheet.source}), and of " if sheet else ""
    blocks: list[Block] = [
        Heading("Kernels"),
        Text(f"Products of matrices and convolutions in DeepBench's sizes. Shares are of {promised}the best product "
             "measured in the same precision. Operands are the same in each repetition, so small ones stay in the "
             "cache. Products in FP8 and INT8 read A transposed and B not, "
             "whatever the letters of their size say; convolutions in them are forward passes with bias and ReLU."),
    ]
    if best := list(_best(figures)):
        blocks.append(Table(("precision", "best product", "of the datasheet", "best convolution", "of the datasheet",
                             "of the best product"), best))
    blocks += [Text(f"Copy of {figure.size} within the memory: {_number(figure.value)} GB/s, read and written"
                    + (f", {_share(figure, share)} of the datasheet's bandwidth" if share in figure.more else "") + ".")
               for figure in figures if figure.what == COPY]
    groups = {"gemm.png": ("Products of matrices", [GEMM]),
              "convolution.png": ("Convolutions", [f"{CONVOLUTION} {direction}" for direction in PASSES])}
    for file, (title, kinds) in groups.items():
        if own := [figure for figure in figures if figure.what in kinds]:
            drawings[file] = partial(gpu_plots.kernels, own, {GEMM: title})
            blocks.append(Plot(file, f"{title}: TFLOP/s by size and precision."))
    for what in dict.fromkeys(figure.what for figure in figures if "tflops" in figure.more):
        rows = [figure for figure in figures if figure.what == what]
        blocks += [Text(f"{KERNELS[what]}:"), _kernel_table(rows)]
    return blocks


def _best(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    rows = []
    for precision in precisions_of(figures):
        row = [precision]
        for is_gemm in (True, False):
            own = [figure for figure in figures if figure.precision == precision and "tflops" in figure.more
                   and figure.what != TOTAL and (figure.what == GEMM) == is_gemm]
            best = max(own, key=_speed, default=None)
            row += [f"{_speed(best):,.4g} TFLOP/s" if best else "-", _share(best, "of_datasheet")]
            row += [] if is_gemm else [_share(best, "of_best_gemm")]
        rows.append(tuple(row))
    return rows


def _share(figure: Figure | None, name: str) -> str:
    return f"{figure.more[name]:.0%}" if figure and name in figure.more else "-"


def _kernel_table(figures: Sequence[Figure]) -> Table:
    """A row for each size and precision."""
    rows = [(figure.size, figure.precision, _number(figure.value), _error(figure), _number(figure.more["tflops"]),
             _share(figure, "of_datasheet"), _share(figure, "of_best_gemm")) for figure in figures]
    sizes = "m x n x k" if figures[0].what == GEMM else "images x height x width x channels, filters"
    return Table((sizes, "precision", "ms", "+/-", "TFLOP/s", "of the datasheet", "of the best product"), rows,
                 folded=_timings(rows))


def _timings(rows: Sequence[object]) -> str:
    return f"{len(rows)} timing{'s' * (len(rows) > 1)}"


def _recurrent(report: Report, section: Section, drawings: Drawings) -> list[Block]:
    if not section.figures:
        return []
    drawings["recurrent.png"] = partial(gpu_plots.kernels, section.figures, {})
    rows = [(figure.what, figure.size, figure.precision, _number(figure.value), _error(figure),
             _number(figure.more["tflops"])) for figure in section.figures]
    return [
        Heading("Recurrent layers"),
        Text("One layer, with as many features as hidden units: forward pass and all gradients, and the forward pass "
             "alone as inference has it. TFLOP/s count the products of matrices."),
        Plot("recurrent.png", "TFLOP/s of recurrent layers by size and precision."),
        Table(("layer", "size", "precision", "ms", "+/-", "TFLOP/s"), rows, folded=_timings(rows)),
    ]


def _training(report: Report, section: Section, drawings: Drawings) -> list[Block]:
    figures = sorted(section.figures, key=lambda figure: int(figure.what.split(",")[0].removeprefix("ResNet-")))
    if not figures:
        return []
    drawings["training.png"] = partial(gpu_plots.bars, figures, "Training", "images/sec")
    base = {figure.what: figure.value for figure in figures if figure.precision == "fp32"}
    rows = [(figure.what, figure.precision, figure.size.removeprefix("batch "), f"{figure.value:,.1f}", _error(figure),
             f"{figure.value / base[figure.what]:.2f}" if figure.what in base else "-",
             _more(figure, "memory_gib", ".1f"), _more(figure, "largest_batch", ",.0f"),
             _more(figure, "joules_per_image", ".3g"),
             _more(figure, "watts", ".0f"), _more(figure, "sm_mhz", ".0f")) for figure in figures]
    return [
        Heading("Training"),
        Text("Whole steps (forward, loss, backward, SGD with momentum) on generated images. Memory is all that is in "
             "use on the device, on a CPU by the process; the largest batch is what all of the memory would hold, on a "
             "GPU with less than 2^31 elements in each tensor (ResNets at 224 pixels: 2,674 images)."),
        Plot("training.png", "Images/sec in training, by network and precision."),
        Table(("network", "precision", "batch", "images/sec", "+/-", "times fp32", "GiB", "largest batch", "J/image",
               "W", "MHz"), rows),
    ]


def _inference(report: Report, section: Section, drawings: Drawings) -> list[Block]:
    if not section.figures:
        return []
    order = precisions_of(section.figures)
    figures = sorted(section.figures, key=lambda each: (order.index(each.precision), gpu_plots.batch_of(each)))
    drawings["inference.png"] = partial(gpu_plots.over_batches, figures)
    rows = [(figure.precision, figure.size.removeprefix("batch "), f"{figure.value:,.1f}", _error(figure),
             _more(figure, "latency_p50_ms", ".2f"), _more(figure, "latency_p90_ms", ".2f"),
             _more(figure, "memory_gib", ".1f"), _more(figure, "joules_per_image", ".3g"),
             _more(figure, "watts", ".0f"))
            for figure in figures]
    return [
        Heading("Inference"),
        Text(f"{figures[0].what}, from a batch in the device's memory to its probabilities in the host's, passes one "
             "behind the other; latencies of passes that run alone."),
        Plot("inference.png", "Images/sec and latency over the batch size, by precision."),
        Table(("precision", "batch", "images/sec", "+/-", "p50 ms", "p90 ms", "GiB", "J/image", "W"), rows),
    ]


def _cost(report: Report, section: Section, drawings: Drawings) -> list[Block]:
    epochs = [figure for figure in section.figures if figure.unit == "top-1 %"]
    if not epochs:
        return []
    spans = [figure for figure in section.figures if figure.unit == "s"]
    prices = {figure.size: figure.value for figure in section.figures if figure.unit == PRICE}
    per_second = next((prices[span.size] / span.value for span in reversed(spans) if span.size in prices), 0.0)
    drawings["accuracy.png"] = partial(gpu_plots.accuracy, epochs, epochs[0].what, per_second)
    rows = [(figure.size, f"{figure.value:,.1f} s", f"{prices[figure.size]:,.3g}" if figure.size in prices else "-",
             _more(figure, "startup_seconds", ".1f")) for figure in spans]
    return [
        Heading("Time and cost to accuracy"),
        Text(f"{epochs[0].what}, {epochs[0].precision}: a whole run of the training program, {len(epochs)} epochs, "
             f"which end at {epochs[-1].value:.1f} % top-1. Time is from the beginning of the first step to the end of "
             "a validation, without the writing of checkpoints; starting the program, which chooses kernels the first "
             "time, is apart."),
        Plot("accuracy.png", "Validation top-1 over the time of the run" + (", and its price." if prices else ".")),
        Table(("", "time", "price", "starting, s"), rows),
    ]


# --- remarks ---


def _uncertain(report: Report) -> list[Block]:
    """A list of the repeated timings whose error is above 1 %."""
    figures = [figure for section in report.sections.values() for figure in section.figures]
    if not any(figure.limit or figure.error is not None for figure in figures):
        return []
    rows = [(name, figure.what, figure.size, figure.precision, _error(figure), figure.limit)
            for name, section in report.sections.items() for figure in section.figures if figure.limit]
    if not rows:
        return [Text("Each timing was repeated until the standard error of its median, the +/- of the tables, was "
                     "under 1 %.")]
    return [Heading("Not known to 1 %"),
            Text("Each timing is repeated until the standard error of its median, the +/- of the tables, is under 1 %, "
                 "but for these, which ended at a limit."),
            Table(("section", "", "size", "precision", "+/-", "limit"), rows,
                  folded=_timings(rows) if len(rows) > 12 else "")]


def _left_out(report: Report, missing: Sequence[str]) -> list[Block]:
    notes = [(name, note) for name, section in report.sections.items() for note in section.notes]
    notes += [(name, "not measured: add it with --sections") for name in missing]
    if not notes:
        return []
    return [Heading("Left out"), Table(("section", ""), notes, folded=f"{len(notes)} notes" if len(notes) > 12 else "")]


def _machine(report: Report) -> list[Block]:
    hardware, versions = report.about.get("hardware", {}), report.about.get("versions", {})
    seconds = {f"seconds of {name}": f"{section.seconds:.0f}" for name, section in report.sections.items()}
    values = {**hardware, "executor": report.about.get("executor"), "commit": report.about.get("commit"), **versions,
              **seconds}
    rows = [(name.replace("_", " "), ", ".join(value) if isinstance(value, list) else str(value))
            for name, value in values.items() if value not in (None, [])]
    return [Heading("Machine and versions"), Table(("", ""), rows)]


def _more(figure: Figure, name: str, form: str) -> str:
    return format(figure.more[name], form) if name in figure.more else "-"


def _error(figure: Figure) -> str:
    return "-" if figure.error is None else f"{figure.error:.1%}"


def _number(value: float) -> str:
    """The value with three significant digits, or with all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
