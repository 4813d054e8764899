"""The graph of a network, passes that rewrite it, and executors that run it.

Submodules are imported at their first use, so that `python -m train --help` does not wait for NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from graph_passes.errors import GraphError

if TYPE_CHECKING:
    from graph_passes.graph import VARIABLE, Graph, Node
    from graph_passes.operators import Ref

__all__ = ["VARIABLE", "Graph", "GraphError", "Node", "Ref"]

_MODULES = {"graph": ("VARIABLE", "Graph", "Node"), "operators": ("Ref",)}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
