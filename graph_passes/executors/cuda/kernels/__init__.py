"""One file for each kernel: NAME.cu (or a header, NAME.cuh) has the CUDA code, NAME.py the Python code for it.

A file may define three names. They are collected here, so no list of kernels is needed:

    OPERATORS   the operator of the kernel (`operators/base.py`), named like the kernel: norm_dgrad -> NormDgrad
    RULES       the rules by which it replaces other operators: (operator at which the search begins, rule)
    LAUNCHES    operator -> function of a `Builder` and a node that emits the launches

Kernels of a network's own operators, and cuDNN plans, have only LAUNCHES: their operators are in `operators/`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from types import MappingProxyType

from graph_passes.candidates import Rule
from graph_passes.executors.cuda.builder import Launches
from graph_passes.operators import Operator

_FILES = [importlib.import_module(f"{__name__}.{each.name}") for each in sorted(pkgutil.iter_modules(__path__))]

OPERATORS: Sequence[Operator] = [operator for file in _FILES for operator in getattr(file, "OPERATORS", ())]
RULES: Sequence[tuple[str, Rule]] = [rule for file in _FILES for rule in getattr(file, "RULES", ())]
LAUNCHES: Launches = MappingProxyType({op: launch for file in _FILES for op, launch in getattr(
    file, "LAUNCHES", {}).items()})
