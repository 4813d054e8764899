"""Networks by name: one family a file, whose `MODELS` says how each of its networks is made.

    network = create("resnet50", num_classes=1000)
    params, aux = network.initial_values(seed=0)

To add a family: its file in this folder, and its line in `FAMILIES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from common.command_line import nearest
from train.errors import TrainError

if TYPE_CHECKING:
    from types import ModuleType

    from train.models.libraries import Published
    from train.models.network import Network

# Names of the networks by file, so that they can be listed without importing MXNet.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "resnet": ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    "resnet_d": ("resnet18d", "resnet34d", "resnet50d", "resnet101d", "resnet152d"),
    "resnet_v2": ("resnet18_v2", "resnet34_v2", "resnet50_v2", "resnet101_v2", "resnet152_v2"),
    "resnext": ("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
    "wide_resnet": ("wide_resnet50_2", "wide_resnet101_2"),
}

ALL = "all"  # where several may be named: every network


def names() -> list[str]:
    """Of all networks."""
    return [name for family in FAMILIES.values() for name in family]


def named(words: Iterable[str]) -> list[str]:
    """The networks that are meant, each once: by their names, by a family's (resnet), or `all`. Raises TrainError."""
    meant: dict[str, None] = {}
    for word in words:
        of_word = names() if word == ALL else FAMILIES.get(word, (word,))
        for name in of_word:
            check(name)
        meant |= dict.fromkeys(of_word)
    return list(meant)


def check(name: str) -> None:
    """Raises TrainError, with the nearest name, where there is no such network."""
    if name not in names():
        longer = [known for known in names() if known.startswith(name)]  # resnext50 is not meant for resnet50
        raise TrainError(f"there is no model {name!r}{nearest(name, longer or names())}")


def create(name: str, num_classes: int = 1000, label_smoothing: float = 0.0) -> Network:
    """The training network of that name. Raises TrainError where there is none."""
    check(name)
    from train.models.network import Network

    build = _family(name).MODELS[name]
    return Network(name, num_classes, build(num_classes, label_smoothing))


def published(name: str) -> tuple[Published, ...]:
    """What the layers of the network of that name are called in other libraries; () where none has it."""
    return getattr(_family(name), "PUBLISHED", {}).get(name, ())


def num_classes(name: str, params: Mapping[str, Any]) -> int:
    """How many classes the network of that name has with these parameters. Raises TrainError where there is none, and
    KeyError where the parameters are not its own."""
    return len(params[create(name).classifier[1]])


def _family(name: str) -> ModuleType:
    return importlib.import_module("train.models." + next(family for family, of_family in FAMILIES.items()
                                                          if name in of_family))
