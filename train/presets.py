"""Presets: each file train/configs/<name>.py gives some options other defaults."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import train.configs
from common.command_line import nearest
from train.config import Config
from train.errors import TrainError


def presets() -> list[str]:
    """Names of all presets."""
    return sorted(module.name for module in pkgutil.iter_modules(train.configs.__path__))


def load_preset(name: str) -> Config:
    """The configuration of train/configs/<name>.py. Raises TrainError for an unknown name."""
    if name not in presets():
        raise TrainError(f"there is no preset {name!r} in train/configs/{nearest(name, presets())}")
    module = importlib.import_module(f"train.configs.{name}")
    return dataclasses.replace(module.CONFIG, config=name)


def described() -> dict[str, str]:
    """Each preset with the first sentence of its docstring."""
    texts = {name: importlib.import_module(f"train.configs.{name}").__doc__ or "" for name in presets()}
    paragraphs = {name: " ".join(text.split("\n\n")[0].split()) for name, text in texts.items()}
    return {name: paragraph.partition(". ")[0].removesuffix(".") for name, paragraph in paragraphs.items()}


def describe_presets() -> str:
    """Each preset with the first sentence of its docstring, as lines."""
    return "\n".join(f"{name}\n    {text}" for name, text in described().items())
