"""Checks that a network with PyTorch's weights computes PyTorch's logits, and that its weights convert back exactly.

    PEER_PYTHON=/path/to/python-with-torch-and-timm python benchmarks/weights_pytorch.py
    ... --device gpu            # in float16 on a GPU, against PyTorch in float32 without TF32

For each network, PyTorch (peer_weights.py) makes random weights and BatchNorm statistics, and computes the logits of
random images of 224 pixels, in float32 and in float64. Ours reads the weights from .pth and from .safetensors,
computes, and writes both formats; PyTorch loads them strictly and compares them bit for bit. Our logits are compared
with the float64 logits, both minus their mean over the classes, which probabilities do not contain. The result is the
largest difference relative to the largest logit. The difference of PyTorch's float32 logits shows the effect of
rounding alone.

Writes results/weights_pytorch.jsonl (on a CPU: weights_pytorch_cpu.jsonl): one line for each network, then one line
with machine and versions. Ends with exit code 1 if a network differs by more than LIMITS.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import record
from torch_peer import require_peer, start_peer

from common import environment, files
from common.command_line import read_options
from common.errors import ProgramError
from common.mxnet_compat import mx
from graph_passes.executors.base import parse_device
from train import devices, weights
from train.build import build_executor
from train.checkpoint import Checkpoint
from train.config import Config
from train.weights import publish

PEER = Path(__file__).with_name("peer_weights.py")
MODELS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d", "wide_resnet50_2",
          "resnet50d")
# The weight file formats that this machine can read and write.
FORMS = (".pth", ".safetensors") if importlib.util.find_spec("safetensors") else (".pth",)
LIMITS = {"float32": 1e-5, "float16": 1e-2}


@dataclass(frozen=True)
class Options:
    """Options of the comparison."""

    models: tuple[str, ...] = MODELS
    """Networks of torchvision or timm."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Device of our program; on a GPU it computes in float16."""


def peer(*options: object) -> list[dict[str, Any]]:
    """Run the peer to its end; returns its JSON lines. Raises ProgramError."""
    process: subprocess.Popen[str] = start_peer(PEER, *options)
    lines, _ = process.communicate()
    if process.returncode:
        raise ProgramError(f"the peer ended with exit code {process.returncode}: see its message above")
    return [json.loads(line) for line in lines.splitlines()]


def centred_logits(trained: Checkpoint, images: np.ndarray, placement: devices.Placement) -> np.ndarray:
    """The logits minus their mean, (N, classes), from our executor's probabilities for images (N, H, W, 3)."""
    config = replace(trained.config, batch_size=len(images))
    executor = build_executor(config, trained.num_classes, images.shape[1], placement, trained)
    data = mx.nd.array(images).as_in_context(mx.Context(*parse_device(placement.device)))
    logarithms = np.log(executor.forward(data).asnumpy().astype(np.float64))
    return logarithms - logarithms.mean(axis=1, keepdims=True)


def compare(folder: Path, model: str, images: np.ndarray, placement: devices.Placement) -> tuple[float, float]:
    """The largest relative difference from PyTorch's float64 logits, for our logits and for PyTorch's float32 logits.
    Also writes the weights back in both formats."""
    with np.load(folder / f"{model}.npz") as made:
        wanted, theirs = (made[dtype] - made[dtype].mean(axis=1, keepdims=True) for dtype in ("float64", "float32"))
    differences = []
    for form in FORMS:
        trained = weights.load(str(folder / f"{model}{form}"), quiet=True)
        back = folder / "back" / f"{model}{form}"
        files.write(back, publish.content(publish.state_dict(trained), back))
        differences.append(centred_logits(trained, images, placement) - wanted)
    largest = np.abs(wanted).max()
    return float(np.abs(differences).max() / largest), float(np.abs(theirs - wanted).max() / largest)


def main() -> None:
    arguments = read_options(Options)
    require_peer()
    placement = devices.choose(Config(device=arguments.device), local_rank=0)
    on_gpu = placement.executor == "cuda"
    dtype = "float16" if on_gpu else "float32"
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peer("make", folder, "cuda" if on_gpu else "cpu", *arguments.models)
        images = np.load(folder / "images.npy")
        errors = {model: compare(folder, model, images, placement) for model in arguments.models}
        for line in peer("check", folder, *arguments.models):
            error, rounding = errors[line["model"]]
            results.append({"model": line["model"], "dtype": dtype, "largest_relative_difference": error,
                            "pytorch_float32": rounding, "limit": LIMITS[dtype], "tensors": line["tensors"],
                            "differing": line["differing"]})
            print(f"{line['model']}: logits differ by {error:.1e} in {dtype} (limit {LIMITS[dtype]:.0e}; PyTorch's in "
                  f"float32 by {rounding:.1e}); "
                  f"{len(line['differing'])} of {line['tensors']} tensors differ after the round trip")
    hardware = environment.hardware()
    results.append({"hardware": hardware["gpus"][0] if hardware["gpus"] else hardware["cpu"],
                    "versions": environment.versions(), "commit": environment.git_commit() or ""})
    path = record.RESULTS / f"weights_pytorch{'' if on_gpu else '_cpu'}.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in results))
    if bad := [line["model"] for line in results[:-1]
               if line["differing"] or not line["largest_relative_difference"] <= line["limit"]]:
        raise ProgramError(f"{', '.join(bad)} differ from PyTorch by more than the limit: see above")


if __name__ == "__main__":
    record.run(main)
