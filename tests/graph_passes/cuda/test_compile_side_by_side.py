"""Kernels compile in parallel, because all are known before the first is requested; no GPU is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from int8_networks import quantised
from test_without_gpu import FakeConvolutions, FakeGpu

from common.disk_cache import Cache
from graph_passes.errors import GraphError
from graph_passes.executors.cuda import kernel_library, network, toolchain
from graph_passes.executors.cuda.kernel_library import KernelLibrary
from graph_passes.executors.cuda.options import StepOptions
from graph_passes.executors.cuda.quantised import QuantisedNetwork
from graph_passes.executors.cuda.training_step import TrainingStep
from graph_passes.passes.quantise import Kept
from train import models
from train.language_model import LanguageModel

Compiled = list[tuple[str, bool]]  # input of NVRTC, and whether it ran in the main thread


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """The compiled kernels, by a fake NVRTC that takes no time."""
    found: Compiled = []

    def compile_kernel(source: str, expression: str, arch: str) -> tuple[bytes, str]:
        if "broken" in expression:
            raise GraphError(expression)
        found.append((expression, threading.current_thread() is threading.main_thread()))
        return f"code of {expression}".encode(), "symbol"

    class FakeKernel:
        def __init__(self, gpu: Any, cubin: bytes, symbol: str) -> None:
            self.cubin = cubin

        def launch(self, *arguments: Any, **options: Any) -> None: ...

    monkeypatch.setattr(kernel_library, "compile_kernel", compile_kernel)
    monkeypatch.setattr(kernel_library, "Kernel", FakeKernel)
    monkeypatch.setattr(kernel_library.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    return found


@pytest.fixture
def make_library(tmp_path: Path) -> Callable[[], KernelLibrary]:
    """Makes a library as each start of a program does, on the same disk."""
    return lambda: KernelLibrary(FakeGpu(0), Cache("tests", tmp_path))  # type: ignore[arg-type]


def test_kernels_are_compiled_side_by_side(make_library: Callable[[], KernelLibrary], compiled: Compiled,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at once: each waits until the others have begun. The next start finds them on disk."""
    library, meeting = make_library(), threading.Barrier(3, timeout=20)
    compile_kernel = kernel_library.compile_kernel

    def together(source: str, expression: str, arch: str) -> tuple[bytes, str]:
        meeting.wait()
        return compile_kernel(source, expression, arch)

    monkeypatch.setattr(kernel_library, "compile_kernel", together)
    with library.side_by_side():
        for name in ("a", "b", "c", "a"):
            library.begin("x.cu", name)
        got = [library.get("x.cu", name).cubin for name in ("a", "b", "c", "b")]  # type: ignore[attr-defined]
    assert got == [b"code of a", b"code of b", b"code of c", b"code of b"]
    assert sorted(name for name, _ in compiled) == ["a", "b", "c"]

    library = make_library()
    with library.side_by_side():
        library.begin("x.cu", "b")
        assert library.get("x.cu", "b").cubin == b"code of b"  # type: ignore[attr-defined]
    assert len(compiled) == 3


def test_what_is_asked_for_before_its_turn_is_compiled_at_once(make_library: Callable[[], KernelLibrary],
                                                               compiled: Compiled,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that nobody requests in the end are no longer compiled."""
    monkeypatch.setattr(kernel_library.os, "sched_getaffinity", lambda process: {0})
    library, busy = make_library(), threading.Event()
    compile_kernel = kernel_library.compile_kernel

    def first_waits(source: str, expression: str, arch: str) -> tuple[bytes, str]:
        if expression == "first":
            assert busy.wait(20)
        return compile_kernel(source, expression, arch)

    monkeypatch.setattr(kernel_library, "compile_kernel", first_waits)
    with library.side_by_side():
        for name in ("first", "b", "c"):
            library.begin("x.cu", name)
        library.get("x.cu", "b")
        assert compiled == [("b", True)]
        pool = library._pool
        threading.Timer(0.1, busy.set).start()
        library.get("x.cu", "first")
    assert pool
    pool.shutdown()
    assert ("first", False) in compiled and ("c", True) not in compiled


def test_why_a_kernel_cannot_be_compiled_is_said_to_who_asks_for_it(make_library: Callable[[], KernelLibrary],
                                                                    compiled: Compiled) -> None:
    library = make_library()
    with library.side_by_side():
        for name in ("broken", "a"):
            library.begin("x.cu", name)
        library.get("x.cu", "a")
        with pytest.raises(GraphError, match="broken"):
            library.get("x.cu", "broken")
    library.get("x.cu", "c")
    library.begin("x.cu", "d")  # outside the context, where nobody waits for it
    assert {name for name, _ in compiled} == {"a", "c"}


@dataclass
class Named:
    """Kernels in the order of `begin` and of `get`. `first`: kernels that had been begun when the first was
    requested."""

    begun: set[tuple[str, ...]] = field(default_factory=set)
    asked: set[tuple[str, ...]] = field(default_factory=set)
    first: set[tuple[str, ...]] = field(default_factory=set)

    def check(self, at_least: int, deterministic: bool = False) -> None:
        """Check that all kernels had begun to compile when the first was requested, and that almost none was compiled
        in vain. Only the loss's kernels may begin later: the loss is lowered together with the scores that it
        reads."""
        of_graph = {kernel for kernel in self.asked if kernel[0] != "optimizer.cu"}
        assert len(of_graph) >= at_least
        assert of_graph <= self.begun, of_graph - self.begun
        if not deterministic:
            late = of_graph - self.first
            assert {source for source, _ in late} <= {"softmax.cu"} and len(late) <= 2, late
        assert len(self.begun - of_graph) <= 4, self.begun - of_graph


@pytest.fixture
def named(compiled: Compiled, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> Named:
    """Kernels on a machine that has none yet. Nothing is computed, and any candidate may be the fastest."""
    found, get = Named(), KernelLibrary.get

    def asked_for(self: KernelLibrary, *kernel: str) -> Any:
        if kernel[0] != "optimizer.cu":
            found.first = found.first or set(found.begun)
        found.asked.add(kernel)
        return get(self, *kernel)

    recurrent = SimpleNamespace(plan=lambda problem: SimpleNamespace(
        workspace_bytes=4096, reserve_bytes=4096, forward=lambda *_, workspace: None,
        backward=lambda *_, workspace: None))
    monkeypatch.setattr(KernelLibrary, "begin", lambda self, *kernel: found.begun.add(kernel))
    monkeypatch.setattr(KernelLibrary, "get", asked_for)
    monkeypatch.setattr(network, "Gpu", FakeGpu)
    monkeypatch.setattr(toolchain, "_machine", lambda gpu: "fake")
    monkeypatch.setattr(toolchain, "ConvolutionLibrary", lambda *_: FakeConvolutions())
    monkeypatch.setattr(toolchain, "RecurrentLibrary", lambda *_: recurrent)
    monkeypatch.setattr(FakeGpu, "time_ms", lambda self, enqueue: rng.random())
    return found


@pytest.mark.long(but=["resnet18*"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["resnet50", "resnet18", "resnext50_32x4d"])
def test_what_a_step_asks_for_was_begun(name: str, deterministic: bool, named: Named, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeConvolutions, "deterministic", deterministic)
    shapes = {"data": (32, 224, 224, 3), "softmax_label": (32,)}
    TrainingStep(models.create(name, 1000).graph, shapes, StepOptions("float16", deterministic=deterministic),
                 cache_folder=tmp_path)
    named.check(at_least=20, deterministic=deterministic)


def test_what_a_language_model_asks_for_was_begun(named: Named, tmp_path: Path) -> None:
    model = LanguageModel(words=24, hidden=16, layers=2, steps=5, sequences=3)
    TrainingStep(model.graph, model.shapes, StepOptions("float16"), cache_folder=tmp_path)
    named.check(at_least=5)


@pytest.mark.long
def test_what_inference_in_int8_asks_for_was_begun(named: Named, tmp_path: Path, rng: np.random.Generator) -> None:
    case = quantised("resnet50", 2, 64, rng)
    made = QuantisedNetwork(case.network, case.shapes, case.scales, Kept(), case.params, cache_folder=tmp_path)
    named.asked.clear()
    made.load_from_device(1, "float16", (2, 64, 64, 4))
    made.infer(2)
    named.asked = {kernel for kernel in named.asked if "convert_input" not in kernel[1]}
    named.check(at_least=8)
