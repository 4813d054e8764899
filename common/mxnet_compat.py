"""The only place that imports MXNet: `from common.mxnet_compat import mx`.

If MXNet cannot be imported, the program ends with one sentence that gives the reason. `common.mxnet_hook` restores
names that MXNet 1.9.1 uses and that newer versions of NumPy and Python have removed.
"""

from __future__ import annotations

import importlib
import os
import platform
import shlex
import sys
from importlib import metadata
from typing import Any

from common import mxnet_hook, mxnet_start
from common.errors import ProgramError, UserError
from common.packages import how_to_install
from common.phases import IMPORTS, phase

MAX_THREADS = 1024  # OpenMP crashes if the number of threads is many times larger
ENGINES = ("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice")
PACKAGES_OF_MXNET = {"graphviz": "graphviz<0.9"}

mx: Any  # the mxnet module, imported at first use by __getattr__ below


def given_threads() -> str:
    """OMP_NUM_THREADS, the user's number of CPU threads; "" if it is not set. Raises UserError for a value with which
    MXNet or OpenMP would crash.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").strip()
    if given and not (given.isdecimal() and 1 <= int(given) <= MAX_THREADS):
        raise UserError(f"OMP_NUM_THREADS is {given!r}: give a whole number from 1 to {MAX_THREADS:,}, or unset it")
    return given


def _check_variables() -> None:
    """Raise UserError if the value of an environment variable would crash MXNet."""
    for name, value in os.environ.items():
        if name == "MXNET_ENGINE_TYPE" and value not in ENGINES:
            raise UserError(f"{name} is {value!r}: give {', '.join(ENGINES[:-1])} or {ENGINES[-1]}, or unset it")
        if name.startswith("MXNET_") and name.endswith("_NTHREADS") and value and not value.isdecimal():
            raise UserError(f"{name} is {value!r}: give a whole number, or unset it")


def _import_mxnet() -> Any:
    _check_variables()
    # Our own passes fuse operators, so MXNet's fusion is turned off here: it may give wrong sums (see mxnet_hook.py).
    # The hook alone would let a program turn it on.
    os.environ["MXNET_SUBGRAPH_BACKEND"] = "NONE"
    # MXNet 1.9.1 may give wrong gradients in a bound Symbol if a tensor has more readers than this limit, by default 8.
    # test_formula.py has a tensor with 25 readers.
    os.environ["MXNET_EXEC_INPLACE_GRAD_SUM_CAP"] = str(2**30)
    try:
        return importlib.import_module("mxnet")
    except OSError as error:
        if "libcuda.so" not in str(error):
            raise
        raise ProgramError("the packages for a GPU are installed, but the NVIDIA driver (libcuda.so.1) is missing: "
                           "install it, give the container its GPUs, or run make setup for the CPU") from None
    except ModuleNotFoundError as error:
        if error.name == "mxnet":
            raise UserError(how_to_install(error) or str(error)) from None
        raise UserError(_missing(error.name or str(error))) from None
    # Python would report an AttributeError from __getattr__ as "no name 'mx'"
    except (AttributeError, ImportError) as error:
        raise ProgramError(f"MXNet cannot be imported with Python {platform.python_version()} and NumPy "
                           f"{metadata.version('numpy')} ({error}): run make setup, which installs a NumPy that "
                           "MXNet works with (without make: pip install numpy==1.26.4, on Python below 3.13)") from None


def _missing(module: str) -> str:
    package = module.partition(".")[0]
    wanted = PACKAGES_OF_MXNET.get(package, package)
    return (f"MXNet needs the package {package}, which is not installed: run make setup, or "
            f"{sys.executable} -m pip install {shlex.quote(wanted)}")


if "mxnet" not in sys.modules:
    mxnet_hook.install(mxnet_start.LOADERS)


def __getattr__(name: str) -> Any:
    if name == "mx":
        threads_given = "mxnet" in sys.modules or given_threads()
        with phase(IMPORTS):
            mxnet = _import_mxnet()
        # MXNet has read OMP_NUM_THREADS by now; child programs must not inherit the number, as they may have fewer
        # cores
        if not threads_given:
            os.environ.pop("OMP_NUM_THREADS", None)
        return mxnet
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
