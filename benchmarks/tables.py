"""Puts the figures under results/ into README and docs. Needs no GPU.

    python benchmarks/tables.py

It replaces the text between the lines `<!-- table NAME -->` and `<!-- end of table -->` of a page by the table NAME. A
table's rows are figures measured at the commit of MAIN and, for GPUs, on MAIN's kind of GPU; other figures are left out
until they are measured again. It also updates every number in a page that links to a file under results/.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import scaling_model
from record import RESULTS, ROOT, run

from common.command_line import read_options

MAIN = "resnet50_fp16_b256_synthetic_1gpu"
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
LINKED_NUMBER = re.compile(r"\[([\d,]+(?:\.(\d+))?)([^\]]*)\]\(([^)\s]+\.json)\)")
Figure = dict[str, Any]
# Table row -> the training step's operations, named as in a profile.
OPERATIONS = {
    "convolutions forward, most with statistics": ("fprop_stats", "fprop", "conv1x1_forward", "conv1x1_statistics",
                                                     "conv3x3_forward"),
    "their weight gradients": ("wgrad", "conv3x3_weights"),
    "their data gradients": ("dgrad", "conv3x3_dgrad"),
    "BatchNorm forward": ("batch_norm_apply", "batch_norm_pair_apply"),
    "`norm_conv1x1`": ("norm_conv1x1",),
    "`norm_relu_conv1x1`": ("norm_relu_conv1x1",),
    "`norm_conv3x3`": ("norm_conv3x3",),
    "`dgrad_reduce`": ("dgrad_reduce", "dgrad_stream", "conv3x3_dgrad_reduce"),
    "BatchNorm backward, gradient": ("batch_norm_backward_apply", "batch_norm_pair_backward_apply"),
    "BatchNorm backward, sums": ("batch_norm_backward_reduce", "batch_norm_pair_backward_reduce"),
    "`norm_backward`, and sums of parts": ("norm_backward", "sum_parts"),
    "`norm_dgrad`": ("norm_dgrad",),
    "stem": ("stem_forward", "stem_weights", "stem_fprop", "stem_wgrad", "stem_wgrad_sum", "batch_norm_relu_max_pool",
             "batch_norm_relu_max_pool_backward_reduce"),
    "statistics not taken by a convolution": ("batch_norm_statistics",),
}
# Table row -> operations of inference, in fp16 and in INT8.
INFERENCE = {
    "1x1 convolutions of our own": ("conv1x1_forward",),
    "those that end a block, with the next": ("conv1x1_pair",),
    "3x3 convolutions over 64 channels": ("conv3x3_forward",),
    "convolutions by cuDNN": ("fprop_bias_relu", "fprop_bias", "fprop_bias_add_relu"),
    "stem": ("stem_pool",),
}
INT8 = {
    "1x1 convolutions": ("quantised_conv_stream",),
    "those that end a block, with the next": ("quantised_pair",),
    "3x3 convolutions": ("quantised_conv_taps",),
    "other convolutions": ("quantised_conv",),
    "stem": ("quantise_squares", "quantised_stem_pool"),
}
OTHER = "loss, pooling and the like"


class Row(NamedTuple):
    """A row of the README's table."""

    label: str
    name: str  # the figure's name


README_ROWS = (
    Row("training step, synthetic data", MAIN),
    Row("training step in bf16, synthetic data", "resnet50_bf16_b256_synthetic_1gpu"),
    Row("batch 128", "resnet50_fp16_b128_synthetic_1gpu"),
    Row("batch 64", "resnet50_fp16_b64_synthetic_1gpu"),
    Row("training from ImageNet JPEGs, 16 CPU cores", "resnet50_fp16_b256_jpeg_1gpu"),
    Row("the same with TrivialAugment", "resnet50_fp16_b256_jpeg_trivialaugment_1gpu"),
    Row("the loader alone", "loader_jpeg_1gpu"),
    Row("inference, batch 256", "resnet50_fp16_b256_inference_synthetic_1gpu"),
    Row("inference, batch 32", "resnet50_fp16_b32_inference_synthetic_1gpu"),
    Row("inference, batch 1", "resnet50_fp16_b1_inference_synthetic_1gpu"),
    Row("inference in int8, batch 256", "resnet50_int8_b256_inference_synthetic_1gpu"),
    Row("inference in int8, batch 2,048", "resnet50_int8_b2048_inference_synthetic_1gpu"),
    Row("2 GPUs, synthetic data", "resnet50_fp16_b256_synthetic_2gpu"),
    Row("2 GPUs, from JPEGs", "resnet50_fp16_b256_jpeg_2gpu"),
    Row("4 GPUs, synthetic data", "resnet50_fp16_b256_synthetic_4gpu"),
    Row("4 GPUs, from JPEGs", "resnet50_fp16_b256_jpeg_4gpu"),
    Row("2 CPU cores: step, fp32, batch 32, 64 pixels", "step_cpu"),
    Row("2 CPU cores: loader, to 224 pixels", "loader_cpu"),
    Row("CPU: inference in int8", "resnet50_int8_cpu"),
)
NETWORKS = {"resnet18": "ResNet-18", "resnet34": "ResNet-34", "resnet50": "ResNet-50", "resnet101": "ResNet-101",
            "resnet152": "ResNet-152", "resnet50d": "ResNet-50-D", "resnext50_32x4d": "ResNeXt-50 32x4d",
            "resnext101_32x8d": "ResNeXt-101 32x8d", "wide_resnet50_2": "Wide ResNet-50-2"}
DTYPES = {"fp16": "fp16", "bf16": "bf16", "tf32": "TF32", "fp32": "fp32 without TF32"}


def load(name: str) -> Figure | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def of_one_commit(names: Iterable[str]) -> Iterator[Figure]:
    """The figures that were measured at MAIN's commit and, unless on a CPU, on MAIN's kind of GPU, in order."""
    main = load(MAIN)
    for name in names:
        figure = load(name)
        if main and figure and figure["commit"] == main["commit"] and (
                name.endswith("cpu") or _gpu(figure) == _gpu(main)):
            yield figure


def _gpu(figure: Figure) -> str:
    """The kind of a figure's GPUs, without their number."""
    return str(figure["hardware"]).partition("x ")[2]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def link(figure: Figure, page: Path) -> str:
    return f"[{number(figure['value'])}]({'../' * (page.parent != ROOT)}benchmarks/results/{figure['name']}.json)"


def peer_name(figure: Figure) -> str:
    """The peer's name without its version, which the table's first line states."""
    return re.sub(r"^PyTorch \S+ ", "PyTorch, ", figure["peer"]["name"])


def ratio(figure: Figure) -> str:
    """A figure's ratio to its peer, as text. In percent if the peer is our own figure, which is the upper limit."""
    own = re.search(r"^our |one GPU|without groups", figure["peer"]["name"])
    return f"{figure['ratio']:.1%}".replace("%", " %") if own else f"{figure['ratio']:.2f} times"


def where(figure: Figure) -> str:
    """The machine, versions, commit and day of the main figure."""
    versions = figure["versions"]
    cudnn = next((versions[name] for name in versions if "cudnn" in name and "frontend" not in name), None)
    parts = [figure["hardware"], f"cuDNN {cudnn}" if cudnn else "", "PyTorch " + torch if
             (torch := (figure["peer"] or {}).get("versions", {}).get("torch")) else "",
             f"commit {figure['commit'][:7]}", figure["date"][:10]]
    return ", ".join(part for part in parts if part)


def results_table(page: Path) -> list[str]:
    """The README's table."""
    labels = {row.name: row.label for row in README_ROWS}
    lines: list[str] = []
    for figure in of_one_commit(labels):
        if not lines:
            lines += [f"({where(figure)}; medians, and means in brackets.)", "", "| | images/sec | compared with | |",
                      "|---|---|---|---|"]
        compared = f"{peer_name(figure)}: {number(figure['peer']['value'])}" if figure["peer"] else ""
        lines.append(f"| {labels[figure['name']]} | {link(figure, page)} ({number(figure['mean'])}) | {compared} | "
                     f"{ratio(figure) if figure['peer'] else ''} |")
    return lines


def step_names() -> list[str]:
    """The names of all step figures on one GPU, ordered by network (as in NETWORKS), precision and batch size."""
    shape = re.compile(r"(\w+)_(fp16|bf16|tf32|fp32)_b(\d+)_(inference_)?synthetic_1gpu")
    found = {match[0]: match for path in RESULTS.glob("*.json") if (match := shape.fullmatch(path.stem))}
    networks, dtypes = list(NETWORKS), list(DTYPES)
    return sorted(found, key=lambda name: (found[name][4] or "", networks.index(found[name][1]),
                                           dtypes.index(found[name][2]), -int(found[name][3])))


def speed_table(page: Path) -> list[str]:
    """The table of docs/cuda_executor.md: all networks, precisions and batch sizes."""
    lines_of_memory = (RESULTS / "memory_1gpu.jsonl").read_text().splitlines()
    memory = {row["name"]: row for row in map(json.loads, lines_of_memory)}
    lines = ["| network | precision, batch | ours: median, mean | PyTorch | ratio | ours: W, MHz | memory: ours, "
             "PyTorch |", "|---|---|---|---|---|---|---|"]
    for figure in of_one_commit(step_names()):
        name = figure["name"]
        match = re.match(r"(\w+?)_(fp16|bf16|tf32|fp32)_b(\d+)_(inference)?", name)
        assert match
        peer = figure["peer"]
        used = memory.get(name, {})
        cells = [NETWORKS[match[1]] + ", inference" * bool(match[4]), f"{DTYPES[match[2]]}, {match[3]}",
                 f"{link(figure, page)}, {number(figure['mean'])}",
                 f"{number(peer['value'])} ({peer_name(figure).removeprefix('PyTorch, ')})" if peer else "",
                 f"{figure['ratio']:.2f}" if peer else "",
                 f"{figure['watts']:.0f}, {figure['sm_mhz']:,}" if figure["watts"] and figure["sm_mhz"] else "",
                 ", ".join(f"{used[key]:.1f}" for key in ("ours_in_use_gib", "peer_in_use_gib") if key in used)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def profile_table(_: Path, name: str = "resnet50_fp16_b256_profile",
                  operations: Mapping[str, Sequence[str]] = OPERATIONS) -> list[str]:
    """The table of a step's time by operation, from a profile's sums."""
    text = (RESULTS / f"{name}.txt").read_text()
    sums = re.findall(r"^(\w+) +(\d+) +([\d.]+) +([\d.]+) +[\d.]+ +\d+ +\d+%$", text.partition("\noperation")[2], re.M)
    groups: dict[str, list[float]] = {label: [0, 0, 0] for label in (*operations, OTHER, "sum")}
    labels = {operation: label for label, together in operations.items() for operation in together}
    for operation, *counted in sums:
        label = operation if operation == "sum" else labels.get(operation, OTHER)
        groups[label] = [total + float(more) for total, more in zip(groups[label], counted, strict=True)]
    lines = ["| | launches | ms | least | the rest |", "|---|---|---|---|---|"]
    return lines + [f"| {label} | {launches:.0f} | {ms:.2f} | {least:.2f} | {ms - least:.2f} |"
                    for label, (launches, ms, least) in groups.items() if launches]


def ingredients_table(_: Path) -> list[str]:
    """The table of each ingredient's cost per step, measured alternating with the step without it."""
    _about, *rows = map(json.loads, (RESULTS / "resnet50_fp16_b256_ingredients_1gpu.jsonl").read_text().splitlines())
    lines = ["| | step, ms | without, ms | longer by |", "|---|---|---|---|"]
    return lines + [f"| {row['change']} | {statistics.median(row['step_ms']):.2f} | "
                    f"{statistics.median(row['without_ms']):.2f} | {row['longer_percent']:.1f} % |" for row in rows]


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "results": results_table,
    "speed": speed_table,
    "profile": profile_table,
    "inference": partial(profile_table, name="resnet50_fp16_b256_inference_profile", operations=INFERENCE),
    "int8": partial(profile_table, name="resnet50_int8_b256_inference_profile", operations=INT8),
    "ingredients": ingredients_table,
    "scaling_error": lambda _: scaling_model.error_table(scaling_model.measurements()),
    "scaling_plan": lambda _: scaling_model.plan_table(scaling_model.measurements()),
}


def updated(text: str, page: Path) -> str:
    """The page's text with its tables and linked numbers updated."""
    def table(match: re.Match[str]) -> str:
        return f"{match[1]}{''.join(line + chr(10) for line in TABLES[match[2]](page))}{match[3]}"

    def linked(match: re.Match[str]) -> str:
        path = page.parent / match[4]
        if not path.exists():
            return match[0]
        value = json.loads(path.read_text())["value"]
        return f"[{value:,.{len(match[2] or '')}f}{match[3]}]({match[4]})"

    return LINKED_NUMBER.sub(linked, TABLE.sub(table, text))


@dataclass(frozen=True)
class Options:
    """This program has no options."""


def main() -> None:
    read_options(Options)
    for page in PAGES:
        before = page.read_text()
        if (text := updated(before, page)) != before:
            page.write_text(text)
            print(f"{page.relative_to(ROOT)}: figures put in")


if __name__ == "__main__":
    run(main)
