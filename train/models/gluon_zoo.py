"""The networks of MXNet Gluon's model zoo (`mxnet.gluon.model_zoo.vision`), as the zoo builds them, converted to our
form (`plugged`).

ResNet v2, and ResNet-18 and 34 v1, belong to other families (`resnet_v2`, `resnet`). A parameter has Gluon's name
without the network's prefix: conv0_weight for vgg0_conv0_weight. DenseNet and VGG are torchvision's networks of these
names, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

from common.mxnet_compat import mx
from train import models
from train.models import plugged
from train.models.libraries import GLUON, TORCH, TORCHVISION, Published

NUM_DENSE_BLOCKS = 4  # dense blocks of every DenseNet

Symbol = Any  # mx.sym.Symbol; MXNet has no type stubs


def gluon(name: str, num_classes: int = 1000, label_smoothing: float = 0.0) -> Symbol:
    """The training Symbol of the zoo's network with this name, with the inputs and the output of `Network`."""
    with plugged.fresh_names():
        symbol = _block(name, num_classes)(mx.sym.Variable("data"))
    graph = plugged.in_our_form(f"Gluon's {name}", symbol, num_classes, models.image_size(name))
    return plugged.with_loss(graph, label_smoothing)


def _block(name: str, num_classes: int) -> Any:
    return getattr(mx.gluon.model_zoo.vision, name)(classes=num_classes, prefix="")


@cache
def gluon_names(name: str) -> Published:
    """The names of the network's layers in files of Gluon's `save_parameters`."""
    with plugged.fresh_names():
        parameters = _block(name, 1000)._collect_params_with_prefix()
    return Published(GLUON, {re.sub("_[a-z]+$|_running_[a-z]+$", "", parameter.name): place.rpartition(".")[0]
                             for place, parameter in parameters.items()})


def torch_names(name: str) -> tuple[Published, ...]:
    """The names of the network's layers in PyTorch's libraries; () if these libraries have no network with the same
    computation.
    """
    ours = gluon_names(name).layers
    if name.startswith("vgg"):
        # PyTorch numbers convolutions and BatchNorms as Gluon does
        return (Published(TORCHVISION, {**ours, "dense0": "classifier.0", "dense1": "classifier.3",
                                        "dense2": "classifier.6"}),)
    if name.startswith("densenet"):
        return (Published(TORCH, {layer: _in_densenet(layer) for layer in ours}),
                # torchvision's own files have norm.1 for norm1, which torchvision renames when it reads the file
                Published(TORCHVISION, {layer: re.sub(r"(denselayer.*\.[a-z]+)(\d)$", r"\1.\2", _in_densenet(layer))
                                        for layer in ours}))
    return ()


def _in_densenet(layer: str) -> str:
    """PyTorch's name of a layer of Gluon's DenseNet: features.denseblock1.denselayer2.norm1 for stage1_batchnorm2."""
    if layer == "dense0":
        return "classifier"
    found = re.fullmatch(r"(?:stage(\d)_)?(batchnorm|conv)(\d+)", layer)
    assert found, layer
    kind, number = {"batchnorm": "norm", "conv": "conv"}[found[2]], int(found[3])
    if found[1]:
        return f"features.denseblock{found[1]}.denselayer{number // 2 + 1}.{kind}{number % 2 + 1}"
    if number == 0:
        return f"features.{kind}0"
    return "features.norm5" if number == NUM_DENSE_BLOCKS else f"features.transition{number}.{kind}"


class _Names(Mapping[str, tuple[Published, ...]]):
    """`PUBLISHED`, computed at the first access to a network: this takes as long as building the network."""

    def __getitem__(self, name: str) -> tuple[Published, ...]:
        if name not in MODELS:
            raise KeyError(name)
        return (*torch_names(name), gluon_names(name))

    def __iter__(self) -> Iterator[str]:
        return iter(MODELS)

    def __len__(self) -> int:
        return len(MODELS)


MODELS = {name: partial(gluon, name) for name in models.FAMILIES["gluon_zoo"]}
PUBLISHED = _Names()
