"""For processes that tests start with this folder on PYTHONPATH: the networks are an eighth as wide, as those of the
fixture `narrow_network` are. Python imports a module of this name at every start."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class NarrowModel(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "train.models.resnet":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec and spec.loader
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_narrow(module: ModuleType) -> None:
            execute(module)
            module.FIRST_WIDTH = 8  # type: ignore[attr-defined]

        loader.exec_module = execute_and_narrow
        return spec


sys.meta_path.insert(0, NarrowModel())
