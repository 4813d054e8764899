"""Restores, just before MXNet 1.9.1 is imported, names that MXNet uses and newer NumPy and Python have removed.

This module is installed as `site-packages/resnet_mxnet_hook.py`, because programs such as horovodrun import MXNet
themselves. `resnet_mxnet_hook.pth` runs at every start of Python and imports this module once a program imports
`mxnet`. Therefore this module imports no other module of this project, and imports slow modules only inside functions.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

FINANCIAL_FUNCTIONS = ("mirr", "npv", "pmt", "ppmt", "pv", "rate")


class MXNetHook:
    """A meta path finder. The finder in `resnet_mxnet_hook.pth` has the same name."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        loader = _LOADERS.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if loader else None
        if loader and spec and spec.origin:
            spec.loader = loader(name, spec.origin)
        return spec


def install(more: Mapping[str, Callable[[str, str], Any]] = MappingProxyType({})) -> type[MXNetHook]:
    """Install this copy of the hook in place of any other copy. The hook patches MXNet when MXNet is imported. `more`:
    further loaders, by the name of the module that each loads.
    """
    _LOADERS.update(more)
    others = [finder for finder in sys.meta_path if getattr(finder, "__name__", "") != MXNetHook.__name__]
    sys.meta_path[:] = [MXNetHook, *others]
    return MXNetHook


def mend() -> None:
    """Prepare NumPy and the environment variables for `import mxnet`."""
    _mend_numpy()
    # oneDNN's subgraph fusion rewrites bound Symbols and gave wrong sums of residuals; our own passes do the fusing.
    os.environ.setdefault("MXNET_SUBGRAPH_BACKEND", "NONE")
    # Without this setting the first softmax of a process prints eight lines about a copy that oneDNN makes.
    os.environ.setdefault("MXNET_STORAGE_FALLBACK_LOG_VERBOSE", "0")
    # CUDA's default of 8 hardware queues is smaller than the number of streams of DALI's decoders. The training step
    # and the decoders would then share a queue, and decoding would wait for whole steps (38 ms instead of 28 ms a step:
    # ResNet-50, batch 256, one H200).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if not os.environ.get("OMP_NUM_THREADS", "").strip():
        os.environ["OMP_NUM_THREADS"] = str(num_compute_threads())


def _mend_numpy() -> None:
    """Add the names that MXNet reads and that this version of NumPy lacks."""
    import numpy

    np: Any = numpy
    for name, value in _removed_names(np).items():
        if name not in vars(np):  # hasattr() would print a warning about np.bool
            setattr(np, name, value)


def _removed_names(np: Any) -> dict[str, Any]:
    return {
        "bool": np.bool_,                                                               # removed in NumPy 1.24
        "PZERO": 0.0, "NZERO": -0.0, "PINF": np.inf, "NINF": -np.inf, "Inf": np.inf,    # removed in 2.0
        "NaN": np.nan, "NAN": np.nan,
        "alltrue": np.all, "sometrue": np.any, "product": np.prod, "round_": np.round,
        "msort": lambda a: np.sort(a, axis=0),
        "compat": SimpleNamespace(basestring=str),
        "in1d": lambda ar1, ar2, **options: np.isin(np.ravel(ar1), ar2, **options),     # removed in 2.4
        "trapz": vars(np).get("trapezoid"),
    } | {name: _financial_function(name) for name in FINANCIAL_FUNCTIONS}


def _financial_function(name: str) -> Callable[..., Any]:
    def removed(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"NumPy has no function {name}() since version 1.20: "
                           f"install numpy-financial and call numpy_financial.{name}()")

    return removed


def num_compute_threads() -> int:
    """The number of compute threads: one for each physical core that this process may use and shares with no other
    process of the run.

    MXNet's own default is half the logical cores. If each core has one hardware thread, as on most virtual machines,
    half of the cores stay idle: on two cores of this kind ResNet-50 trained 1.7 times as fast with both in use.
    """
    import psutil

    num_cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    return max(1, num_cores // int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")))


class _MXNetLoader(importlib.machinery.SourceFileLoader):
    """Applies the patches when MXNet is imported, but not when a program only checks that it is installed."""

    def exec_module(self, module: ModuleType) -> None:
        mend()
        super().exec_module(module)


class _RecordIOLoader(importlib.machinery.SourceFileLoader):
    """Patches mxnet.recordio: pack() and pack_img() call tostring(), an old name of tobytes() that NumPy 2.3 removed.
    """

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).replace(b".tostring()", b".tobytes()")
        return compile(source, self.path, "exec", dont_inherit=True)


class _VersionLoader(importlib.machinery.SourceFileLoader):
    """Patches modules that compare versions with distutils, which Python 3.12 has removed. In older Pythons setuptools
    replaces distutils, and importing setuptools would take a seventh of MXNet's import time.
    """

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        for old in (b"LooseVersion", b"StrictVersion"):
            source = source.replace(b"from distutils.version import " + old,
                                    b"from packaging.version import Version as " + old)
        return compile(source, self.path, "exec", dont_inherit=True)


class _TextLoader(importlib.machinery.SourceFileLoader):
    """Patches a module that writes operators' parameters with str(): gives str() the behaviour of NumPy 1."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["str"] = _text
        super().exec_module(module)


def _text(value: object) -> str:
    """str(value), but NumPy numbers in a tuple print as plain ones: (4, 2), not (4, np.int64(2))."""
    text = str(value)
    if "np." in text:
        import numpy as np

        with np.printoptions(legacy="1.21"):
            text = str(value)
    return text


# module -> the function that makes its loader from the module's name and file
_LOADERS: dict[str, Callable[[str, str], Any]] = {
    "mxnet": _MXNetLoader,
    "mxnet.recordio": _RecordIOLoader,
    "mxnet.numpy_dispatch_protocol": _VersionLoader,
    "mxnet.numpy_op_fallback": _VersionLoader,
    "mxnet._ctypes.ndarray": _TextLoader,
    "mxnet._ctypes.symbol": _TextLoader,
    "mxnet.io.io": _TextLoader,
}
