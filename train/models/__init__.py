"""Networks by name. Each file is a family of networks, whose `MODELS` maps a name to a function that builds it.

    network = create("resnet50", num_classes=1000)
    params, aux = network.initial_values(seed=0)

To add a family, add its file in this folder and a line in `FAMILIES`. Networks of plug-ins have names, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from common import plugins
from common.command_line import nearest
from train.errors import TrainError

if TYPE_CHECKING:
    from types import ModuleType

    from train.models.libraries import Published
    from train.models.network import Network

# File -> names of its networks, so that they can be listed without importing MXNet.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "resnet": ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    "resnet_d": ("resnet18d", "resnet34d", "resnet50d", "resnet101d", "resnet152d"),
    "resnet_v2": ("resnet18_v2", "resnet34_v2", "resnet50_v2", "resnet101_v2", "resnet152_v2"),
    "resnext": ("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
    "wide_resnet": ("wide_resnet50_2", "wide_resnet101_2"),
}

ALL = "all"  # stands for all networks, if several may be given

plugins.reserve("model", (ALL, *FAMILIES, *(name for family in FAMILIES.values() for name in family)))


def names() -> list[str]:
    """The names of all networks, a plug-in's last."""
    return [*(name for family in FAMILIES.values() for name in family), *plugins.names("model")]


def named(words: Iterable[str]) -> list[str]:
    """Resolve names of networks, names of families (resnet) and `all`, without repetitions. Raises TrainError."""
    meant: dict[str, None] = {}
    for word in words:
        of_word = names() if word == ALL else FAMILIES.get(word, (word,))
        for name in of_word:
            check(name)
        meant |= dict.fromkeys(of_word)
    return list(meant)


def check(name: str) -> None:
    """Raise TrainError, with the nearest name, if there is no such network."""
    if name not in names():
        # for resnext50 suggest resnext50_32x4d, not resnet50
        longer = [known for known in names() if known.startswith(name)]
        raise TrainError(f"there is no model {name!r}{nearest(name, longer or names())}")


def create(name: str, num_classes: int = 1000, label_smoothing: float = 0.0) -> Network:
    """The training network of that name. Raises TrainError if there is none."""
    check(name)
    from train.models import plugged
    from train.models.network import Network

    if of_plugin := plugins.find("model", name):
        return Network(name, num_classes, plugged.build(of_plugin, num_classes, label_smoothing))
    build = _family(name).MODELS[name]
    return Network(name, num_classes, build(num_classes, label_smoothing))


def published(name: str) -> tuple[Published, ...]:
    """The names of the network's layers in other libraries; () if no other library has it."""
    return () if plugins.find("model", name) else getattr(_family(name), "PUBLISHED", {}).get(name, ())


def num_classes(name: str, params: Mapping[str, Any]) -> int:
    """The number of classes of the network of that name with these parameters. Raises TrainError if there is no such
    network, and KeyError if the parameters do not belong to it."""
    return len(params[create(name).classifier[1]])


def _family(name: str) -> ModuleType:
    return importlib.import_module("train.models." + next(family for family, of_family in FAMILIES.items()
                                                          if name in of_family))
