"""Draws the README's picture from the files in results/: training ResNet-50 on H200 GPUs, images/sec per GPU.

    python benchmarks/overview.py       # writes results/overview.png; needs no GPU
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from record import RESULTS, run
from tables import MAIN, of_one_commit

from common.command_line import read_options

# NVIDIA's entry to MLPerf Training 4.0 on 8 H200, in images/sec: median `throughput` of the last nine epochs in
# NVIDIA/results/h200_ngc24.04_mxnet/resnet/result_0.txt of github.com/mlcommons/training_results_v4.0. ImageNet, batch
# 400 per GPU, LARS.
MLPERF_8_H200 = 63_559
JPEG = "resnet50_fp16_b256_jpeg_1gpu"
OURS, OTHERS = "#1f77b4", "#b0b0b0"


@dataclass(frozen=True)
class Options:
    """This program has no options."""


class Bar(NamedTuple):
    label: str
    images_per_sec: float  # per GPU
    is_ours: bool = False


def bars() -> list[Bar]:
    """The bars, fastest first, from figures of the commit of README's table."""
    labels = {MAIN: "ours, synthetic data", JPEG: "ours, from JPEGs",
              "resnet50_fp16_b256_jpeg_2gpu": "ours, from JPEGs, 2 GPUs",
              "resnet50_fp16_b256_jpeg_4gpu": "ours, from JPEGs, 4 GPUs"}
    found = {figure["name"]: figure for figure in of_one_commit(labels)}
    gpus = {name: int(re.findall(r"(\d)gpu$", name)[0]) for name in labels}
    bars = [Bar(labels[name], figure["value"] / gpus[name], True) for name, figure in found.items()]
    peer = found[MAIN]["peer"]
    bars += [Bar("MLPerf 4.0: NVIDIA's MXNet, ImageNet, 8 GPUs", MLPERF_8_H200 / 8),
             Bar("PyTorch, torch.compile, synthetic data", peer["value"])]
    if JPEG in found:
        lines = (RESULTS / f"{JPEG}.jsonl").read_text().splitlines()
        eager = [row for row in map(json.loads, lines) if row["name"].startswith("PyTorch")]
        bars += [Bar("PyTorch and torchvision's DataLoader, from JPEGs", row["images_per_sec"]) for row in eager]
    return sorted(bars, key=lambda bar: -bar.images_per_sec)


def plot(bars: list[Bar], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 2.9), layout="constrained")
    drawn = axes.barh([bar.label for bar in bars], [bar.images_per_sec for bar in bars], height=0.7,
                      color=[OURS if bar.is_ours else OTHERS for bar in bars])
    axes.bar_label(drawn, [f"{bar.images_per_sec:,.0f}" for bar in bars], padding=4)
    axes.set_title("ResNet-50 training in 16 bits on NVIDIA H200, images/sec per GPU", fontsize=11, loc="left", x=0)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    # The PNG also stores the figures: a test compares them with the results, to detect an outdated picture.
    figure.savefig(path, dpi=150, metadata={"Description": json.dumps(bars)})
    plt.close(figure)


def main() -> None:
    read_options(Options)
    plot(bars(), RESULTS / "overview.png")


if __name__ == "__main__":
    run(main)
