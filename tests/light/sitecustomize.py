"""For processes that tests start with this folder on PYTHONPATH: networks are an eighth as wide, as with the fixture
`narrow_network`, and slow work after a run's last step is left out, unless REPORT is in the environment. Python imports
a module of this name at every start."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def narrow(resnet: Any) -> None:
    resnet.FIRST_WIDTH = 8


def lighten(session: Any) -> None:
    session.LOADER_SECONDS = 0.05
    if "REPORT" not in os.environ:
        session.prepare_report = lambda: None
        session.write_report = lambda folder, record: folder
        session.has_predictions = lambda trainer, recorder: False


CHANGES = {"train.models.resnet": narrow, "train.commands.session": lighten}


class Finder(MetaPathFinder):
    """Changes these modules after their import."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec and spec.loader
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, Finder())
