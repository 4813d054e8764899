"""One GPU and its kernels for all tests of this folder."""

from __future__ import annotations

import pytest
from gpu_arrays import Device

from common.disk_cache import Cache
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernels import KernelLibrary


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    gpu = Gpu()
    return Device(gpu, KernelLibrary(gpu, Cache("tests", tmp_path_factory.mktemp("cache"))))
