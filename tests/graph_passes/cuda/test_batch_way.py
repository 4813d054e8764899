"""The files through which a batch goes from its images to the weights, as listed in docs/extending.md. The GPU is a
fake, which computes nothing; loader, loop and executor are real."""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_without_gpu import FakeConvolutions, FakeGpu, FakeKernels

from common.mxnet_compat import mx
from graph_passes.executors.cuda import compiled, network, toolchain
from train.build import build_executor, open_split
from train.devices import Placement
from train.loop import Trainer
from train.presets import load_preset
from train.processes.distributed import Workers

ROOT = Path(__file__).resolve().parents[3]
FAKED = {f"graph_passes/executors/cuda/{name}.py" for name in ("device", "kernel_library")}
# called in a step, but only to decide, check or watch
BESIDE = {f"{name}.py" for name in (
    "graph_passes/executors/base", "graph_passes/executors/cuda/idle", "pipelines/by_pillow",
    "pipelines/decoder_messages", "pipelines/transform", "train/draws", "train/optimizer",
    "train/processes/horovod_mxnet", "train/processes/pulse", "train/schedule", "train/statistics")}


class Gpu(FakeGpu):
    """A fake with everything that an executor needs; events never wait."""

    device = SimpleNamespace(pci_bus_id="0000:00:00.0")

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(sync=lambda: None)

    def pinned(self, num_bytes: int) -> np.ndarray:
        return np.zeros(num_bytes, np.uint8)

    def record(self, event: Any) -> None: ...

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return 0.0


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A ResNet-18 on a few JPEGs that are decoded anew in each epoch."""
    monkeypatch.setenv("RESNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(network, "Gpu", Gpu)
    monkeypatch.setattr(toolchain, "KernelLibrary", lambda *_: FakeKernels())
    monkeypatch.setattr(toolchain, "ConvolutionLibrary", lambda *_: FakeConvolutions())
    monkeypatch.setattr(toolchain, "_machine", lambda gpu: "fake")
    monkeypatch.setattr(compiled, "LEAST_READ", 0)  # launches that read the batch get its address
    monkeypatch.setattr(mx, "gpu", lambda number: mx.cpu(number))
    for number in range(64):
        folder = tmp_path / "data" / "train" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((70, 80, 3), 3 * number, np.uint8)).save(folder / f"{number}.jpg")
    config = replace(load_preset("cpu_sample"), data=str(tmp_path / "data"), batch_size=4, image_size=64,
                     model="resnet18", num_threads=1, cache=0.0, dtype="float16")
    workers, placement = Workers(), Placement("cuda", "gpu(0)", "")
    loader = open_split(config, "train", placement._replace(device="cpu(0)"), workers)
    executor = build_executor(config, 2, 64, placement, None)
    return Trainer(config, workers, executor, loader, None, tmp_path / "run", None)


def test_files_of_a_batch(trainer: Trainer) -> None:
    called: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        called.add(frame.f_code.co_filename)

    batches = iter(trainer.train_loader)
    for _ in range(2):
        trainer.step(batches)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        for _ in range(6):
            trainer.step(batches)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    packages = ("common", "graph_passes", "pipelines", "train")
    ours = {str(Path(name).relative_to(ROOT)) for name in called
            if name.startswith(tuple(f"{ROOT}/{package}/" for package in packages))}
    page = (ROOT / "docs/extending.md").read_text().partition("## Which files does a batch go through?")[2]
    listed = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(ours - BESIDE | FAKED)
    assert page.strip().startswith(f"In every step on a GPU, a batch goes through {len(listed)} files.")
