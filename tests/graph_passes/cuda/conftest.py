"""One GPU and its kernels for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gpu_arrays import DTYPES, Device

from common.disk_cache import Cache
from graph_passes.executors.cuda import network
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernel_library import KernelLibrary, compile_kernel


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    gpu = Gpu()
    return Device(gpu, KernelLibrary(gpu, Cache("tests", tmp_path_factory.mktemp("cache"))))


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def nvrtc() -> None:
    """Skip the test if NVRTC is not installed."""
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    try:
        compile_kernel("elementwise.cu", "add<float>", "sm_90a")
    except (ImportError, RuntimeError, OSError) as error:
        if "nvrtc" in str(error).lower() and "COMPILATION" not in str(error):
            pytest.skip(f"NVRTC is not installed: {error}")
        raise


@pytest.fixture(autouse=True)
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Free the GPU memory of a test's steps after the test, because other tests run at the same time."""
    made: list[Gpu] = []

    class Remembered(Gpu):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(network, "Gpu", Remembered)
    yield
    for gpu in made:
        gpu.free_all()
