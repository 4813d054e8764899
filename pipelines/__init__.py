"""Images from any of the formats in sources/, decoded and augmented by DALI, as batches in MXNet arrays.

A public name is imported when it is first used, so `python -m pipelines --help` does not wait for DALI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from common.phases import IMPORTS, phase
from pipelines.errors import DataError

if TYPE_CHECKING:
    from pipelines.dali_loader import open_chosen, open_files
    from pipelines.graph import DEFAULT_HW_DECODER_LOAD
    from pipelines.loader import Batch, Loader, LoaderConfig
    from pipelines.opening import open_loader
    from pipelines.transform import MEAN, STD, ImageTransform

__all__ = ["DEFAULT_HW_DECODER_LOAD", "MEAN", "STD", "Batch", "DataError", "ImageTransform", "Loader", "LoaderConfig",
           "open_chosen", "open_files", "open_loader"]

_MODULES = {
    "dali_loader": ("open_chosen", "open_files"),
    "graph": ("DEFAULT_HW_DECODER_LOAD",),
    "loader": ("Batch", "Loader", "LoaderConfig"),
    "opening": ("open_loader",),
    "transform": ("MEAN", "STD", "ImageTransform"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            with phase(IMPORTS):
                return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
