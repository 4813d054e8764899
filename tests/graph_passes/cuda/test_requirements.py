"""The message on a machine that cannot run the cuda executor: one sentence, with the way out. Needs no GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from common import nvidia_gpus
from common.disk_cache import Cache
from graph_passes import GraphError
from graph_passes.executors.cuda import convolution, requirements
from graph_passes.executors.cuda.arena import Arena
from graph_passes.executors.cuda.convolution import ConvolutionLibrary, Problem, import_cudnn
from graph_passes.executors.cuda.device import Gpu


def use_machine(monkeypatch: pytest.MonkeyPatch, version: int = 13000, count: int = 1, status: int = 0,
                capability: tuple[int, int] = (9, 0)) -> None:
    """Simulate a driver of this CUDA version with `count` GPUs; `status` is its answer to everything."""
    driver = SimpleNamespace(
        cuInit=lambda flags: (status,), cuDriverGetVersion=lambda: (status, version),
        cuDeviceGetCount=lambda: (status, count), cuGetErrorString=lambda status: (0, b"no device"))
    device = SimpleNamespace(set_current=lambda: None, compute_capability=capability, name="Some GPU")
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace(Device=lambda number: device))


@pytest.mark.parametrize("machine, device_id, sentence", [
    ({"version": 11040}, 0, "the NVIDIA driver supports CUDA 11.4 only.*update the driver"),
    ({"status": 100}, 0, r"the NVIDIA driver does not answer \(CUDA error 100: no device\)"),
    ({"count": 2}, 2, "there is no GPU 2: this machine has 2, numbered from 0"),
    ({"capability": (7, 0)}, 0, r"GPU 0 \(Some GPU\) has compute capability 7.0; cuDNN 9 needs 7.5 or newer"),
])
def test_driver_and_gpu(machine: dict, device_id: int, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_machine(monkeypatch, **machine)
    with pytest.raises(GraphError, match=sentence):
        Gpu(device_id)


@pytest.mark.parametrize("module, use, sentence", [
    ("cuda.bindings", lambda: Gpu(0), r"needs cuda-core and cuda-bindings .*pip install '.\[gpu\]'"),
    ("cuda.core", lambda: Gpu(0), "needs cuda-core and cuda-bindings"),
    ("cudnn", import_cudnn, r"needs nvidia-cudnn-frontend .*pip install '.\[gpu\]'"),
])
def test_a_missing_python_package(module: str, use: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_machine(monkeypatch)
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    with pytest.raises(GraphError, match=sentence):
        use()


def test_cudnn_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = MagicMock()
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    cudnn.backend_version.side_effect = RuntimeError("dlopen")
    with pytest.raises(GraphError, match=r"the cuDNN library \(libcudnn.so.9\) is missing: install the GPU packages"):
        import_cudnn()
    cudnn.backend_version.side_effect = [90000]
    with pytest.raises(GraphError, match=r"cuDNN 90000 is too old, 9.1 or newer is needed: install the GPU packages"):
        import_cudnn()


def test_nvrtc_and_mxnet(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(Exception):
        pass

    def load(name: str) -> None:
        raise Missing(name)

    monkeypatch.setitem(sys.modules, "cuda.pathfinder",
                        SimpleNamespace(DynamicLibNotFoundError=Missing, load_nvidia_dynamic_lib=load))
    monkeypatch.setattr(requirements, "Gpu", lambda device_id: None)
    monkeypatch.setattr(requirements, "import_cudnn", lambda: None)
    features = SimpleNamespace(is_enabled=lambda feature: True)
    mx = SimpleNamespace(runtime=SimpleNamespace(Features=lambda: features))
    monkeypatch.setattr(requirements, "mx", mx)
    with pytest.raises(GraphError, match=r"NVRTC \(libnvrtc.so\) is missing.*pip install '.\[gpu\]'"):
        requirements.check_requirements(0)
    features.is_enabled = lambda feature: False
    with pytest.raises(GraphError, match="MXNet is installed without GPU support: install the GPU packages"):
        requirements.check_requirements(0)


def test_too_little_memory() -> None:
    gpu = object.__new__(Gpu)
    gpu._driver = SimpleNamespace(cuMemGetInfo=lambda: (0, 3 << 30, 80 << 30))
    with pytest.raises(GraphError, match=r"has 3.0 of 80.0 GiB free, 4.5 GiB more are needed: use a smaller batch"):
        gpu.allocate(9 << 29)


@pytest.mark.parametrize("refusing, sentence", [
    ("validate", r"cuDNN refuses the dgrad of input \(2, 9, 9, 5\).*\(BAD_PARAM\)"),
    ("build_plan_at_index", r"cuDNN has no dgrad for input \(2, 9, 9, 5\).*use channels that are multiples of 8"),
])
def test_a_shape_that_cudnn_refuses(refusing: str, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
                                    ) -> None:
    cudnn, gpu = MagicMock(), MagicMock()
    graph = cudnn.pygraph.return_value
    graph.get_execution_plan_count.return_value = 2
    getattr(graph, refusing).side_effect = RuntimeError("BAD_PARAM\nmore")
    monkeypatch.setattr(convolution, "import_cudnn", lambda: cudnn)
    library = ConvolutionLibrary(gpu, Cache("machine", tmp_path), Arena(gpu))
    problem = Problem("dgrad", (2, 9, 9, 5), (8, 3, 3, 5), (2, 9, 9, 8), (1, 1), (1, 1), (1, 1), "float16")
    with pytest.raises(GraphError, match=sentence):
        library.plan(problem)


@pytest.mark.parametrize("version, capability, sentence", [
    (11040, (8, 0), "the NVIDIA driver supports CUDA 11.4 only, .* update the driver, then run make setup"),
    (12080, (6, 1), r"GTX 1080 \(compute capability 6.1\) is older than 7.5, which cuDNN 9 needs"),
    (12080, (9, 0), "MXNet is installed without GPU support: install the GPU packages"),
])
def test_packages_for_the_cpu_beside_a_gpu(version: int, capability: tuple[int, int], sentence: str,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """The state after a setup that could not use the GPU: a run gives the same reason."""
    features = SimpleNamespace(is_enabled=lambda name: False)
    monkeypatch.setattr(requirements, "mx", SimpleNamespace(runtime=SimpleNamespace(Features=lambda: features)))
    monkeypatch.setattr(requirements, "find_gpus", lambda: [nvidia_gpus.GpuInfo("GTX 1080", capability)])
    monkeypatch.setattr(requirements, "driver_cuda_version", lambda: version)
    with pytest.raises(GraphError, match=sentence):
        requirements.check_requirements(0)
