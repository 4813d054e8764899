"""What to say where a package that this project needs is not installed."""

from __future__ import annotations

import sys

from common.program import PACKAGES


def how_to_install(error: ModuleNotFoundError) -> str | None:
    """What to tell the user; None if the missing module is ours or Python's own."""
    name = (error.name or "").partition(".")[0]
    if not name or name in PACKAGES or name in sys.stdlib_module_names:
        return None
    if name == "mxnet" and sys.version_info >= (3, 13):
        # Its wheel asks for a NumPy older than 2, which Python 3.13 does not have: pip refuses both together.
        return (f"{sys.executable} has no package mxnet: install it with pip install --no-deps mxnet==1.9.1, or "
                "mxnet-cu117==1.9.1 for an NVIDIA GPU")
    return (f"{sys.executable} has no package {name}: install resnet-mxnet[cpu], or resnet-mxnet[gpu] for an NVIDIA "
            "GPU (in a checkout: make without PYTHON=, or pip install '.[cpu]' in a virtual environment)")
