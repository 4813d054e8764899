"""Which of cuDNN's plans is taken: the fastest, which is stored; in deterministic runs the first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from common.disk_cache import Cache
from graph_passes import Graph, GraphError
from graph_passes.errors import TransientError
from graph_passes.executors.cuda import convolution
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.convolution import ConvolutionLibrary, Problem
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.training_step import TrainingStep
from train.models.resnet import resnet

PROBLEM = Problem("wgrad", (4, 9, 9, 16), (8, 3, 3, 16), (4, 9, 9, 8), (1, 1), (1, 1), (1, 1), "float16")
FUSED = dataclasses.replace(PROBLEM, kind="fprop_stats")
MILLISECONDS = (float("nan"), 3.0, 1.0, 2.0)  # time of each plan; cuDNN refuses to build the first
WORKSPACES = (0, 0, 4096, 512)  # workspace bytes of each plan


class FakeCudnn:
    """Four plans of fixed speed. `refusals`: why some cannot be built; `notes`: numerical notes of some; `seconds`:
    time to build a plan; `first_seconds`: for the first plan of a process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running, self.built = -1, []
        self.read = -1  # index of the plan that was read from the disk
        self.unreadable = self.unwritable = ""  # why a plan cannot be read from the disk, or written to it
        self.names = [f"engine {index}" for index in range(len(MILLISECONDS))]
        self.refusals = {0: "not supported"}
        self.notes: dict[int, str] = {}
        self.deselected: list[str] = []
        self.clock, self.seconds, self.first_seconds = 0.0, 0.0, 0.0
        monkeypatch.setattr(convolution, "time", SimpleNamespace(monotonic=lambda: self.clock))
        graph = MagicMock()
        graph.tensor.side_effect = lambda **description: MagicMock()
        graph.genstats.side_effect = lambda **_: (MagicMock(), MagicMock())
        graph.get_execution_plan_count.return_value = len(MILLISECONDS)
        graph.get_plan_name_at_index.side_effect = lambda index: self.names[index]
        graph.get_workspace_size_plan_at_index.side_effect = WORKSPACES.__getitem__
        graph.build_plan_at_index.side_effect = self.build
        graph.execute_plan_at_index.side_effect = self.execute
        graph.serialize.side_effect = self.serialize
        graph.deserialize.side_effect = self.deserialize
        graph.execute.side_effect = lambda pack, workspace, handle: self.execute(pack, workspace, self.read, handle)
        graph.deselect_numeric_notes.side_effect = lambda notes: setattr(self, "deselected", notes)
        cudnn = MagicMock(numerical_note=SimpleNamespace(**{note: note for note in convolution.NOTES}))
        cudnn.pygraph.return_value = graph
        cudnn.__version__ = "1.26"
        monkeypatch.setattr(convolution, "import_cudnn", lambda: cudnn)
        self.gpu: Any = MagicMock(time_ms=self.time_ms, allocate=self.allocate, check_free=self.check_free,
                                  fill_random=self.fill_random)
        self.memory = self.filled = range(0)
        self.free_bytes = 1 << 40
        self.item_bytes = 2  # bytes of an element of the tensors

    def build(self, index: int) -> None:
        self.clock += self.first_seconds or self.seconds
        self.first_seconds = 0.0
        if self.notes.get(index) in self.deselected:
            raise RuntimeError("Deselecting execution plan")
        if index in self.refusals:
            raise RuntimeError(self.refusals[index])
        self.built.append(index)

    def serialize(self) -> list[int]:
        if self.unwritable:
            raise RuntimeError(self.unwritable)
        return [self.built[-1]]

    def deserialize(self, handle: Any, built: list[int]) -> None:
        if self.unreadable:
            raise RuntimeError(self.unreadable)
        (self.read,) = built

    def check_free(self, num_bytes: int) -> None:
        if num_bytes > self.free_bytes - len(self.memory):
            raise TransientError("no room")

    def allocate(self, num_bytes: int) -> int:
        self.memory, self.filled = range(1 << 20, (1 << 20) + num_bytes), range(0)
        return self.memory.start

    def fill_random(self, address: int, num_bytes: int, dtype: str) -> None:
        self.filled = range(address, address + num_bytes)

    def execute(self, pack: dict[Any, int], workspace: int, index: int, handle: Any) -> None:
        """x, dy and dw are side by side in memory that has been filled, and the workspace is behind them."""
        if len(pack) == 3:
            sizes = [self.item_bytes * math.prod(shape) for shape in (PROBLEM.x, PROBLEM.y, PROBLEM.w)]
            for address, size, end in zip(pack.values(), sizes, [*list(pack.values())[1:], workspace], strict=True):
                assert self.filled.start <= address and address + size <= min(end, self.filled.stop)
        assert self.filled.stop <= workspace and workspace + WORKSPACES[index] <= self.memory.stop
        self.running = index

    def time_ms(self, enqueue: Callable[[], None], **options: int) -> float:
        enqueue()
        return MILLISECONDS[self.running]

    def choose(self, folder: Path, deterministic: bool, problem: Problem = PROBLEM) -> str:
        """Choose in a new process."""
        self.memory = range(0)
        library = ConvolutionLibrary(self.gpu, Cache("machine", folder), Arena(self.gpu), deterministic=deterministic)
        try:
            return library.plan(problem).name
        finally:
            library.save()


def test_the_fastest_plan_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                        caplog: pytest.LogCaptureFixture) -> None:
    cudnn = FakeCudnn(monkeypatch)
    assert cudnn.choose(tmp_path, deterministic=False) == "engine 2" and set(cudnn.built) == {1, 2, 3}
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "choosing the fastest kernels for this GPU and these shapes"]
    cudnn.built.clear()
    caplog.clear()
    assert cudnn.choose(tmp_path, deterministic=False) == "engine 2" and (cudnn.built, cudnn.read) == ([], 2)
    assert not caplog.records


def test_a_plan_that_cannot_be_read_back_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    cudnn = FakeCudnn(monkeypatch)
    cudnn.choose(tmp_path, deterministic=False)
    cudnn.built.clear()
    cudnn.unreadable = "CUDNN_STATUS_BAD_PARAM"
    assert cudnn.choose(tmp_path, deterministic=False) == "engine 2" and cudnn.built == [2]
    assert "(CUDNN_STATUS_BAD_PARAM): it is built anew" in caplog.records[-1].message
    for file in (tmp_path / "machine").glob("plan-*"):
        file.unlink()
    cudnn.unreadable = ""
    assert [cudnn.choose(tmp_path, deterministic=False) for _ in range(2)] == 2 * ["engine 2"]
    assert (cudnn.built, cudnn.read) == ([2, 2], 2)


def test_a_plan_that_cannot_be_written_out_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cudnn = FakeCudnn(monkeypatch)
    cudnn.unwritable = "CUDNN_STATUS_NOT_SUPPORTED"
    cudnn.choose(tmp_path, deterministic=False)
    for _ in range(2):
        cudnn.built.clear()
        assert cudnn.choose(tmp_path, deterministic=False) == "engine 2" and cudnn.built == [2]
    assert not [*(tmp_path / "machine").glob("plan-*")]


def test_a_plan_from_the_disk_runs_as_the_built_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cudnn = FakeCudnn(monkeypatch)
    cudnn.choose(tmp_path, deterministic=False)
    library = ConvolutionLibrary(cudnn.gpu, Cache("machine", tmp_path), Arena(cudnn.gpu))
    plan = library.plan(PROBLEM)
    assert (plan.name, plan.time_ms, plan.workspace_bytes) == ("engine 2", 1.0, WORKSPACES[2])
    cudnn.running, cudnn.filled, cudnn.memory = -1, range(0), range(1 << 20)
    plan.enqueue(7, workspace=0)
    assert cudnn.running == 2


@pytest.mark.parametrize("tf32, wanted", [(False, "engine 3"), (True, "engine 2")])
def test_an_engine_that_is_not_exact_is_left_out_where_float32_is_meant(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tf32: bool, wanted: str) -> None:
    """An inexact engine is left out even if an older version has chosen and stored it."""
    cudnn = FakeCudnn(monkeypatch)
    cudnn.item_bytes = 4
    exact = dataclasses.replace(PROBLEM, dtype="float32")
    for untold in ("", "engine 2", "engine 2"):
        monkeypatch.setattr(convolution, "UNTOLD", {"wgrad": untold})
        cudnn.memory = range(0)
        library = ConvolutionLibrary(cudnn.gpu, Cache("machine", tmp_path), Arena(cudnn.gpu), tf32=tf32)
        assert library.plan(exact).name == (wanted if untold else "engine 2")
        library.save()


def test_choices_are_kept_while_others_are_being_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    cudnn = FakeCudnn(monkeypatch)
    library = ConvolutionLibrary(cudnn.gpu, Cache("machine", tmp_path), Arena(cudnn.gpu))
    library.plan(PROBLEM)
    monkeypatch.setattr(convolution, "KEEP_SECONDS", 0.0)
    library.plan(dataclasses.replace(PROBLEM, stride=(2, 2)))  # the first choice is saved at its start
    assert [record.message for record in caplog.records][1:] == [
        "choosing the fastest kernels: 1 chosen and kept so far"]
    del library  # the process is killed
    cudnn.built.clear()
    assert cudnn.choose(tmp_path, deterministic=False) == "engine 2" and cudnn.built == []


def test_the_first_plan_is_taken_where_runs_are_to_be_repeatable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path
                                                                 ) -> None:
    cudnn = FakeCudnn(monkeypatch)
    assert cudnn.choose(tmp_path, deterministic=True) == "engine 1", "the first that cuDNN builds"
    assert cudnn.choose(tmp_path, deterministic=False) == "engine 2", "and it is not remembered as the fastest"
    assert cudnn.choose(tmp_path, deterministic=True) == "engine 1", "whatever is remembered"


@pytest.mark.parametrize("note, dtype, tf32, deterministic, taken", [
    *[(note, dtype, tf32, False, False) for note in ("REDUCED_PRECISION_REDUCTION", "WINOGRAD", "FFT")
      for dtype, tf32 in (("float16", True), ("bfloat16", True), ("float32", True), ("float32", False))],
    ("DOWN_CONVERT_INPUTS", "float16", True, False, False),
    ("DOWN_CONVERT_INPUTS", "float32", True, False, True),
    ("DOWN_CONVERT_INPUTS", "float32", False, False, False),
    ("TENSOR_CORE", "float16", False, False, True),
    ("TENSOR_CORE", "float32", True, False, True),
    ("TENSOR_CORE", "float32", False, False, False),
    ("NONDETERMINISTIC", "float16", True, False, True),
    ("NONDETERMINISTIC", "float16", True, True, False),
])
def test_plans_that_round_otherwise_are_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, note: str,
                                                  dtype: str, tf32: bool, deterministic: bool, taken: bool) -> None:
    """Plans are refused that sum in less than fp32, transform tensors, or use TF32 without being asked. The notes of a
    plan can be listed.
    """
    cudnn = FakeCudnn(monkeypatch)
    best = 1 if deterministic else 2  # the first, or the fastest
    cudnn.notes = {best: note}
    problem, cudnn.item_bytes = dataclasses.replace(PROBLEM, dtype=dtype), 4 if dtype == "float32" else 2
    library = ConvolutionLibrary(cudnn.gpu, Cache("machine", tmp_path), Arena(cudnn.gpu), tf32, deterministic)
    plan = library.plan(problem)
    assert (plan.name == f"engine {best}") == taken
    assert library.notes(plan) == ([note] if taken else [])


def test_a_library_that_loads_slowly_refuses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fused problem has half a second. The first plan of a process may take longer to build, and be useless."""
    cudnn = FakeCudnn(monkeypatch)
    cudnn.first_seconds = 100.0
    assert cudnn.choose(tmp_path, False, FUSED) == "engine 2"


def test_time_for_plans_that_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half a second; more in benchmarks of convolutions."""
    cudnn = FakeCudnn(monkeypatch)
    cudnn.refusals.clear()
    cudnn.seconds = 1.0
    assert cudnn.choose(tmp_path, False, FUSED) == "engine 1" and set(cudnn.built) == {0, 1}
    cudnn.built.clear()
    library = ConvolutionLibrary(cudnn.gpu, Cache("machine", tmp_path / "thorough"), Arena(cudnn.gpu))
    library.fused_seconds, cudnn.memory = 5.0, range(0)
    assert library.plan(FUSED).name == "engine 2" and set(cudnn.built) == {0, 1, 2, 3}


@pytest.mark.parametrize("names, tried, chosen", [
    (["eng8", "eng4_k2=1", "eng2", "eng4"], {1, 3}, "eng4"),  # eng8 and eng2 have no settings
    (["eng4_k2=1", "eng8", "eng2", "eng9"], {1}, "eng8"),  # cuDNN refuses the first: the next is taken
    (["eng8", "eng9", "eng2", "eng4"], {1, 2, 3}, "eng2"),  # none has settings
])
def test_the_last_engines_are_tried_where_no_other_can_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                              names: list[str], tried: set[int], chosen: str) -> None:
    """For a fused problem these engines take the longest to build, and are slow."""
    cudnn = FakeCudnn(monkeypatch)
    cudnn.names = names
    assert cudnn.choose(tmp_path, False, FUSED) == chosen and set(cudnn.built) == tried
    cudnn.built.clear()
    assert cudnn.choose(tmp_path, False, PROBLEM) == names[2] and set(cudnn.built) == {1, 2, 3}


def test_a_busy_machine_refuses_nothing_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the time is up before a plan is found, the next process tries the remaining ones."""
    cudnn = FakeCudnn(monkeypatch)
    cudnn.seconds = 1.0
    cudnn.refusals = dict.fromkeys((0, 1, 2), "not supported")
    with pytest.raises(TransientError, match="cuDNN has no fprop_stats .*none of the first in time"):
        cudnn.choose(tmp_path, False, FUSED)
    assert cudnn.choose(tmp_path, False, FUSED) == "engine 3"
    cudnn.refusals[3] = "not supported"
    everything = tmp_path / "refuses everything"
    for _ in range(3):
        with pytest.raises(GraphError):
            cudnn.choose(everything, False, FUSED)
    cudnn.refusals.clear()
    with pytest.raises(GraphError, match="as found before"):
        cudnn.choose(everything, False, FUSED)


def test_what_a_process_gives_up_it_does_not_try_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cudnn = FakeCudnn(monkeypatch)
    cudnn.seconds, cudnn.refusals = 1.0, dict.fromkeys(range(4), "not supported")
    library = ConvolutionLibrary(cudnn.gpu, Cache("machine", tmp_path), Arena(cudnn.gpu))
    for _ in range(2):
        with pytest.raises(TransientError):
            library.plan(FUSED)
        assert cudnn.clock == 2.0


@pytest.mark.parametrize("message", ["CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory",
                                     "CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"])
@pytest.mark.parametrize("problem", [PROBLEM, FUSED], ids=["alone", "fused"])
def test_want_of_memory_is_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problem: Problem, message: str
                                      ) -> None:
    cudnn = FakeCudnn(monkeypatch)
    cudnn.refusals = {0: "not supported", 2: message}
    assert cudnn.choose(tmp_path, False, problem) == "engine 3", "the fastest that can be had now"
    cudnn.refusals = dict.fromkeys(range(4), message)
    with pytest.raises(TransientError, match=f"{message}.*: use a smaller batch size"):
        cudnn.choose(tmp_path, False, problem)
    with pytest.raises(TransientError, match=f"{message}.*: use a smaller batch size"):
        cudnn.choose(tmp_path, True, problem)
    cudnn.refusals.clear()
    assert cudnn.choose(tmp_path, False, problem) == "engine 2", "nothing of that is remembered"


def test_a_workspace_without_room_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cudnn = FakeCudnn(monkeypatch)
    cudnn.free_bytes = sum(2 * math.prod(shape) for shape in (PROBLEM.x, PROBLEM.y, PROBLEM.w)) + 2000
    assert cudnn.choose(tmp_path, False) == "engine 3", "the fastest has no room for its workspace"
    cudnn.free_bytes = 1 << 40
    assert cudnn.choose(tmp_path, False) == "engine 2"
    cudnn.free_bytes = 100
    with pytest.raises(TransientError, match="no room"):
        cudnn.choose(tmp_path / "empty", False)


def test_a_remembered_plan_that_cannot_be_built_is_chosen_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                               caplog: pytest.LogCaptureFixture) -> None:
    cudnn = FakeCudnn(monkeypatch)
    assert cudnn.choose(tmp_path, False) == "engine 2"
    cudnn.refusals[2] = cudnn.unreadable = "not on this GPU"
    assert cudnn.choose(tmp_path, False) == "engine 3"
    assert any("(not on this GPU): it is chosen anew" in record.message for record in caplog.records)


def test_a_gpu_that_cannot_go_on_is_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cudnn = FakeCudnn(monkeypatch)
    cudnn.gpu.synchronize.side_effect = RuntimeError("CUDA error 700: an illegal memory access")
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        cudnn.choose(tmp_path, False, FUSED)
    cudnn.gpu.synchronize.side_effect = None
    assert cudnn.choose(tmp_path, False, FUSED) == "engine 2"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_notes_of_the_plans_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str) -> None:
    """Prints a table for ResNet-50's step (pytest -s): the plans in use, and the fastest of all plans, with
    milliseconds and notes. It shows the cost of leaving plans out."""
    batch = 32 if dtype == "float32" else 256
    shapes = {"data": (batch, 224, 224, 3), "softmax_label": (batch,)}
    graph = Graph.from_json(resnet(50).tojson())
    step = TrainingStep(graph, shapes, StepOptions(dtype, tf32=False), cache_folder=tmp_path)
    library = step._tools.convolutions
    used = list(library._plans.values())
    monkeypatch.setattr(ConvolutionLibrary, "_unwanted", lambda self, problem: [])
    every = ConvolutionLibrary(step.gpu, Cache("all", tmp_path), Arena(step.gpu), tf32=True)
    print(f"\n{'':<80}{'in use: ms':>10}  {'notes':<30}{'fastest: ms':>11}  notes")
    totals = [0.0, 0.0]
    for plan in used:
        rival = every.plan(plan.problem)
        own, others = library.notes(plan), every.notes(rival)
        print(f"{plan.problem!s:<80}{plan.time_ms:>10.3f}  {', '.join(own).lower():<30}{rival.time_ms:>11.3f}  "
              f"{', '.join(others).lower()}")
        totals = [totals[0] + plan.time_ms, totals[1] + rival.time_ms]
        assert not {*own} & {*convolution.INEXACT, "DOWN_CONVERT_INPUTS"}, plan.problem
    print(f"{len(used)} plans: {totals[0]:.3f} ms, the fastest of all {totals[1]:.3f} ms")
    assert used
    step.gpu.free_all()
