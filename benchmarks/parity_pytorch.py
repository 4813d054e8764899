"""Do we train as PyTorch does? Both start from equal weights, and train on equal batches with one recipe.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/parity_pytorch.py --data /path/to/cifar10
    ... --device cpu --preset cifar10_resnet18 --batch 32 --size 64 --steps 40                # minutes on two cores

Trains a ResNet with the constants of a preset, by ours and by PyTorch (parity_peer.py), in float16 and in float32
without TF32; on a CPU in float32 only. Two further experiments show how large a difference is normal. Both programs
train again with another order of the images and other crops, as with another seed. And PyTorch trains again in float32
from initial weights that differ in their last digit. The latter shows the effect of rounding, which training magnifies:
no two correct programs can agree better.

Writes results/parity_pytorch.jsonl (on a CPU: parity_pytorch_cpu.jsonl): one line for each run with the loss of every
step, then one line with the comparison. Also writes a .png beside it.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import record
from torch_peer import require_peer, start_peer

from common import environment
from common.command_line import Positive, read_options
from common.errors import ProgramError, UserError
from common.mxnet_compat import mx
from graph_passes.executors.base import parse_device
from graph_passes.executors.cuda.optimizer import INITIAL_LOSS_SCALE
from pipelines import LoaderConfig, open_loader
from train import devices, models
from train.build import build_executor
from train.config import Config
from train.optimizer import make_optimizer
from train.presets import load_preset
from train.schedule import make_schedule

PEER = Path(__file__).with_name("parity_peer.py")
VAL_IMAGES = 1024
WINDOW = 20  # steps over which losses are averaged before they are compared
Run = dict[str, Any]  # side, dtype, order, nudged, loss, val_loss, val_top1


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    data: Path | None = None
    """Images, as for python -m train."""
    preset: str = "resnet50_90ep"
    """Preset with the constants of both programs."""
    model: str = ""
    """A ResNet; default: the preset's."""
    learning_rate: float = 0.0
    """For 256 images; 0: the preset's."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device of our program."""
    batch: Positive = 64
    """Images per step."""
    size: Positive = 112
    """Pixels, height and width."""
    steps: Positive = 300
    """Steps of each run."""


def make_config(arguments: Options) -> Config:
    """The preset's constants, in one 'epoch' of `--steps` steps, a sixth of them warm-up."""
    preset = load_preset(arguments.preset)
    return replace(preset, data=str(arguments.data), model=arguments.model or preset.model, image_size=arguments.size,
                   learning_rate=arguments.learning_rate or preset.learning_rate, batch_size=arguments.batch,
                   seed=1, epochs=1, warmup_epochs=1 / 6, device=arguments.device)


def write_batches(folder: Path, name: str, config: Config, split: str, num_batches: int, seed: int) -> int:
    """Write batches of our loader, (batches, N, H, W, 3) float16, and their labels, (batches, N) float32; returns the
    number of classes."""
    loader = open_loader(LoaderConfig(data=config.data, split=split, batch_size=config.batch_size, seed=seed,
                                      image_size=config.image_size, transform=config.transform))
    shape = (num_batches, config.batch_size, config.image_size, config.image_size, 3)
    data = np.lib.format.open_memmap(folder / f"{name}_data.npy", "w+", np.float16, shape)
    label = np.lib.format.open_memmap(folder / f"{name}_label.npy", "w+", np.float32, shape[:2])
    number = 0
    while number < num_batches:
        for batch in loader:
            if number == num_batches or batch.num_valid < config.batch_size:
                break
            data[number], label[number] = batch.data.asnumpy(), batch.label.asnumpy()
            number += 1
    loader.close()
    return len(loader.class_names)


def prepare(folder: Path, config: Config, steps: int, on_gpu: bool) -> dict[str, Any]:
    """Write batches, initial weights and recipe to files that both sides read; returns the recipe."""
    val_batches = VAL_IMAGES // config.batch_size
    for order in (0, 1):
        num_classes = write_batches(folder, f"order{order}", config, "train", steps, seed=order)
    write_batches(folder, "val", config, "val", val_batches, seed=0)
    network = models.create(config.model, num_classes)
    params, aux = network.initial_values(config.seed, zero_init_residual=config.zero_init_residual)
    weights: dict[str, Any] = {**params, **aux}  # Any: in NumPy 2's types, savez's keywords include a bool
    np.savez(folder / "weights.npz", **weights)
    schedule = make_schedule(config, steps, num_processes=1)
    recipe = {"model": config.model, "num_classes": num_classes, "momentum": config.momentum,
              "nesterov": config.nesterov, "weight_decay": config.weight_decay,
              "label_smoothing": config.label_smoothing, "device": "cuda" if on_gpu else "cpu",
              "loss_scale": INITIAL_LOSS_SCALE, "val_batches": val_batches,
              "learning_rates": [schedule(step) for step in range(steps)]}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return recipe


def train_ours(folder: Path, config: Config, recipe: dict[str, Any], order: int) -> Run:
    placement = devices.choose(config, local_rank=0)
    executor = build_executor(config, recipe["num_classes"], config.image_size, placement, None)
    optimizer = make_optimizer(executor, config)
    context = mx.Context(*parse_device(placement.device))

    def batches(name: str) -> Any:
        data, label = (np.load(folder / f"{name}_{what}.npy", mmap_mode="r") for what in ("data", "label"))
        for images, classes in zip(data, label, strict=True):
            on_host = mx.nd.array(images, dtype="float32"), mx.nd.array(classes)
            yield tuple(array.as_in_context(context) for array in on_host)

    losses = []
    for rate, (data, label) in zip(recipe["learning_rates"], batches(f"order{order}"), strict=True):
        executor.forward_backward(data, label)
        optimizer.step(rate)
        metrics = executor.read_metrics()
        losses.append(round(metrics.loss_sum / metrics.count, 6))
    for data, label in batches("val"):
        executor.infer(data, label, config.batch_size)
    metrics = executor.read_metrics()
    return {"side": "ours", "dtype": config.dtype, "order": order, "nudged": False, "loss": losses,
            "val_loss": metrics.loss_sum / metrics.count, "val_top1": metrics.top1 / metrics.count}


def end_peer(peer: subprocess.Popen[str]) -> list[Run]:
    lines, _ = peer.communicate()
    if peer.returncode:
        raise ProgramError(f"the peer ended with exit code {peer.returncode}: see its message above")
    return [json.loads(line) for line in lines.splitlines()]


def smoothed(run: Run) -> np.ndarray:
    """A run's loss, averaged over WINDOW steps."""
    return np.convolve(run["loss"], np.ones(WINDOW) / WINDOW, mode="valid")


def difference(a: Run, b: Run) -> np.ndarray:
    return np.abs(smoothed(a) - smoothed(b))


def pairs(runs: list[Run]) -> dict[str, tuple[Run, Run]]:
    """The pairs of runs to compare, keyed by their difference."""
    found = {(run["side"].split()[0], run["dtype"], run["order"]): run for run in runs if not run["nudged"]}
    compared = {}
    for dtype in dict.fromkeys(run["dtype"] for run in runs):
        for order in (0, 1):
            if ("ours", dtype, order) in found:
                words = f"ours and PyTorch, {dtype}, batches of seed {order}"
                compared[words] = found["ours", dtype, order], found["PyTorch", dtype, order]
    first = runs[0]["dtype"]
    compared["PyTorch and PyTorch with another seed"] = found["PyTorch", first, 0], found["PyTorch", first, 1]
    compared["ours and ours with another seed"] = found["ours", first, 0], found["ours", first, 1]
    nudged = next(run for run in runs if run["nudged"])
    compared["PyTorch and PyTorch from weights nudged in their last digit"] = found["PyTorch", "float32", 0], nudged
    return compared


def compare(runs: list[Run]) -> dict[str, dict[str, float]]:
    """Differences between the losses of each pair of runs.

    Three are for the smoothed losses: the mean, the largest, and the mean over the second half of the steps, where the
    learning rate falls. One is for the unsmoothed losses: the largest over the first 20 steps.
    """
    compared = {}
    for words, (a, b) in pairs(runs).items():
        apart = difference(a, b)
        compared[words] = {"mean": float(apart.mean()), "max": float(apart.max()),
                           "later_half_mean": float(apart[len(apart) // 2 :].mean()),
                           "first_20_steps_max": float(np.abs(np.subtract(a["loss"], b["loss"])[:20]).max())}
    return compared


def plot(runs: list[Run], title: str, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 7), layout="constrained", sharex=True)
    for run in runs:
        side = run["side"].split("+")[0]
        style = ":" if run["nudged"] else "-" if run["side"] == "ours" else "--"
        top.plot(np.arange(WINDOW, len(run["loss"]) + 1), smoothed(run), style, linewidth=1.1,
                 label=f"{side}, {run['dtype']}, seed {run['order']}{', nudged' * run['nudged']}")
    for words, (a, b) in pairs(runs).items():
        steps = np.arange(WINDOW, len(a["loss"]) + 1)
        bottom.semilogy(steps, np.maximum(difference(a, b), 1e-7), linewidth=1.1, label=words)
    top.set(title=title, ylabel=f"loss (nats per image, mean of {WINDOW} steps)")
    bottom.set(xlabel="step", ylabel="difference of the loss (nats)")
    for axes in (top, bottom):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def command(arguments: Options) -> str:
    """The command line that repeats this run, without this machine's paths."""
    assert arguments.data
    given = {**vars(arguments), "data": arguments.data.name}
    options = (f"--{key.replace('_', '-')} {value}" for key, value in given.items())
    return " ".join(["python benchmarks/parity_pytorch.py", *options])


def main() -> None:
    arguments = read_options(Options)
    if not arguments.data:
        raise UserError("nothing to train on: give --data, as for python -m train")
    require_peer()
    config = make_config(arguments)
    on_gpu = devices.choose(config, local_rank=0).executor == "cuda"
    kinds = ["float16:0", "float32:0", "float16:1"] if on_gpu else ["float32:0", "float32:1"]
    result = record.RESULTS / ("parity_pytorch.jsonl" if on_gpu else "parity_pytorch_cpu.jsonl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = prepare(folder, config, arguments.steps, on_gpu)
        peer, runs = start_peer(PEER, folder, *kinds, "float32:0:nudged"), []
        for kind in kinds:
            dtype, order = kind.split(":")
            precision: dict[str, Any] = {"dtype": dtype, "tf32": False}  # the same arithmetic on both sides
            runs.append(train_ours(folder, replace(config, **precision), recipe, int(order)))
            print(f"ours {kind}: loss {runs[-1]['loss'][-1]:.4f}, validation top-1 {runs[-1]['val_top1']:.2%}")
        theirs = end_peer(peer)
    for run in theirs:
        print(f"{run['side']} {run['dtype']}:{run['order']}{':nudged' * run['nudged']}: loss {run['loss'][-1]:.4f}, "
              f"validation top-1 {run['val_top1']:.2%}")
    runs += theirs
    comparison = compare(runs)
    for words, figures in comparison.items():
        print(f"{words}: mean difference {figures['mean']:.5f} (later half {figures['later_half_mean']:.5f}), "
              f"largest {figures['max']:.5f} nats")
    hardware = environment.hardware()
    machine = hardware["gpus"][0] if hardware["gpus"] else hardware["cpu"]
    about = {"hardware": machine, "versions": environment.versions(), "commit": environment.git_commit() or "",
             "command": command(arguments), "recipe": config.to_dict(),
             "comparison": comparison}
    about["recipe"]["data"] = arguments.data.name
    result.write_text("".join(f"{json.dumps(line)}\n" for line in [*runs, about]))
    plot(runs, f"{config.model}, {arguments.data.name} at {config.image_size} px, batch {config.batch_size}, "
         f"{machine}", result.with_suffix(".png"))


if __name__ == "__main__":
    record.run(main)
