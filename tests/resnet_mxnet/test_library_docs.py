"""docs/python.md shows each function of the library with its present signature."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import resnet_mxnet as rm

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text()
OWN = "resnet_mxnet."
CLASSES = {"net": rm.TrainedNetwork, "run": rm.Run}


def public(kind: type) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(kind).items() if not name.startswith("_"))


def functions() -> dict[str, Any]:
    found = {f"rm.{name}": value for name in rm.__all__ if inspect.isfunction(value := getattr(rm, name))}
    return found | {f"{shown}.{name}": value for shown, kind in CLASSES.items() for name, value in public(kind)
                    if inspect.isfunction(value)}


def shown(name: str, function: Any) -> str:
    """The function's signature without types."""
    parameters = inspect.signature(function).parameters.values()
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters if each.name != "self"]
    return f"{name}{inspect.Signature(plain)}"


def test_signatures() -> None:
    on_page = [line for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    assert sorted(on_page) == sorted(shown(name, function) for name, function in functions().items())


@pytest.mark.parametrize("name, kind", CLASSES.items())
def test_attributes_are_on_the_page(name: str, kind: type) -> None:
    missing = [each for each, value in public(kind) if not inspect.isfunction(value)
               and not re.search(rf"`({name}\.)?{each}`", PAGE)]
    assert not missing


def test_docstrings_stand_alone() -> None:
    """Each function's docstring states its errors, and has an example if the function does something."""
    silent = {"net.close"}
    for name, function in functions().items():
        text = inspect.getdoc(function) or ""
        assert len(text) > 40, name
        if name not in silent | {"rm.models", "rm.presets", "run.load"}:
            assert "Raises:" in text and f"{name.split('.')[1]}(" in text, name


def test_types_are_declared() -> None:
    for name, function in functions().items():
        assert inspect.signature(function).return_annotation is not inspect.Signature.empty, name
