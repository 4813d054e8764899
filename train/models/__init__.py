"""Networks by name. Each file is a family of networks, whose `MODELS` maps a name to a function that builds it.

    network = create("resnet50", num_classes=1000)
    params, aux = network.initial_values(seed=0)

To add a family, add its file in this folder and a line in `FAMILIES`. Networks of plug-ins have names, too.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from common import plugins
from common.command_line import nearest
from train.errors import TrainError

if TYPE_CHECKING:
    from pathlib import Path
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
    "efficientnet": (
        "efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3", "efficientnet_b4",
        "efficientnet_v2_s", "efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2",
        "tf_efficientnet_b0", "tf_efficientnet_b1", "tf_efficientnet_b2", "tf_efficientnet_b3", "tf_efficientnet_b4",
        "tf_efficientnetv2_s", "tf_efficientnet_lite0", "tf_efficientnet_lite1", "tf_efficientnet_lite2",
    ),
    "mobilenet": ("mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "mobilenetv3_large_100",
                  "mobilenetv3_small_100"),
    "regnet": (
        "regnet_x_400mf", "regnet_x_800mf", "regnet_x_1_6gf", "regnet_x_3_2gf", "regnet_x_8gf", "regnet_x_16gf",
        "regnet_x_32gf", "regnet_y_400mf", "regnet_y_800mf", "regnet_y_1_6gf", "regnet_y_3_2gf", "regnet_y_8gf",
        "regnet_y_16gf", "regnet_y_32gf",
    ),
    "convnext": ("convnext_tiny", "convnext_small", "convnext_base"),
    "se_resnet": ("seresnet18", "seresnet34", "seresnet50", "seresnet101", "seresnet152", "resnetrs50", "resnetrs101",
                  "resnetrs152"),
    "gluon_zoo": (
        "alexnet", "densenet121", "densenet161", "densenet169", "densenet201", "inception_v3",
        "mobilenet0_25", "mobilenet0_5", "mobilenet0_75", "mobilenet1_0",
        "mobilenet_v2_0_25", "mobilenet_v2_0_5", "mobilenet_v2_0_75", "mobilenet_v2_1_0",
        "resnet50_v1", "resnet101_v1", "resnet152_v1", "squeezenet1_0", "squeezenet1_1",
        "vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn",
    ),
}

OWN = tuple(name for family in FAMILIES.values() for name in family)

# Other names of networks: Gluon's name, if Gluon's network is identical to a network here.
ALIASES: Mapping[str, str] = {"resnet18_v1": "resnet18", "resnet34_v1": "resnet34"}

# height and width, in pixels, of the images for which published weights were trained; OTHER_IMAGE_SIZES has the
# exceptions
IMAGE_SIZE = 224
OTHER_IMAGE_SIZES: Mapping[str, int] = {"inception_v3": 299}

# Suffixes of files with a network. These files count as plug-ins with one model, which has the file's name
# (`network_file`).
NETWORK_FILES = (".json", ".onnx")

ALL = "all"  # name that stands for all networks, for options that accept several

plugins.reserve("model", (ALL, *FAMILIES, *ALIASES, *OWN))


def _register_file(file: str, content: bytes) -> None:
    importlib.import_module("train.models.network_file").register(file, content)  # imports MXNet


def _read_onnx(file: Path) -> bytes:
    content: bytes = importlib.import_module("train.models.onnx_reader").content_of(file)
    return content


plugins.add_data_format(".json", _register_file)
plugins.add_data_format(".onnx", _register_file, _read_onnx)


def of_option(word: str, given: Sequence[str] = ()) -> tuple[str, tuple[str, ...]]:
    """The name of the network that an option's value stands for, and the plug-in that defines the network, if the value
    is a file that is not yet in `given`. Raises TrainError for a file that does not exist.
    """
    if not word.lower().endswith(NETWORK_FILES):
        return own_name(word), ()
    if word in map(plugins.name_of, given):
        return word, ()
    if not os.path.isfile(word):
        raise TrainError(f"--model {word}: there is no such file; check the path, or give a network's name")
    return os.path.basename(word), (word,)


def names() -> list[str]:
    """The names of all networks; networks of plug-ins come last."""
    return [*OWN, *plugins.names("model")]


def named(words: Iterable[str]) -> list[str]:
    """Resolve names of networks, names of families (resnet) and `all`, without duplicates. Raises TrainError."""
    meant: dict[str, None] = {}
    for word in words:
        of_word = names() if word == ALL else FAMILIES.get(word, (word,))
        for name in of_word:
            check(name)
        meant |= dict.fromkeys(map(own_name, of_word))
    return list(meant)


def check(name: str) -> None:
    """Raise TrainError, with the nearest name, if no network has this name."""
    if name not in names() and name not in ALIASES:
        # for resnext50 suggest resnext50_32x4d, not resnet50
        longer = [known for known in names() if known.startswith(name)]
        raise TrainError(f"there is no model {name!r}{nearest(name, longer or names())}")


def own_name(name: str) -> str:
    """This program's name of a network; `name` may be an alias (`ALIASES`)."""
    return ALIASES.get(name, name)


def image_size(name: str) -> int:
    """The height and width, in pixels, of the images for which a network's published weights, or its file, were made; 0
    if the file does not state the size.
    """
    of_plugin = plugins.find("model", name)
    return getattr(of_plugin.made, "image_size", IMAGE_SIZE) if of_plugin else OTHER_IMAGE_SIZES.get(name, IMAGE_SIZE)


def is_of_file(name: str) -> bool:
    """Whether a network comes from a file (`network_file`)."""
    of_plugin = plugins.find("model", name)
    return bool(of_plugin and of_plugin.file.lower().endswith(NETWORK_FILES))


def is_channels_first(name: str) -> bool:
    """Whether a network comes from a file in which images are NCHW, and convolution weights OIHW."""
    of_plugin = plugins.find("model", name)
    return bool(of_plugin and getattr(of_plugin.made, "is_channels_first", False))


def create(name: str, num_classes: int = 1000, label_smoothing: float = 0.0, images: int = IMAGE_SIZE) -> Network:
    """The training network with this name. `images`: height and width of the images, in pixels, for a network whose
    file does not state the size. Raises TrainError if no network has this name.
    """
    check(name)
    name = own_name(name)
    from train.models import plugged
    from train.models.network import Network

    of_plugin, size = plugins.find("model", name), image_size(name) or images
    build = partial(plugged.build, of_plugin, size) if of_plugin else _family(name).MODELS[name]
    return Network(name, num_classes, build(num_classes, label_smoothing), size)


def published(name: str) -> tuple[Published, ...]:
    """The names of the network's layers in other libraries; () if no other library has the network."""
    return () if plugins.find("model", name) else getattr(_family(name), "PUBLISHED", {}).get(name, ())


def num_classes(name: str, params: Mapping[str, Any]) -> int:
    """The number of classes of the network of that name with these parameters. Raises TrainError if no network has this
    name, and KeyError if the parameters do not belong to the network.
    """
    return len(params[create(name).classifier[-1]])


def _family(name: str) -> ModuleType:
    return importlib.import_module("train.models." + next(family for family, of_family in FAMILIES.items()
                                                          if name in of_family))
