"""Makes Python find this project's packages only in the folder that holds this package.

The working folder may have a foreign `train.py`, and PYTHONPATH a foreign package `common`.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = str(Path(__file__).resolve().parents[1])
PACKAGES = ("common", "train", "gpu_report", "pipelines", "graph_passes")


class OwnPackages:
    """A module finder that looks for this project's packages in one folder only."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [ROOT]) if name in PACKAGES else None


def import_packages() -> None:
    """Import the packages that the library is made of. These imports are fast. Raises ImportError if the program has
    imported another package or module of an equal name.
    """
    sys.meta_path.insert(0, OwnPackages)
    try:
        for name in PACKAGES:
            file = getattr(importlib.import_module(name), "__file__", None) or "one without a file"
            if Path(file).parent.parent != Path(ROOT):
                raise ImportError(f"resnet_mxnet needs its own package {name}, but this program has imported {file}: "
                                  "give that another name, or import resnet_mxnet first")
    finally:
        sys.meta_path.remove(OwnPackages)
