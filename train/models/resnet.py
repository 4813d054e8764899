"""ResNet v1.5, and code that other families of residual networks share.

He et al., 'Deep Residual Learning for Image Recognition' (arXiv:1512.03385). In v1.5, as in torchvision and NVIDIA's
examples, the stride of a bottleneck is in its 3x3 convolution, not in the first 1x1 convolution.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from common.mxnet_compat import mx
from train.models.blocks import (
    Layer,
    SqueezeExcitation,
    Symbol,
    batch_norm,
    conv,
    head,
    max_pool,
    relu,
    squeeze_excitation,
)
from train.models.libraries import GLUON, TORCH, Published

BLOCKS_PER_STAGE = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
FIRST_WIDTH = 64  # channels of the stem and of the first stage's convolutions; each stage doubles them
FIRST_BOTTLENECK_DEPTH = 50  # from this depth on, a block has convolutions of 1x1, 3x3 and 1x1; below, two of 3x3


def stem(x: Symbol) -> Symbol:
    """The stem: a 7x7 convolution of stride 2 from the images to FIRST_WIDTH channels."""
    return relu(batch_norm(conv(x, "stem_conv", FIRST_WIDTH, kernel=7, stride=2), "stem_bn"), "stem_relu")


def projection(x: Symbol, name: str, filters: int, stride: int) -> Symbol:
    """A shortcut that changes the number of channels or the stride: a 1x1 convolution."""
    return batch_norm(conv(x, f"{name}_conv", filters, 1, stride), f"{name}_bn")


def resnet(depth: int, num_classes: int = 1000, label_smoothing: float = 0.0, *, groups: int = 1,
           group_width: int | None = None, stem: Callable[[Symbol], Symbol] = stem,
           pool: Callable[[Symbol, str], Symbol] = max_pool,
           projection: Callable[[Symbol, str, int, int], Symbol] = projection,
           squeeze: Callable[[int], SqueezeExcitation] | None = None) -> Symbol:
    """The training Symbol of a residual network, with the inputs and the output of `Network`.

    Args: depth: 18, 34, 50, 101 or 152. num_classes: number of outputs. label_smoothing: label smoothing of the loss.
        groups: groups of the 3x3 convolutions of bottlenecks. group_width: channels per group in the first stage, by
        default FIRST_WIDTH; each stage doubles them. stem, pool, projection: functions for the layers before the max
        pooling, for the max pooling, and for shortcuts that are not the identity. squeeze: gives squeeze-and-excitation
        at the end of a branch, from the number of channels; None: no squeeze-and-excitation.
    """
    x = pool(stem(mx.sym.Variable("data")), "stem_pool")
    for block in blocks(depth, groups, group_width):
        name, branch = block.name, block.branch
        shortcut = projection(x, f"{name}_shortcut", block.filters, block.stride) if block.projects else x
        y = _branch(x, name, branch)
        if squeeze:
            y = squeeze_excitation(y, name, block.filters, squeeze(block.filters))
        x = relu(mx.sym.elemwise_add(y, shortcut, name=f"{name}_add"), f"{name}_relu{len(branch)}")
    return head(x, num_classes, label_smoothing)


class Block(NamedTuple):
    """A residual block."""

    name: str
    branch: list[Layer]
    projects: bool  # whether the shortcut is a projection, because the number of channels or the size changes

    @property
    def filters(self) -> int:
        """Channels of the block's output."""
        return self.branch[-1].filters

    @property
    def stride(self) -> int:
        """Stride from the block's input to its output."""
        return max(layer.stride for layer in self.branch)


def blocks(depth: int, groups: int = 1, group_width: int | None = None) -> Iterator[Block]:
    """The blocks of a network, in order; the arguments are those of `resnet`."""
    bottleneck = depth >= FIRST_BOTTLENECK_DEPTH
    for stage, num_blocks in enumerate(BLOCKS_PER_STAGE[depth], start=1):
        widening = 2 ** (stage - 1)
        width = groups * (group_width or FIRST_WIDTH) * widening
        for number in range(1, num_blocks + 1):
            stride = 2 if stage > 1 and number == 1 else 1
            if bottleneck:
                branch = [Layer(width, 1), Layer(width, 3, stride, groups), Layer(4 * FIRST_WIDTH * widening, 1)]
            else:
                branch = [Layer(width, 3, stride), Layer(width, 3)]
            yield Block(f"stage{stage}_block{number}", branch, number == 1 and (stage > 1 or bottleneck))


def _branch(x: Symbol, name: str, layers: list[Layer]) -> Symbol:
    """The residual branch of a block."""
    for number, layer in enumerate(layers, start=1):
        x = batch_norm(conv(x, f"{name}_conv{number}", *layer), f"{name}_bn{number}")
        if number < len(layers):
            x = relu(x, f"{name}_relu{number}")
    return x


def torch_names(depth: int, stem: Mapping[str, str] | None = None, projection: int = 0,
                squeezes: bool = False) -> Published:
    """The layer names in torchvision and timm.

    Args:
        depth: 18, 34, 50, 101 or 152.
        stem: names of the layers before the max pooling, if not conv1 and bn1.
        projection: index of the convolution among the layers of a shortcut; its BatchNorm is the next one.
        squeezes: branches end in squeeze-and-excitation.
    """
    names = dict(stem or {"stem_conv": "conv1", "stem_bn": "bn1"})
    for stage, number, block in numbered_blocks(depth):
        theirs = f"layer{stage}.{number}"
        for layer in range(1, len(block.branch) + 1):
            names |= {f"{block.name}_{kind}{layer}": f"{theirs}.{kind}{layer}" for kind in ("conv", "bn")}
        if squeezes:
            names |= {f"{block.name}_se_conv{fc}": f"{theirs}.se.fc{fc}" for fc in (1, 2)}
        if block.projects:
            names |= {f"{block.name}_shortcut_{kind}": f"{theirs}.downsample.{projection + place}"
                      for place, kind in enumerate(("conv", "bn"))}
    return Published(TORCH, names | {"classifier": "fc"})


def gluon_names(depth: int) -> Published:
    """The layer names in Gluon's resnet18_v1 and resnet34_v1. (Its bottlenecks, from resnet50_v1 on, have their stride
    in another convolution: `gluon_zoo`.)"""
    names = {"stem_conv": "features.0", "stem_bn": "features.1"}
    for stage, number, block in numbered_blocks(depth):
        theirs = f"features.{stage + 3}.{number}"
        for layer in range(1, len(block.branch) + 1):
            place = 3 * (layer - 1)  # each layer takes three places: convolution, BatchNorm, ReLU
            names |= {f"{block.name}_conv{layer}": f"{theirs}.body.{place}",
                      f"{block.name}_bn{layer}": f"{theirs}.body.{place + 1}"}
        if block.projects:
            names |= {f"{block.name}_shortcut_conv": f"{theirs}.downsample.0",
                      f"{block.name}_shortcut_bn": f"{theirs}.downsample.1"}
    return Published(GLUON, names | {"classifier": "output"})


def numbered_blocks(depth: int) -> Iterator[tuple[int, int, Block]]:
    """(stage from 1, index within the stage from 0, block) for each of `blocks`."""
    for block in blocks(depth):
        stage, number = re.findall(r"\d+", block.name)
        yield int(stage), int(number) - 1, block


MODELS = {f"resnet{depth}": partial(resnet, depth) for depth in BLOCKS_PER_STAGE}
PUBLISHED = {f"resnet{depth}": (torch_names(depth), *([gluon_names(depth)] * (depth < FIRST_BOTTLENECK_DEPTH)))
             for depth in BLOCKS_PER_STAGE}
