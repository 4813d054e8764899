"""Building blocks of networks, as MXNet Symbols in NHWC; the families' files put them together."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from common.mxnet_compat import mx

Symbol = Any  # mx.sym.Symbol; MXNet has no type stubs

BATCH_NORM_EPS = 1e-5
BATCH_NORM_MOMENTUM = 0.9


class Norm(NamedTuple):
    """The constants of a network's BatchNorms. `momentum`: the share of the running statistics that a step keeps."""

    eps: float = BATCH_NORM_EPS
    momentum: float = BATCH_NORM_MOMENTUM


USUAL_NORM = Norm()


class Layer(NamedTuple):
    """A convolution of a branch."""

    filters: int
    kernel: int
    stride: int = 1
    groups: int = 1


class SqueezeExcitation(NamedTuple):
    """Squeeze-and-excitation (Hu et al., arXiv:1709.01507): the channels between its two layers, and its functions."""

    channels: int
    act: str = "relu"
    gate: str = "sigmoid"


def conv(x: Symbol, name: str, filters: int, kernel: int, stride: int = 1, groups: int = 1, bias: bool = False,
         pad: int | None = None, deviation: float = 0.0) -> Symbol:
    """A convolution, weight OHWI. `pad`: pixels on each side; None: 'same' for stride 1. `deviation`: the standard
    deviation of the initial weights; 0: the deviation that `init_params` chooses.
    """
    pad = kernel // 2 if pad is None else pad
    weight = {"weight": normal(f"{name}_weight", deviation)} if deviation else {}
    return mx.sym.Convolution(x, num_filter=filters, kernel=(kernel, kernel), stride=(stride, stride), pad=(pad, pad),
                              num_group=groups, no_bias=not bias, layout="NHWC", name=name, **weight)


def batch_norm(x: Symbol, name: str, norm: Norm = USUAL_NORM) -> Symbol:
    """BatchNorm over the channels of NHWC."""
    return mx.sym.BatchNorm(x, axis=3, eps=norm.eps, momentum=norm.momentum, fix_gamma=False, name=name)


def relu(x: Symbol, name: str) -> Symbol:
    """max(x, 0)."""
    return mx.sym.Activation(x, act_type="relu", name=name)


def activation(x: Symbol, name: str, kind: str) -> Symbol:
    """An elementwise function.

    relu; relu6: min(max(x, 0), 6); silu: x * sigmoid(x) (arXiv:1702.03118); hard_swish: x * hard_sigmoid(x), with
    hard_sigmoid min(max(x / 6 + 1/2, 0), 1) (arXiv:1905.02244); gelu: with erf (arXiv:1606.08415); sigmoid.
    """
    if kind in ("silu", "hard_swish"):
        gate = "sigmoid" if kind == "silu" else "hard_sigmoid"
        return mx.sym.elemwise_mul(x, activation(x, f"{name}_{gate}", gate), name=name)
    if kind == "relu6":
        return mx.sym.clip(x, a_min=0, a_max=6, name=name)
    if kind == "hard_sigmoid":
        return mx.sym.hard_sigmoid(x, alpha=1 / 6, beta=0.5, name=name)
    if kind == "gelu":
        return mx.sym.LeakyReLU(x, act_type="gelu", name=name)
    return mx.sym.Activation(x, act_type=kind, name=name)


def conv_bn(x: Symbol, name: str, number: int | str, layer: Layer, norm: Norm = USUAL_NORM,
            act: str = "") -> Symbol:
    """A convolution without bias, named by its number within `name`, its BatchNorm, and the activation, if any."""
    x = batch_norm(conv(x, f"{name}_conv{number}", *layer), f"{name}_bn{number}", norm)
    return activation(x, f"{name}_{'relu' if act == 'relu' else 'act'}{number}", act) if act else x


def squeeze_excitation(x: Symbol, name: str, channels: int, squeeze: SqueezeExcitation) -> Symbol:
    """x with each of its `channels` channels multiplied by a factor, which is computed from the means of all channels.
    """
    means = mean_of_pixels(x, f"{name}_se_pool")
    squeezed = activation(conv(means, f"{name}_se_conv1", squeeze.channels, 1, bias=True), f"{name}_se_act",
                          squeeze.act)
    factors = activation(conv(squeezed, f"{name}_se_conv2", channels, 1, bias=True), f"{name}_se_gate", squeeze.gate)
    return mx.sym.broadcast_mul(x, factors, name=f"{name}_se")


def layer_scale(x: Symbol, name: str, channels: int, initial: float) -> Symbol:
    """x with each channel multiplied by a trained factor (Touvron et al., arXiv:2103.17239, section 2)."""
    factors = constant(f"{name}_gamma", initial, (channels,))
    factors = mx.sym.Reshape(factors, shape=(1, 1, 1, -1), name=f"{name}_factors")
    return mx.sym.broadcast_mul(x, factors, name=name)


def layer_norm(x: Symbol, name: str, eps: float) -> Symbol:
    """LayerNorm over the channels of each pixel of NHWC."""
    return mx.sym.LayerNorm(x, axis=-1, eps=eps, name=name)


def max_pool(x: Symbol, name: str) -> Symbol:
    """Max pooling over 3x3 pixels with stride 2."""
    return mx.sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max", layout="NHWC", name=name)


def mean_of_pixels(x: Symbol, name: str) -> Symbol:
    """The means over all pixels, (N, 1, 1, C)."""
    return mx.sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", layout="NHWC", name=name)


def head(x: Symbol, num_classes: int, label_smoothing: float) -> Symbol:
    """The layers from the last block's output to the class probabilities, with the loss."""
    return classify(mx.sym.Flatten(mean_of_pixels(x, "pool"), name="flatten"), num_classes, label_smoothing)


def classify(x: Symbol, num_classes: int, label_smoothing: float, deviation: float = 0.0) -> Symbol:
    """The classifier of x (N, C), and the loss. `deviation`: as for `conv`."""
    weight = {"weight": normal("classifier_weight", deviation)} if deviation else {}
    x = mx.sym.FullyConnected(x, num_hidden=num_classes, name="classifier", **weight)
    return mx.sym.SoftmaxOutput(x, normalization="batch", smooth_alpha=label_smoothing, name="softmax")


def normal(name: str, deviation: float) -> Symbol:
    """A parameter whose initial values are normal, with this standard deviation. `init_params` reads this deviation."""
    return mx.sym.Variable(name, init=json.dumps(["normal", {"sigma": deviation}]))


def constant(name: str, value: float, shape: tuple[int, ...]) -> Symbol:
    """A parameter of this shape whose initial values are all `value`. `init_params` reads the value."""
    return mx.sym.Variable(name, shape=shape, init=json.dumps(["constant", {"value": value}]))


def divisible(channels: float, divisor: int = 8) -> int:
    """Round to the nearest multiple of `divisor` (at least `divisor` itself), or to the next multiple if the nearest
    is below 90 % of `channels`. This is the rounding of Google's mobile networks (tensorflow/models,
    slim/nets/mobilenet, `make_divisible`)."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded


def repeated(times: int, factor: float) -> int:
    """The number of repetitions of a block in a network that is deeper by `factor` (arXiv:1905.11946, section 3.3)."""
    return math.ceil(times * factor)
