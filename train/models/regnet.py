"""RegNetX and RegNetY.

Radosavovic et al., 'Designing Network Design Spaces' (arXiv:2003.13678), section 4 and appendix, tables of RegNetX and
RegNetY; names and numbers as in torchvision (torchvision/models/regnet.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from common.mxnet_compat import mx
from train.models.blocks import Layer, SqueezeExcitation, Symbol, conv_bn, divisible, head, relu, squeeze_excitation
from train.models.libraries import TIMM, TORCHVISION, Published
from train.models.resnet import projection

STEM = 32  # channels


class Design(NamedTuple):
    """The numbers that determine a network. Block j is ideally `width + slope * j` channels wide."""

    depth: int
    width: int
    slope: float
    step: float  # factor between the possible widths of stages
    group_width: int


DESIGNS = {
    "regnet_x_400mf": Design(22, 24, 24.48, 2.54, 16),
    "regnet_x_800mf": Design(16, 56, 35.73, 2.28, 16),
    "regnet_x_1_6gf": Design(18, 80, 34.01, 2.25, 24),
    "regnet_x_3_2gf": Design(25, 88, 26.31, 2.25, 48),
    "regnet_x_8gf": Design(23, 80, 49.56, 2.88, 120),
    "regnet_x_16gf": Design(22, 216, 55.59, 2.1, 128),
    "regnet_x_32gf": Design(23, 320, 69.86, 2.0, 168),
    "regnet_y_400mf": Design(16, 48, 27.89, 2.09, 8),
    "regnet_y_800mf": Design(14, 56, 38.84, 2.4, 16),
    "regnet_y_1_6gf": Design(27, 48, 20.71, 2.65, 24),
    "regnet_y_3_2gf": Design(21, 80, 42.63, 2.66, 24),
    "regnet_y_8gf": Design(17, 192, 76.82, 2.19, 56),
    "regnet_y_16gf": Design(18, 200, 106.23, 2.48, 112),
    "regnet_y_32gf": Design(20, 232, 115.89, 2.53, 232),
}
# timm's names of torchvision's networks; if timm had another network of this size before, timm's name of torchvision's
# network ends in _tv.
TIMM_NAMES = {
    "regnet_x_400mf": "regnetx_004_tv", "regnet_x_800mf": "regnetx_008", "regnet_x_1_6gf": "regnetx_016",
    "regnet_x_3_2gf": "regnetx_032", "regnet_x_8gf": "regnetx_080", "regnet_x_16gf": "regnetx_160",
    "regnet_x_32gf": "regnetx_320", "regnet_y_400mf": "regnety_004", "regnet_y_800mf": "regnety_008_tv",
    "regnet_y_1_6gf": "regnety_016", "regnet_y_3_2gf": "regnety_032", "regnet_y_8gf": "regnety_080_tv",
    "regnet_y_16gf": "regnety_160", "regnet_y_32gf": "regnety_320",
}


class Block(NamedTuple):
    """A bottleneck whose three convolutions have equally many channels, with squeeze-and-excitation before the last."""

    stage: int
    number: int
    inputs: int  # channels
    width: int
    groups: int
    squeeze: SqueezeExcitation | None

    @property
    def name(self) -> str:
        return f"stage{self.stage}_block{self.number}"

    @property
    def stride(self) -> int:
        return 2 if self.number == 1 else 1

    @property
    def layers(self) -> list[Layer]:
        return [Layer(self.width, 1), Layer(self.width, 3, self.stride, self.groups), Layer(self.width, 1)]

    @property
    def projects(self) -> bool:
        return self.stride > 1 or self.inputs != self.width


def stages(design: Design) -> list[tuple[int, int, int]]:
    """Width, number of blocks and group width of each stage.

    Ideal widths are rounded to width * step ** n, then to a multiple of 8, then to a multiple of the group width.
    Blocks of equal width form a stage (section 4, equations 2 to 4).
    """
    ideal = design.width + design.slope * np.arange(design.depth)
    exponents = np.rint(np.log(ideal / design.width) / np.log(design.step))
    widths = (np.rint(design.width * design.step**exponents / 8) * 8).astype(int)
    found = []
    for width, num_blocks in zip(*np.unique(widths, return_counts=True), strict=True):
        group = min(design.group_width, int(width))
        found.append((divisible(int(width), group), int(num_blocks), group))
    return found


def blocks(name: str) -> Iterator[Block]:
    """The blocks of a network, in order."""
    inputs, squeezes = STEM, name.startswith("regnet_y")
    for stage, (width, num_blocks, group) in enumerate(stages(DESIGNS[name]), start=1):
        for number in range(1, num_blocks + 1):
            squeeze = SqueezeExcitation(round(inputs / 4)) if squeezes else None
            yield Block(stage, number, inputs, width, width // group, squeeze)
            inputs = width


def regnet(name: str, num_classes: int = 1000, label_smoothing: float = 0.0) -> Symbol:
    """The training Symbol, with the inputs and the output of `Network`."""
    x = conv_bn(mx.sym.Variable("data"), "stem", "", Layer(STEM, 3, 2), act="relu")
    for block in blocks(name):
        first, second, last = block.layers
        y = conv_bn(conv_bn(x, block.name, 1, first, act="relu"), block.name, 2, second, act="relu")
        if block.squeeze:
            y = squeeze_excitation(y, block.name, block.width, block.squeeze)
        y = conv_bn(y, block.name, 3, last)
        shortcut = projection(x, f"{block.name}_shortcut", block.width, block.stride) if block.projects else x
        x = relu(mx.sym.elemwise_add(y, shortcut, name=f"{block.name}_add"), f"{block.name}_relu3")
    return head(x, num_classes, label_smoothing)




def _torchvision(name: str) -> Published:
    names = {"stem_conv": "stem.0", "stem_bn": "stem.1"}
    for block in blocks(name):
        theirs = f"trunk_output.block{block.stage}.block{block.stage}-{block.number - 1}"
        if block.projects:
            names |= {f"{block.name}_shortcut_{kind}": f"{theirs}.proj.{place}"
                      for place, kind in enumerate(("conv", "bn"))}
        for number, letter in enumerate("abc", start=1):
            if block.squeeze and letter == "c":
                names |= {f"{block.name}_se_conv{fc}": f"{theirs}.f.se.fc{fc}" for fc in (1, 2)}
            names |= {f"{block.name}_conv{number}": f"{theirs}.f.{letter}.0",
                      f"{block.name}_bn{number}": f"{theirs}.f.{letter}.1"}
    return Published(TORCHVISION, names | {"classifier": "fc"})


def _timm(name: str) -> Published:
    names = {"stem_conv": "stem.conv", "stem_bn": "stem.bn"}
    for block in blocks(name):
        theirs = f"s{block.stage}.b{block.number}"
        for number in (1, 2, 3):
            if block.squeeze and number == 3:
                names |= {f"{block.name}_se_conv{fc}": f"{theirs}.se.fc{fc}" for fc in (1, 2)}
            names |= {f"{block.name}_{kind}{number}": f"{theirs}.conv{number}.{kind}" for kind in ("conv", "bn")}
        if block.projects:
            names |= {f"{block.name}_shortcut_{kind}": f"{theirs}.downsample.{kind}" for kind in ("conv", "bn")}
    return Published(TIMM, names | {"classifier": "head.fc"}, model=TIMM_NAMES[name])


MODELS = {name: partial(regnet, name) for name in DESIGNS}
PUBLISHED = {name: (_torchvision(name), _timm(name)) for name in DESIGNS}
