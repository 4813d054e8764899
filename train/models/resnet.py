"""ResNet v1.5 as MXNet Symbols in NHWC, and the parts that other families of residual networks are made of.

He et al., 'Deep Residual Learning for Image Recognition' (arXiv:1512.03385); v1.5 moves the stride of a bottleneck from
its first 1x1 convolution to the 3x3 one, as torchvision and NVIDIA's examples do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from common.mxnet_compat import mx

Symbol = Any  # mx.sym.Symbol; MXNet has no type stubs

BLOCKS_PER_STAGE = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
FIRST_WIDTH = 64  # channels of the stem and of the first stage's convolutions; each stage doubles them
FIRST_BOTTLENECK_DEPTH = 50  # 18 and 34 have two 3x3 convolutions a block, deeper networks 1x1, 3x3, 1x1

BATCH_NORM_EPS = 1e-5
BATCH_NORM_MOMENTUM = 0.9


def conv(x: Symbol, name: str, filters: int, kernel: int, stride: int = 1, groups: int = 1) -> Symbol:
    """A convolution without bias, 'same' padding; weight OHWI."""
    pad = kernel // 2
    return mx.sym.Convolution(x, num_filter=filters, kernel=(kernel, kernel), stride=(stride, stride), pad=(pad, pad),
                              num_group=groups, no_bias=True, layout="NHWC", name=name)


def batch_norm(x: Symbol, name: str) -> Symbol:
    """Over the channels of NHWC."""
    return mx.sym.BatchNorm(x, axis=3, eps=BATCH_NORM_EPS, momentum=BATCH_NORM_MOMENTUM, fix_gamma=False, name=name)


def relu(x: Symbol, name: str) -> Symbol:
    """max(x, 0)."""
    return mx.sym.Activation(x, act_type="relu", name=name)


def stem(x: Symbol) -> Symbol:
    """From the images: a 7x7 convolution of stride 2, to FIRST_WIDTH channels."""
    return relu(batch_norm(conv(x, "stem_conv", FIRST_WIDTH, kernel=7, stride=2), "stem_bn"), "stem_relu")


def projection(x: Symbol, name: str, filters: int, stride: int) -> Symbol:
    """A shortcut to another number of channels, or of another stride: a 1x1 convolution."""
    return batch_norm(conv(x, f"{name}_conv", filters, 1, stride), f"{name}_bn")


def resnet(depth: int, num_classes: int = 1000, label_smoothing: float = 0.0, *, groups: int = 1,
           group_width: int | None = None, stem: Callable[[Symbol], Symbol] = stem,
           projection: Callable[[Symbol, str, int, int], Symbol] = projection) -> Symbol:
    """The training Symbol of a residual network, with the inputs and the output of `Network`.

    Args:
        depth: 18, 34, 50, 101 or 152.
        num_classes: of the output.
        label_smoothing: of the loss.
        groups: of the 3x3 convolutions of bottlenecks.
        group_width: channels of such a group in the first stage, FIRST_WIDTH if not given; each stage doubles them.
        stem, projection: the first layers before the max pooling, and the shortcuts that are more than a block's input.
    """
    bottleneck = depth >= FIRST_BOTTLENECK_DEPTH
    x = mx.sym.Pooling(stem(mx.sym.Variable("data")), kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max",
                       layout="NHWC", name="stem_pool")
    for stage, num_blocks in enumerate(BLOCKS_PER_STAGE[depth], start=1):
        widening = 2 ** (stage - 1)
        width = groups * (group_width or FIRST_WIDTH) * widening
        filters = 4 * FIRST_WIDTH * widening if bottleneck else width
        for block in range(1, num_blocks + 1):
            name, stride = f"stage{stage}_block{block}", 2 if stage > 1 and block == 1 else 1
            project = block == 1 and (stage > 1 or bottleneck)
            # (filters, kernel, stride, groups) of each convolution of the residual branch
            if bottleneck:
                branch = [(width, 1, 1, 1), (width, 3, stride, groups), (filters, 1, 1, 1)]
            else:
                branch = [(width, 3, stride, 1), (filters, 3, 1, 1)]
            shortcut = projection(x, f"{name}_shortcut", filters, stride) if project else x
            x = relu(mx.sym.elemwise_add(_branch(x, name, branch), shortcut, name=f"{name}_add"),
                     f"{name}_relu{len(branch)}")
    x = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", layout="NHWC", name="pool")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x, name="flatten"), num_hidden=num_classes, name="classifier")
    return mx.sym.SoftmaxOutput(x, normalization="batch", smooth_alpha=label_smoothing, name="softmax")


def _branch(x: Symbol, name: str, convolutions: list[tuple[int, int, int, int]]) -> Symbol:
    """The residual branch of a block."""
    for number, (filters, kernel, stride, groups) in enumerate(convolutions, start=1):
        x = batch_norm(conv(x, f"{name}_conv{number}", filters, kernel, stride, groups), f"{name}_bn{number}")
        if number < len(convolutions):
            x = relu(x, f"{name}_relu{number}")
    return x


MODELS = {f"resnet{depth}": partial(resnet, depth) for depth in BLOCKS_PER_STAGE}
