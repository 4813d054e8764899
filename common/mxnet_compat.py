"""The one place through which MXNet is imported: `from common.mxnet_compat import mx`.

MXNet 1.9.1 reads names that NumPy 1.24 removed (`np.bool`), and on Python 3.12 the `distutils` that only setuptools
still brings. Importing this module puts a finder in front of Python's own that mends both just before `import mxnet`,
whoever imports it. `mxnet_compat.pth` in site-packages does so at every interpreter start, because horovodrun imports
MXNet itself, and then forgets the package: a program of another checkout has its own. Where the project is used without
being installed, this import alone is enough.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from common.errors import ProgramError, UserError

MAX_THREADS = 1024  # OpenMP dies of many times more

mx: Any  # the mxnet module, imported at first use by __getattr__ below


def _mend() -> None:
    """Prepare NumPy, distutils and the environment for `import mxnet`."""
    import numpy as np

    if "bool" not in vars(np):
        setattr(np, "bool", np.bool_)  # noqa: B010  (a plain assignment is a type error)
    if sys.version_info >= (3, 12):
        import setuptools  # noqa: F401  supplies distutils
    # oneDNN's subgraph fusion rewrites bound Symbols and gave wrong residual sums; our own passes do the fusing.
    os.environ.setdefault("MXNET_SUBGRAPH_BACKEND", "NONE")
    # CUDA's default of 8 hardware queues is fewer than DALI's decoders have streams: the training step then shares a
    # queue with them, and decoding waits for whole steps (38 instead of 28 ms a step: ResNet-50, batch 256, one H200).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ["OMP_NUM_THREADS"] = given_threads() or str(_num_compute_threads())


def given_threads() -> str:
    """The threads that the user wants for what is computed on the CPU, or "". Raises UserError for what MXNet and
    OpenMP would take for no number, or die of."""
    given = os.environ.get("OMP_NUM_THREADS", "").strip()
    if given and not (given.isdecimal() and 1 <= int(given) <= MAX_THREADS):
        raise UserError(f"OMP_NUM_THREADS is {given!r}: give a whole number from 1 to {MAX_THREADS:,}, or unset it")
    return given


def _num_compute_threads() -> int:
    """One for each physical core that this process may use and shares with no other process of the run.

    MXNet itself takes half the logical ones, which is half the machine where a core has one thread, as on most virtual
    machines: ResNet-50 trained 1.7 times as fast on two such cores with both in use.
    """
    import psutil

    num_cores = min(psutil.cpu_count(logical=False) or 1, len(os.sched_getaffinity(0)))
    return max(1, num_cores // int(os.environ.get("HOROVOD_LOCAL_SIZE", "1")))


class _MendBeforeMXNet:
    """A meta path finder that finds nothing; it acts once, when `mxnet` is looked for, and removes itself."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "mxnet":
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            _mend()


if "mxnet" not in sys.modules:
    sys.meta_path.insert(0, _MendBeforeMXNet())  # type: ignore[arg-type]


def __getattr__(name: str) -> Any:
    if name == "mx":
        threads_given = "mxnet" in sys.modules or given_threads()
        try:
            mxnet = importlib.import_module("mxnet")
        except OSError as error:
            if "libcuda.so" not in str(error):
                raise
            raise ProgramError("the packages for a GPU are installed, but the NVIDIA driver (libcuda.so.1) is missing: "
                               "install it, give the container its GPUs, or run make setup for the CPU") from None
        if not threads_given:  # MXNet has read it; programs started from here may have fewer cores
            os.environ.pop("OMP_NUM_THREADS", None)
        return mxnet
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
