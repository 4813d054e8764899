"""Words the error message for a needed package that is not installed."""

from __future__ import annotations

import sys

from common.program import PACKAGES


def how_to_install(error: ModuleNotFoundError) -> str | None:
    """How to install the missing package, as a message. None if the missing module belongs to this project or to
    Python.
    """
    name = (error.name or "").partition(".")[0]
    if not name or name in PACKAGES or name in sys.stdlib_module_names:
        return None
    if name == "mxnet" and sys.version_info >= (3, 13):
        # MXNet's wheel requires NumPy below 2, and that NumPy does not exist for Python 3.13, so pip refuses to install
        # MXNet and NumPy together.
        return (f"{sys.executable} has no package mxnet: install it with pip install --no-deps mxnet==1.9.1, or "
                "mxnet-cu117==1.9.1 for an NVIDIA GPU")
    return (f"{sys.executable} has no package {name}: install resnet-mxnet[cpu], or resnet-mxnet[gpu] for an NVIDIA "
            "GPU (in a checkout: make without PYTHON=, or pip install '.[cpu]' in a virtual environment)")
