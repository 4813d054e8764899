"""The section training: the chosen batch, the networks it leaves out, and that its steps train."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import ProgramError
from common.mxnet_compat import mx
from gpu_report import training
from gpu_report.section import Bench
from graph_passes.errors import CapacityError, TransientError
from graph_passes.executors import Metrics
from train.config import Config
from train.devices import Placement


class Executor:
    """A device on which steps take 10 ms of a simulated clock, for batches that fit."""

    gpu_bus_id = ""

    def __init__(self, clock: SimpleNamespace, loss: float = 1.0, skips: bool = False) -> None:
        self._clock, self._loss, self._skips = clock, loss, skips
        self.skipped_steps, self.is_closed = 0, False

    def forward_backward(self, data: Any, label: Any) -> None:
        self._clock.now += 0.01

    def step(self, rate: float) -> None:
        self.skipped_steps += self._skips

    def end_step(self) -> None: ...

    def read_metrics(self) -> Metrics:
        return Metrics(self._loss, 0, 0, 1)

    def largest_batch(self) -> int:
        return 2000

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A GPU whose executors come from `build`."""
    monkeypatch.setattr(training, "GPU_MODELS", (50, 18))
    monkeypatch.setattr(training, "images", lambda *arguments: [None])
    monkeypatch.setattr(training, "make_optimizer", lambda executor, config: executor)
    monkeypatch.setattr(training.mx, "gpu", training.mx.cpu)
    monkeypatch.setattr(Bench, "free_memory", lambda self: None)
    return Bench(Placement("cuda", "gpu(0)", ""), "some GPU", tmp_path, 1e9)


def build(monkeypatch: pytest.MonkeyPatch, most: int = 512, **behaviour: Any) -> list[tuple[Config, Executor]]:
    """Records the requested configurations and their executors."""
    clock, made = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(training, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(training, "repeat", lambda step, *limits: training.Timing(step(), 0.001, ""))

    def build_executor(config: Config, *arguments: Any) -> Executor:
        if config.batch_size > most:
            raise CapacityError("the GPU is too small")
        made.append((config, Executor(clock, **behaviour)))
        return made[-1][1]

    monkeypatch.setattr(training, "build_executor", build_executor)
    return made


def test_all_networks_and_precisions(bench, monkeypatch):
    made = build(monkeypatch)
    section = training.measure(bench)
    assert [(config.model, config.dtype, config.tf32) for config, _ in made] == [
        ("resnet50", "float16", True), ("resnet50", "bfloat16", True), ("resnet50", "float32", True),
        ("resnet50", "float32", False), ("resnet18", "float16", True), ("resnet18", "bfloat16", True),
        ("resnet18", "float32", True), ("resnet18", "float32", False)]
    assert all(executor.is_closed and not config.zero_init_residual for config, executor in made)
    assert [figure.value for figure in section.figures] == pytest.approx([256 / 0.01] * 8)
    first = section.figures[0]
    assert (first.what, first.size, first.precision) == ("ResNet-50, 224 pixels", "batch 256", "fp16")
    assert first.more["largest_batch"] == 2000 and "watts" not in first.more and section.complete


@pytest.mark.gpu
@pytest.mark.alone
def test_memory_that_nobody_uses_is_given_back(tmp_path):
    mx.nd.array(np.zeros(2**27, np.float32), mx.gpu(0)).wait_to_read()  # 512 MiB
    kept, _ = mx.context.gpu_memory_info(0)
    Bench(Placement("cuda", "gpu(0)", ""), "some GPU", tmp_path, 1.0).free_memory()
    free, _ = mx.context.gpu_memory_info(0)
    assert free - kept >= 2**29


def test_a_gpu_too_small_for_the_batch(bench, monkeypatch):
    made = build(monkeypatch, most=64)
    section = training.measure(bench)
    assert {config.batch_size for config, _ in made} == {64}
    assert {figure.size for figure in section.figures} == {"batch 64"}
    (note,) = section.notes
    network = "ResNet-50, 224 pixels in fp16"
    assert note.startswith(f"{network} with batch 256; {network} with batch 128; ")
    assert note.endswith(" and 8 more: there is no room for it in memory")


def test_a_gpu_too_small_for_a_single_image(bench, monkeypatch):
    build(monkeypatch, most=0)
    section = training.measure(bench)
    assert section.figures == () and "there is no room for it in memory" in section.notes[0]


def test_memory_that_kernels_need_besides(bench, monkeypatch):
    """A batch for which timing runs out of memory is left out, and its executor is closed."""
    made = build(monkeypatch)

    def too_little(step: Any, *limits: Any) -> Any:
        if made[-1][0].batch_size == 256:
            raise TransientError("the GPU has no memory left")
        return training.Timing(step(), 0.001, "")

    monkeypatch.setattr(training, "repeat", too_little)
    section = training.measure(bench)
    assert {figure.size for figure in section.figures} == {"batch 128"}
    assert all(executor.is_closed for _, executor in made)


@pytest.mark.parametrize("behaviour, sentence", [
    ({"loss": math.nan}, "not all timed steps of resnet50 trained: the sum of their losses is nan, and 0 of them "
                         "changed no weight"),
    ({"skips": True}, "the sum of their losses is 1.0, and 1 of them changed no weight"),
])
def test_steps_that_do_not_train(bench, monkeypatch, behaviour, sentence):
    made = build(monkeypatch, **behaviour)
    with pytest.raises(ProgramError, match=sentence):
        training.measure(bench)
    assert made[0][1].is_closed
