"""One file for each kernel: NAME.py has all that is Python about what NAME.cu (or a header, NAME.cuh) has in CUDA.

A file may give three things, which are collected here, so there is no list of kernels anywhere:

    OPERATORS   what it computes, described once (`operators/base.py`): named as the kernel is, norm_dgrad -> NormDgrad
    RULES       where it can take the place of other operators: (operator that a place begins with, rule)
    LAUNCHES    operator -> function of a `Builder` and a node, which emits the launches

Kernels of operators of the network, and plans of cuDNN, have launches alone: their operators are in `operators/`.
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
