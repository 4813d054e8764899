"""Optimizers by name: each file has one optimizer, with constants and formula; `kernels/optimizer.cu` has the GPU
implementations.

    rule = create("adamw", {"betas": (0.9, 0.999), "epsilon": 1e-8, "weight_decay": 0.05})
    optimizer = executor.create_optimizer(rule)
    optimizer.step(learning_rate=1e-3)

To add an optimizer, write a file in this folder whose `RULE` is its class, a struct in optimizer.cu, and options with
the names of the constants in train/options/optimizer.py.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from graph_passes.optimizers.base import ArrayOptimizer, Optimizer, Rule, Update

__all__ = ["ArrayOptimizer", "Optimizer", "Rule", "Update", "create", "names", "rule_of"]


def names() -> list[str]:
    """The names of all optimizers."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def rule_of(name: str) -> type[Rule]:
    """The class of an optimizer's constants; `name` is one of `names()`."""
    rule: type[Rule] = importlib.import_module(f"{__name__}.{name}").RULE
    return rule


def create(name: str, constants: Mapping[str, Any]) -> Rule:
    """The optimizer with this name. Constants in `constants` that the optimizer lacks are ignored."""
    rule = rule_of(name)
    return rule(**{field.name: constants[field.name] for field in fields(rule) if field.name in constants})
