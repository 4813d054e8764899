"""Checks that the cuda executor learns: 200 steps on one fixed batch of real JPEGs, in each precision (float32 without
TF32).

    python benchmarks/learn_gpu.py --data /path/to/imagenet_sample
    python benchmarks/learn_gpu.py --plot

The first command writes results/learn_fixed_batch_1gpu.jsonl: for each dtype a line with the loss (nats per image) and
the top-1 hits of every step, before its update. `--plot` draws this file as results/learn_fixed_batch_1gpu.png. The
batch holds the first image of each of the first 64 classes, with the shorter side resized to 256, cropped to the middle
224 x 224. All precisions train ResNet-50 from equal initial weights, by SGD with momentum; the learning rate falls to 0
along a cosine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from record import RESULTS, run

from common import environment
from common.command_line import read_options
from common.errors import UserError
from graph_passes import Graph
from graph_passes.executors.cuda.optimizer import OptimizerConfig
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.training_step import TrainingStep
from graph_passes.optimizers.sgd import SGD
from pipelines import MEAN, STD
from train.models.network import init_params
from train.models.resnet import resnet

DTYPES = ("float16", "bfloat16", "float32")
STEPS, BATCH, SIZE, CLASSES, LEARNING_RATE = 200, 64, 224, 1000, 0.05
RESULT = RESULTS / "learn_fixed_batch_1gpu.jsonl"


def load_batch(folder: Path, size: int = SIZE) -> tuple[np.ndarray, np.ndarray]:
    """Load normalised float32 images (BATCH, size, size, 3) and labels from a folder of class folders."""
    from PIL import Image

    classes = sorted({path.parent for path in folder.glob("*/*.JPEG")})[:BATCH]
    if len(classes) < BATCH:
        raise UserError(f"--data {folder} has {len(classes)} folders with .JPEG files, but {BATCH} are needed; "
                         "give another folder")
    images = []
    for path in classes:
        with Image.open(min(path.glob("*.JPEG"))) as file:
            image = file.convert("RGB")
        scale = size * 8 / 7 / min(image.size)
        width, height = (round(side * scale) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        images.append(np.asarray(resized.crop((left, top, left + size, top + size)), np.float32))
    normalised = (np.stack(images) - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    return normalised, np.arange(BATCH, dtype=np.float32)


def learn(dtype: str, data: np.ndarray, label: np.ndarray) -> dict[str, Any]:
    symbol = resnet(50, CLASSES)
    options = StepOptions(dtype, OptimizerConfig(SGD(momentum=0.9)), tf32=False)
    shapes = {"data": data.shape, "softmax_label": label.shape}
    step = TrainingStep(Graph.from_json(symbol.tojson()), shapes, options)
    step.set_params(*init_params(symbol, seed=0))
    step.load(data, label)
    losses, hits = [], []
    for number in range(STEPS):
        step.forward_backward()
        step.update(LEARNING_RATE * (1 + math.cos(math.pi * number / STEPS)) / 2)
        loss_sum, top1, _, count = step.read_metrics()
        losses.append(round(loss_sum / count, 6))
        hits.append(top1)
    return {"dtype": dtype, "gpu": step.gpu.name, "commit": environment.git_commit(), "loss": losses, "top1": hits}


def read_curves() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULT.read_text().splitlines()] if RESULT.exists() else []


def plot() -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    curves = read_curves()
    if not curves:
        raise UserError(f"--plot: there is no {RESULT} to draw; give --data to make it")
    for curve in curves:
        axes.semilogy(range(1, len(curve["loss"]) + 1), curve["loss"], label=curve["dtype"], linewidth=1.2)
    title = f"ResNet-50, one batch of {BATCH} JPEGs at {SIZE} px, {curves[-1]['gpu']}"
    axes.set(title=title, xlabel="step", ylabel="loss (nats per image)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(RESULT.with_suffix(".png"), dpi=120)


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    data: Path | None = None
    """Folder of class folders with JPEGs."""
    dtypes: tuple[Literal["float16", "bfloat16", "float32"], ...] = ("float16", "bfloat16", "float32")
    """Precisions to train in."""
    plot: bool = False
    """Only draw the results of an earlier run."""


def main() -> None:
    arguments = read_options(Options)
    if not (arguments.data or arguments.plot):
        raise UserError("nothing to do: give --data or --plot")
    if arguments.data:
        data, label = load_batch(arguments.data)
        curves = {curve["dtype"]: curve for curve in read_curves()}
        for dtype in arguments.dtypes:
            curves[dtype] = new = learn(dtype, data, label)
            RESULT.write_text("".join(f"{json.dumps(curves[dtype])}\n" for dtype in DTYPES if dtype in curves))
            shown = ", ".join(f"{number}: {new['loss'][number - 1]:.4f}" for number in (1, 10, 25, 50, 100, STEPS))
            print(f"{dtype}: loss at step {shown}; {new['top1'][-1]} of {BATCH} right at the end", flush=True)
    if arguments.plot:
        plot()


if __name__ == "__main__":
    run(main)
