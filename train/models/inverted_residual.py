"""Inverted residual blocks, of which MobileNets and EfficientNets are made, and their names in other libraries.

A block widens its input by a 1x1 convolution, applies a depthwise convolution, and narrows the result by a 1x1
convolution without an activation (Sandler et al., arXiv:1801.04381, section 3.3). Squeeze-and-excitation may come
before the last convolution. In a fused block one ordinary convolution replaces the first two (Tan and Le,
arXiv:2104.00298, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.mxnet_compat import mx
from train.models.blocks import (
    USUAL_NORM,
    Layer,
    Norm,
    SqueezeExcitation,
    Symbol,
    activation,
    classify,
    conv_bn,
    mean_of_pixels,
    squeeze_excitation,
)


class Block(NamedTuple):
    """An inverted residual block. Its numbers of channels are those of the input, inside, and of the output."""

    name: str
    inputs: int
    expanded: int
    filters: int
    kernel: int
    stride: int
    act: str
    squeeze: SqueezeExcitation | None = None
    fused: bool = False

    @property
    def layers(self) -> list[Layer]:
        """The convolutions of the block. A block that does not widen its input lacks the first convolution."""
        widens = self.expanded != self.inputs
        if self.fused:
            first = Layer(self.expanded if widens else self.filters, self.kernel, self.stride)
            return [first, Layer(self.filters, 1)] if widens else [first]
        depthwise = Layer(self.expanded, self.kernel, self.stride, groups=self.expanded)
        return [*([Layer(self.expanded, 1)] if widens else []), depthwise, Layer(self.filters, 1)]

    @property
    def is_residual(self) -> bool:
        """Whether the block's input is added to its output."""
        return self.stride == 1 and self.inputs == self.filters


@dataclass(frozen=True)
class Plan:
    """A network of inverted residual blocks, by stage, between a 3x3 convolution of stride 2 and a 1x1 convolution.

    `hidden`: outputs of a fully connected layer before the classifier; 0: no such layer. `is_reversed`: the images and
    all kernels have rows and columns in the reverse order. This reproduces TensorFlow's padding 'SAME': with a stride
    of 2, TensorFlow pads behind the last pixel, while the usual padding pads before the first pixel.
    """

    stages: Sequence[Sequence[Block]]
    stem: int
    last: int
    act: str  # activation of the first and last convolutions, and of the layer `hidden`
    norm: Norm = USUAL_NORM
    hidden: int = 0
    is_reversed: bool = False

    @property
    def blocks(self) -> Iterator[Block]:
        """All blocks, in order."""
        return (block for stage in self.stages for block in stage)


def network(plan: Plan, num_classes: int = 1000, label_smoothing: float = 0.0) -> Symbol:
    """The training Symbol, with the inputs and the output of `Network`."""
    x = mx.sym.Variable("data")
    if plan.is_reversed:
        x = mx.sym.reverse(x, axis=(1, 2), name="data_reversed")
    x = conv_bn(x, "stem", "", Layer(plan.stem, 3, 2), plan.norm, plan.act)
    for block in plan.blocks:
        x = _block(x, block, plan.norm)
    x = conv_bn(x, "last", "", Layer(plan.last, 1), plan.norm, plan.act)
    x = mx.sym.Flatten(mean_of_pixels(x, "pool"), name="flatten")
    if plan.hidden:
        x = activation(mx.sym.FullyConnected(x, num_hidden=plan.hidden, name="hidden"), "hidden_act", plan.act)
    return classify(x, num_classes, label_smoothing)


def _block(x: Symbol, block: Block, norm: Norm) -> Symbol:
    y, layers = x, block.layers
    for number, layer in enumerate(layers, start=1):
        ends = number == len(layers) > 1  # the last convolution of a block has no activation
        if ends and block.squeeze:
            y = squeeze_excitation(y, block.name, block.expanded, block.squeeze)
        y = conv_bn(y, block.name, number, layer, norm, "" if ends else block.act)
    return mx.sym.elemwise_add(y, x, name=f"{block.name}_add") if block.is_residual else y


# --- names of layers ---


def torchvision_layers(block: Block, theirs: str) -> dict[str, str]:
    """The names of a block's layers in torchvision, where the block's list of layers is called `theirs`."""
    names: dict[str, str] = {}
    place, layers = 0, block.layers
    for number in range(1, len(layers) + 1):
        if block.squeeze and number == len(layers):
            names |= {f"{block.name}_se_conv{fc}": f"{theirs}.{place}.fc{fc}" for fc in (1, 2)}
            place += 1
        names |= {f"{block.name}_conv{number}": f"{theirs}.{place}.0",
                  f"{block.name}_bn{number}": f"{theirs}.{place}.1"}
        place += 1
    return names


def timm_layers(plan: Plan) -> dict[str, str]:
    """The layer names in timm, up to the last block."""
    names = {"stem_conv": "conv_stem", "stem_bn": "bn1"}
    for stage, blocks in enumerate(plan.stages):
        for number, block in enumerate(blocks):
            theirs = {(True, 1): ["conv"], (True, 2): ["conv_exp", "conv_pwl"], (False, 2): ["conv_dw", "conv_pw"],
                      (False, 3): ["conv_pw", "conv_dw", "conv_pwl"]}[block.fused, len(block.layers)]
            names |= _numbered(block, f"blocks.{stage}.{number}", theirs, "bn", 1,
                               ("se.conv_reduce", "se.conv_expand"))
    return names


def tensorflow_layers(plan: Plan) -> dict[str, str]:
    """The layer names in the ports of TensorFlow's EfficientNets to PyTorch (EfficientNet-PyTorch,
    efficientnet-lite-pytorch).
    """
    names = {"stem_conv": "_conv_stem", "stem_bn": "_bn0"}
    for number, block in enumerate(plan.blocks):
        theirs = ["_expand_conv", "_depthwise_conv", "_project_conv"][-len(block.layers):]
        names |= _numbered(block, f"_blocks.{number}", theirs, "_bn", 3 - len(theirs), ("_se_reduce", "_se_expand"))
    return names | {"last_conv": "_conv_head", "last_bn": "_bn1", "classifier": "_fc"}


def _numbered(block: Block, place: str, convs: Sequence[str], bn: str, first: int,
              squeeze: tuple[str, str]) -> dict[str, str]:
    """The names of a block's convolutions, BatchNorms (which are numbered from `first`) and squeeze-and-excitation."""
    names: dict[str, str] = {}
    for number, conv in enumerate(convs, start=1):
        if block.squeeze and number == len(convs):
            names |= {f"{block.name}_se_conv{fc}": f"{place}.{each}" for fc, each in enumerate(squeeze, start=1)}
        names |= {f"{block.name}_conv{number}": f"{place}.{conv}",
                  f"{block.name}_bn{number}": f"{place}.{bn}{first + number - 1}"}
    return names
