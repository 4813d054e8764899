"""Which of cuDNN's plans is taken: the fastest, which is remembered; the first, where runs are to be repeatable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from common.disk_cache import Cache
from graph_passes.executors.cuda import convolution
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.convolution import ConvolutionLibrary, Problem

PROBLEM = Problem("wgrad", (4, 9, 9, 16), (8, 3, 3, 16), (4, 9, 9, 8), (1, 1), (1, 1), (1, 1), "float16")
MILLISECONDS = (float("nan"), 3.0, 1.0, 2.0)  # of each plan; cuDNN refuses to build the first
WORKSPACES = (0, 0, 4096, 512)  # bytes, of each plan


class FakeCudnn:
    """Four plans of fixed speed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running, self.built = -1, []
        graph = MagicMock()
        graph.tensor.side_effect = lambda **description: MagicMock()
        graph.get_execution_plan_count.return_value = len(MILLISECONDS)
        graph.get_plan_name_at_index.side_effect = "engine {}".format
        graph.get_workspace_size_plan_at_index.side_effect = WORKSPACES.__getitem__
        graph.build_plan_at_index.side_effect = self.build
        graph.execute_plan_at_index.side_effect = self.execute
        cudnn = MagicMock()
        cudnn.pygraph.return_value = graph
        monkeypatch.setattr(convolution, "import_cudnn", lambda: cudnn)
        self.gpu: Any = MagicMock(time_ms=self.time_ms, allocate=self.allocate, fill_random=self.fill_random)
        self.memory = self.filled = range(0)

    def build(self, index: int) -> None:
        if index == 0:
            raise RuntimeError("not supported")
        self.built.append(index)

    def allocate(self, num_bytes: int) -> int:
        self.memory, self.filled = range(1 << 20, (1 << 20) + num_bytes), range(0)
        return self.memory.start

    def fill_random(self, address: int, num_bytes: int, dtype: str) -> None:
        self.filled = range(address, address + num_bytes)

    def execute(self, pack: dict[Any, int], workspace: int, index: int, handle: Any) -> None:
        """x, dy and dw lie side by side in memory that has been filled, and the workspace behind them."""
        sizes = [2 * math.prod(shape) for shape in (PROBLEM.x, PROBLEM.y, PROBLEM.w)]
        for address, size, end in zip(pack.values(), sizes, [*list(pack.values())[1:], workspace], strict=True):
            assert self.filled.start <= address and address + size <= min(end, self.filled.stop)
        assert self.filled.stop <= workspace and workspace + WORKSPACES[index] <= self.memory.stop
        self.running = index

    def time_ms(self, enqueue: Callable[[], None], **options: int) -> float:
        enqueue()
        return MILLISECONDS[self.running]

    def choose(self, folder: Path, deterministic: bool) -> str:
        library = ConvolutionLibrary(self.gpu, Cache("machine", folder), Arena(self.gpu), deterministic=deterministic)
        name = library.plan(PROBLEM).name
        library.save()
        return name


def test_the_fastest_plan_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                        caplog: pytest.LogCaptureFixture) -> None:
    cudnn = FakeCudnn(monkeypatch)
    assert cudnn.choose(tmp_path, deterministic=False) == "engine 2" and set(cudnn.built) == {1, 2, 3}
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "choosing the fastest kernels for this GPU and these shapes"]
    cudnn.built.clear()
    caplog.clear()
    assert cudnn.choose(tmp_path, deterministic=False) == "engine 2" and cudnn.built == [2]
    assert not caplog.records


def test_choices_are_kept_while_others_are_being_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    cudnn = FakeCudnn(monkeypatch)
    library = ConvolutionLibrary(cudnn.gpu, Cache("machine", tmp_path), Arena(cudnn.gpu))
    library.plan(PROBLEM)
    monkeypatch.setattr(convolution, "KEEP_SECONDS", 0.0)
    library.plan(dataclasses.replace(PROBLEM, stride=(2, 2)))  # at whose start the first choice is kept
    assert [record.message for record in caplog.records][1:] == [
        "choosing the fastest kernels: 1 chosen and kept so far"]
    del library  # the process is killed
    cudnn.built.clear()
    assert cudnn.choose(tmp_path, deterministic=False) == "engine 2" and cudnn.built == [2]


def test_the_first_plan_is_taken_where_runs_are_to_be_repeatable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path
                                                                 ) -> None:
    cudnn = FakeCudnn(monkeypatch)
    assert cudnn.choose(tmp_path, deterministic=True) == "engine 1", "the first that cuDNN builds"
    assert cudnn.choose(tmp_path, deterministic=False) == "engine 2", "and it is not remembered as the fastest"
    assert cudnn.choose(tmp_path, deterministic=True) == "engine 1", "whatever is remembered"
