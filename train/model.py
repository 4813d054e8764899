"""ResNet v1.5 as MXNet Symbols in NHWC, and its initial parameters.

He et al., 'Deep Residual Learning for Image Recognition' (arXiv:1512.03385); v1.5 moves the stride of a bottleneck from
its first 1x1 convolution to the 3x3 one, as torchvision and NVIDIA's examples do.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from common.mxnet_compat import mx
from train.errors import TrainError

Symbol = Any  # mx.sym.Symbol; MXNet has no type stubs
Arrays = dict[str, np.ndarray]

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
BATCH_NORM_PARAMS = ("_gamma", "_beta")  # ends of names; these and biases get no weight decay


def _conv(x: Symbol, name: str, filters: int, kernel: int, stride: int = 1) -> Symbol:
    """A convolution without bias, 'same' padding; weight OHWI."""
    pad = kernel // 2
    return mx.sym.Convolution(x, num_filter=filters, kernel=(kernel, kernel), stride=(stride, stride), pad=(pad, pad),
                              no_bias=True, layout="NHWC", name=name)


def _batch_norm(x: Symbol, name: str) -> Symbol:
    return mx.sym.BatchNorm(x, axis=3, eps=BATCH_NORM_EPS, momentum=BATCH_NORM_MOMENTUM, fix_gamma=False, name=name)


def _relu(x: Symbol, name: str) -> Symbol:
    return mx.sym.Activation(x, act_type="relu", name=name)


def _block(x: Symbol, name: str, width: int, stride: int, bottleneck: bool, project: bool) -> Symbol:
    """One residual block; `project` puts a 1x1 convolution on the shortcut where its shape changes."""
    # (filters, kernel, stride) of each convolution of the residual branch
    if bottleneck:
        branch = [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
    else:
        branch = [(width, 3, stride), (width, 3, 1)]
    filters_out = branch[-1][0]

    y = x
    for i, (filters, kernel, conv_stride) in enumerate(branch, start=1):
        y = _batch_norm(_conv(y, f"{name}_conv{i}", filters, kernel, conv_stride), f"{name}_bn{i}")
        if i < len(branch):
            y = _relu(y, f"{name}_relu{i}")
    shortcut = x
    if project:
        shortcut = _conv(x, f"{name}_shortcut_conv", filters_out, 1, stride)
        shortcut = _batch_norm(shortcut, f"{name}_shortcut_bn")
    return _relu(mx.sym.elemwise_add(y, shortcut, name=f"{name}_add"), f"{name}_relu{len(branch)}")


def resnet(depth: int = 50, num_classes: int = 1000, label_smoothing: float = 0.0) -> Symbol:
    """The training Symbol of a ResNet v1.5 of depth 18, 34, 50, 101 or 152.

    Inputs: `data` (N, H, W, C), C = 3, or 4 where the loader pads a zero channel; `softmax_label` (N,), class indices.
    Output: class probabilities (N, num_classes). The gradient is that of the mean cross entropy over the batch, with
    targets 1 - label_smoothing for the class and label_smoothing / (num_classes - 1) for each other one.
    Raises TrainError for another depth.
    """
    if depth not in BLOCKS_PER_STAGE:
        raise TrainError(f"there is no ResNet-{depth}; choose a depth of {', '.join(map(str, BLOCKS_PER_STAGE))}")
    bottleneck = depth >= FIRST_BOTTLENECK_DEPTH

    x = _conv(mx.sym.Variable("data"), "stem_conv", FIRST_WIDTH, kernel=7, stride=2)
    x = _relu(_batch_norm(x, "stem_bn"), "stem_relu")
    x = mx.sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max", layout="NHWC", name="stem_pool")
    for stage, num_blocks in enumerate(BLOCKS_PER_STAGE[depth], start=1):
        width = FIRST_WIDTH * 2 ** (stage - 1)
        for block in range(1, num_blocks + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            project = block == 1 and (stage > 1 or bottleneck)
            x = _block(x, f"stage{stage}_block{block}", width, stride, bottleneck, project)
    x = mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", layout="NHWC", name="pool")
    x = mx.sym.FullyConnected(mx.sym.Flatten(x, name="flatten"), num_hidden=num_classes, name="classifier")
    return mx.sym.SoftmaxOutput(x, normalization="batch", smooth_alpha=label_smoothing, name="softmax")


def init_params(symbol: Symbol, seed: int, channels: int = 3,
                zero_init_residual: bool = True) -> tuple[Arrays, Arrays]:
    """Initial (params, aux) of a network of `resnet`, canonical: fp32, convolution weights OHWI.

    Convolutions: He et al. (arXiv:1502.01852), normal with variance 2 / fan_out. Classifier: normal with standard
    deviation 0.01, bias 0. BatchNorm: beta 0, gamma 1, but with `zero_init_residual` 0 in the last one of each residual
    branch, so that a block starts as its shortcut (both from Goyal et al., arXiv:1706.02677, section 5.1). Each array
    depends on the seed and its own name alone; the weights of a fourth, padded input channel are 0 and get no gradient.
    """
    arg_shapes, _, aux_shapes = symbol.infer_shape(data=(1, 224, 224, channels))
    shapes = dict(zip(symbol.list_arguments(), arg_shapes, strict=True))
    del shapes["data"], shapes["softmax_label"]
    zero_gammas = _last_gammas(list(shapes)) if zero_init_residual else set()

    params: Arrays = {}
    for name, shape in shapes.items():
        if name.endswith("_gamma"):
            params[name] = np.full(shape, 0.0 if name in zero_gammas else 1.0, np.float32)
        elif name.endswith(("_beta", "_bias")):
            params[name] = np.zeros(shape, np.float32)
        else:
            is_conv = len(shape) == 4
            std = np.sqrt(2.0 / (shape[0] * shape[1] * shape[2])) if is_conv else 0.01
            drawn = (*shape[:3], min(shape[3], 3)) if name == "stem_conv_weight" else shape
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            weight = np.zeros(shape, np.float32)
            weight[..., : drawn[-1]] = rng.standard_normal(drawn, dtype=np.float32) * np.float32(std)
            params[name] = weight
    aux = {
        name: np.full(shape, 1.0 if name.endswith("_var") else 0.0, np.float32)
        for name, shape in zip(symbol.list_auxiliary_states(), aux_shapes, strict=True)
    }
    return params, aux


def _last_gammas(names: list[str]) -> set[str]:
    """Names of the gammas of the last BatchNorm of every residual branch."""
    last: dict[str, str] = {}
    for name in names:
        if name.startswith("stage") and "_bn" in name and "_shortcut" not in name and name.endswith("_gamma"):
            block = name.rsplit("_bn", 1)[0]
            last[block] = max(last.get(block, ""), name)
    return set(last.values())
