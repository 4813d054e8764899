"""PyTorch's side of the benchmarks is given the pictures and the arithmetic that ours has.

Needs PyTorch and torchvision: PEER_PYTHON names an interpreter that has them.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipelines import LoaderConfig, open_loader
from pipelines.graph import MEAN, STD, random_inputs
from pipelines.sources import open_source

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
AREA, SIDE = (0.4, 1.0), 32
pytestmark = pytest.mark.skipif("PEER_PYTHON" not in os.environ, reason="PEER_PYTHON is not set")

PEER = """
import sys
import numpy as np, torch
folder = sys.argv[1]
sys.path.insert(0, sys.argv[2])
import peer_cifar10
given = {name: torch.from_numpy(array) for name, array in np.load(f"{folder}/given.npz").items()}
images = peer_cifar10.cut(given["images"].permute(0, 3, 1, 2), given["boxes"], given["mirror"], 128)
drawn = peer_cifar10.windows(20000, (0.4, 1.0), 32, "cpu")
np.savez(f"{folder}/peer.npz", images=images.permute(0, 2, 3, 1).numpy(), drawn=drawn.numpy())
"""


def boxes_of(area: np.ndarray, log_ratio: np.ndarray, position: np.ndarray) -> np.ndarray:
    """The first window of each image that fits, else the last cut at the border: left, top, right, bottom (N, 4)."""
    w, h = np.sqrt(area * np.exp(log_ratio)), np.sqrt(area / np.exp(log_ratio))
    fits = (w <= 1) & (h <= 1)
    fits[:, -1] = True
    first = np.arange(len(area)), fits.argmax(1)
    size = np.minimum(np.stack([w[first], h[first]], axis=1), 1)
    start = position * (1 - size)
    return np.round(np.concatenate([start, start + size], axis=1) * SIDE).astype(np.float32)


def test_cifar10_training_images(real_data, tmp_path):
    """The pixels of a batch are equal where the same windows are drawn, and windows are distributed alike."""
    count, seed = 48, int(np.random.default_rng().integers(1 << 16))
    config = LoaderConfig(data=str(real_data / "cifar10"), batch_size=count, image_size=128, seed=seed,
                          random_area=AREA)  # fmt: skip
    with open_loader(config) as loader:
        ours = next(iter(loader)).data.asnumpy()
    source = open_source(real_data / "cifar10", "train")
    chosen = np.random.default_rng([seed, 0]).permutation(len(source))[:count].tolist()
    decoded = np.stack([np.asarray(Image.open(io.BytesIO(source.read(i).tobytes()))) for i in chosen])
    draws = np.random.default_rng([seed, 0, 0])
    *window, mirror, _ = random_inputs(draws, count, AREA, config.random_ratio, True)
    np.savez(tmp_path / "given.npz", images=(decoded - np.float32(MEAN)) / np.float32(STD), boxes=boxes_of(*window),
             mirror=1 - 2 * mirror)  # fmt: skip
    subprocess.run([os.environ["PEER_PYTHON"], "-c", PEER, str(tmp_path), str(BENCHMARKS)], check=True)
    peer = np.load(tmp_path / "peer.npz")
    grey_levels = np.abs(ours - peer["images"]) * STD
    assert grey_levels.max() < 0.51  # DALI's resizing rounds to whole grey levels

    left, top, right, bottom = boxes_of(*random_inputs(draws, 20000, AREA, config.random_ratio, True)[:3]).T
    ours_drawn, drawn = np.stack([left, top, right - left, bottom - top]), peer["drawn"].T
    drawn = np.stack([drawn[0], drawn[1], drawn[2] - drawn[0], drawn[3] - drawn[1]])
    # Means of 20,000 draws with a standard deviation below 4 pixels: five standard errors of a difference are 0.2.
    np.testing.assert_allclose(drawn.mean(axis=1), ours_drawn.mean(axis=1), atol=0.2)
    np.testing.assert_allclose(drawn.std(axis=1), ours_drawn.std(axis=1), atol=0.2)


@pytest.mark.parametrize("preset", ["resnet50_90ep", "cifar10_resnet18"])  # the latter with Nesterov's momentum
def test_losses_are_those_of_pytorch(preset, real_data, tmp_path, monkeypatch):
    """The first steps in float32 on the CPU, at a low learning rate: at a high one training magnifies rounding."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import parity_pytorch

    monkeypatch.setattr(parity_pytorch, "RESULTS", tmp_path)
    monkeypatch.setattr(parity_pytorch, "VAL_IMAGES", 16)
    monkeypatch.setattr(parity_pytorch, "WINDOW", 2)
    monkeypatch.setattr(sys, "argv", ["parity_pytorch.py", "--data", str(real_data / "cifar10"), "--device", "cpu",
                                      "--preset", preset, "--depth", "18", "--batch", "16", "--size", "64",
                                      "--steps", "8", "--learning-rate", "0.002"])  # fmt: skip
    parity_pytorch.main()
    *runs, about = map(json.loads, (tmp_path / "parity_pytorch_cpu.jsonl").read_text().splitlines())
    ours, peer = (next(run["loss"] for run in runs if run["side"].startswith(side)) for side in ("ours", "PyTorch"))
    nudged = next(run["loss"] for run in runs if run["nudged"])
    np.testing.assert_allclose(ours[0], peer[0], atol=1e-5)  # of the same weights
    rounding = np.abs(np.subtract(nudged, peer)).max()  # as training magnifies it; one draw, hence the factor
    assert np.abs(np.subtract(ours, peer)).max() < 5 * rounding + 1e-4
    assert str(real_data) not in about["command"] and preset in about["command"]
