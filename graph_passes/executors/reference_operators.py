"""Every operator of the networks and its gradient in NumPy, written to be read: the oracle for all other executors.

Each function computes in the dtype of its inputs (float64 for comparisons with finite differences). `node` gives the
attributes only. Gradient functions take dy, the gradient of the output, first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.graph import Node
from graph_passes.operators import Window, output_size, window

Array = np.ndarray


# --- convolution: one matrix product for each place in the kernel ---


def convolution(node: Node, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Cross-correlation of x (N, H, W, C) with weight (O, KH, KW, C / groups), or of NCHW with OIHW."""
    places = _Places(node, x.shape)
    x, weight = places.padded(_nhwc(node, x)), _grouped(node, weight)
    y = sum(
        np.einsum("nhwgc,goc->nhwgo", _grouped_channels(node, x[region]), weight[:, :, row, column], optimize=True)
        for (row, column), region in places
    )
    y = np.asarray(y).reshape(*places.output_size, node["num_filter"])
    return _as_layout(node, y if bias is None else y + bias)


def convolution_dgrad(node: Node, dy: Array, weight: Array, data_shape: tuple[int, ...]) -> Array:
    """Gradient of a convolution's data."""
    places = _Places(node, data_shape)
    dy, weight = _grouped_channels(node, _nhwc(node, dy)), _grouped(node, weight)
    dx = places.empty_padded(dy.dtype)
    for (row, column), region in places:
        part = np.einsum("nhwgo,goc->nhwgc", dy, weight[:, :, row, column], optimize=True)
        dx[region] += part.reshape(dx[region].shape)
    return _as_layout(node, places.unpadded(dx))


def convolution_wgrad(node: Node, dy: Array, x: Array) -> Array:
    """Gradient of a convolution's weight."""
    places = _Places(node, x.shape)
    groups, filters, (height, width) = node["num_group"], node["num_filter"], window(node).kernel
    x, dy = places.padded(_nhwc(node, x)), _grouped_channels(node, _nhwc(node, dy))
    dw = np.empty((groups, filters // groups, height, width, x.shape[3] // groups), x.dtype)
    for (row, column), region in places:
        patch = _grouped_channels(node, x[region])
        dw[:, :, row, column] = np.einsum("nhwgo,nhwgc->goc", dy, patch, optimize=True)
    return _as_layout(node, dw.reshape(filters, height, width, -1))


def bias_grad(dy: Array, axis: int) -> Array:
    """Gradient of a bias along `axis`: the sum of dy over everything else."""
    return dy.sum(axis=tuple(i for i in range(dy.ndim) if i != axis % dy.ndim))


# --- pooling ---


def max_pooling(node: Node, x: Array) -> tuple[Array, Array]:
    """The largest element of each window, and its place in the window, row * width + column (the first, if several)."""
    places = _Places(node, x.shape)
    x = places.padded(_nhwc(node, x), fill=-np.inf)
    windows = np.stack([x[region] for _, region in places])
    winner = windows.argmax(axis=0)
    y = np.take_along_axis(windows, winner[None], axis=0)[0]
    return _as_layout(node, y), _as_layout(node, winner)


def max_pooling_backward(node: Node, dy: Array, winner: Array, data_shape: tuple[int, ...]) -> Array:
    """Each element of dy goes to the winner of its window."""
    places = _Places(node, data_shape)
    dy, winner = _nhwc(node, dy), _nhwc(node, winner)
    dx = places.empty_padded(dy.dtype)
    for place, (_, region) in enumerate(places):
        dx[region] += np.where(winner == place, dy, 0)
    return _as_layout(node, places.unpadded(dx))


def avg_pooling(node: Node, x: Array) -> Array:
    """Mean (or, for pool_type "sum", sum) of each window."""
    places = _Places(node, x.shape)
    padded = places.padded(_nhwc(node, x))
    total = np.sum([padded[region] for _, region in places], axis=0)
    return _as_layout(node, total / places.divisor(node).astype(x.dtype))


def avg_pooling_backward(node: Node, dy: Array, data_shape: tuple[int, ...]) -> Array:
    places = _Places(node, data_shape)
    share = _nhwc(node, dy) / places.divisor(node).astype(dy.dtype)
    dx = places.empty_padded(dy.dtype)
    for _, region in places:
        dx[region] += share
    return _as_layout(node, places.unpadded(dx))


# --- batch normalisation: Ioffe and Szegedy, arXiv:1502.03167 ---


class Statistics(NamedTuple):
    """Per channel: mean and biased variance with which data is normalised."""

    mean: Array
    var: Array


def batch_statistics(node: Node, x: Array) -> Statistics:
    x = np.moveaxis(x, node["axis"], -1)
    axes = tuple(range(x.ndim - 1))
    return Statistics(x.mean(axis=axes), x.var(axis=axes))


def running_statistics(node: Node, running: Statistics, batch: Statistics) -> Statistics:
    """The running statistics after a training step."""
    keep = node["momentum"]
    return Statistics(*(keep * old + (1 - keep) * new for old, new in zip(running, batch, strict=True)))


def batch_norm(node: Node, x: Array, gamma: Array, beta: Array, statistics: Statistics) -> Array:
    return _normalised(node, x, statistics) * _scale(node, gamma, x.ndim) + _along_axis(node, beta, x.ndim)


def batch_norm_backward(
    node: Node, dy: Array, x: Array, gamma: Array, statistics: Statistics, training: bool = True
) -> tuple[Array, Array, Array]:
    """Gradients of data, gamma and beta. In training, `statistics` are those of x and have gradients of their own."""
    x_hat = _normalised(node, x, statistics)
    dgamma, dbeta = bias_grad(dy * x_hat, node["axis"]), bias_grad(dy, node["axis"])
    dx_hat = dy
    if training:
        count = x.size // x.shape[node["axis"]]
        sums = _along_axis(node, dbeta, x.ndim) + x_hat * _along_axis(node, dgamma, x.ndim)
        dx_hat = dy - sums / count
    dx = dx_hat * _scale(node, gamma, x.ndim) / _along_axis(node, np.sqrt(statistics.var + node["eps"]), x.ndim)
    return dx, np.zeros_like(dgamma) if node["fix_gamma"] else dgamma, dbeta


def _normalised(node: Node, x: Array, statistics: Statistics) -> Array:
    std = np.sqrt(statistics.var + node["eps"])
    return (x - _along_axis(node, statistics.mean, x.ndim)) / _along_axis(node, std, x.ndim)


def _scale(node: Node, gamma: Array, ndim: int) -> Array:
    return _along_axis(node, np.ones_like(gamma) if node["fix_gamma"] else gamma, ndim)


def _along_axis(node: Node, channels: Array, ndim: int) -> Array:
    """(C,) in a shape that broadcasts along the node's axis of a tensor with `ndim` dimensions."""
    return channels.reshape(-1, *(1,) * (ndim - 1 - node["axis"] % ndim))


# --- the rest ---


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def relu_backward(dy: Array, y: Array) -> Array:
    return np.where(y > 0, dy, 0)


def fully_connected(node: Node, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x (N, ...) flattened where the node says so, weight (hidden, features)."""
    y = (x.reshape(len(x), -1) if node["flatten"] else x) @ weight.T
    return y if bias is None else y + bias


def fully_connected_dgrad(dy: Array, weight: Array, data_shape: tuple[int, ...]) -> Array:
    return (dy @ weight).reshape(data_shape)


def fully_connected_wgrad(node: Node, dy: Array, x: Array) -> Array:
    x = x.reshape(len(x), -1) if node["flatten"] else x
    return dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])


def softmax(x: Array, axis: int = -1) -> Array:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def softmax_backward(dy: Array, y: Array, axis: int = -1) -> Array:
    return y * (dy - (dy * y).sum(axis=axis, keepdims=True))


def smoothed_targets(node: Node, label: Array, num_classes: int, dtype: np.dtype) -> Array:
    """(N, classes): 1 - smooth_alpha for the label, smooth_alpha / (classes - 1) elsewhere, as MXNet smooths.

    (Szegedy et al., arXiv:1512.00567, spread it over all classes; the two agree after a rescaling of smooth_alpha.)
    A label of shape (N, classes) is taken as the targets themselves, as MXNet takes it.
    """
    if label.ndim == 2:
        return label.astype(dtype)
    smoothing = node["smooth_alpha"]
    elsewhere = smoothing / (num_classes - 1) if smoothing else 0.0
    targets = np.full((len(label), num_classes), elsewhere, dtype)
    targets[np.arange(len(label)), label.astype(int)] = 1 - smoothing
    return targets


def softmax_output_backward(node: Node, probabilities: Array, label: Array) -> Array:
    """Gradient of the cross entropy with regard to the scores: (p - target) * grad_scale, over N unless 'null'."""
    if node["use_ignore"] or node["multi_output"]:
        raise GraphError(f"SoftmaxOutput '{node.name}' has use_ignore or multi_output: only plain labels are supported")
    targets = smoothed_targets(node, label, probabilities.shape[1], probabilities.dtype)
    scale = node["grad_scale"] / (1 if node["normalization"] == "null" else len(label))
    return (probabilities - targets) * probabilities.dtype.type(scale)


# --- layouts and windows; the inside of this module is NHWC ---


def _nhwc(node: Node, x: Array) -> Array:
    """Images in NHWC, or a weight in OHWI."""
    return x if node["layout"] == "NHWC" else x.transpose(0, 2, 3, 1)


def _as_layout(node: Node, x: Array) -> Array:
    """The inverse of `_nhwc`."""
    return np.ascontiguousarray(x if node["layout"] == "NHWC" else x.transpose(0, 3, 1, 2))


def _grouped(node: Node, weight: Array) -> Array:
    """A weight as (groups, filters / groups, KH, KW, C / groups)."""
    weight = _nhwc(node, weight)
    return weight.reshape(node["num_group"], -1, *weight.shape[1:])


def _grouped_channels(node: Node, x: Array) -> Array:
    """Images as (N, H, W, groups, C / groups)."""
    return x.reshape(*x.shape[:3], node["num_group"], -1)


class _Places:
    """For each place (row, column) in a kernel, the region of the padded images that meets it, one pixel per output.

    Iterating gives ((row, column), index of an NHWC array), rows first.
    """

    def __init__(self, node: Node, data_shape: tuple[int, ...]) -> None:
        order = (0, 1, 2, 3) if node["layout"] == "NHWC" else (0, 2, 3, 1)
        batch, height, width, channels = (data_shape[i] for i in order)
        self.size = (height, width)
        self.output_size = (batch, *output_size(node, self.size))
        is_global = node.op == "Pooling" and node["global_pool"]
        self.window = Window(self.size, (1, 1), (0, 0), (1, 1)) if is_global else window(node)
        # Pooling with the convention "full" reaches beyond the padding at the far side.
        kernel, stride, pad, dilate = self.window
        reach = [(out - 1) * stride[i] + dilate[i] * (kernel[i] - 1) + 1 for i, out in enumerate(self.output_size[1:])]
        self.padded_size = [max(reach[i], self.size[i] + 2 * pad[i]) for i in (0, 1)]
        self.padded_shape = (batch, *self.padded_size, channels)
        self._inner = (slice(None), *(slice(pad[i], pad[i] + self.size[i]) for i in (0, 1)))

    def __iter__(self) -> Iterator[tuple[tuple[int, int], tuple[slice, ...]]]:
        kernel, stride, _, dilate = self.window
        for place in itertools.product(range(kernel[0]), range(kernel[1])):
            starts = [place[i] * dilate[i] for i in (0, 1)]
            stops = [starts[i] + (self.output_size[1 + i] - 1) * stride[i] + 1 for i in (0, 1)]
            yield place, (slice(None), *(slice(starts[i], stops[i], stride[i]) for i in (0, 1)))

    def padded(self, x: Array, fill: float = 0.0) -> Array:
        result = np.full(self.padded_shape, fill, x.dtype)
        result[self._inner] = x
        return result

    def unpadded(self, x: Array) -> Array:
        return x[self._inner]

    def empty_padded(self, dtype: np.dtype) -> Array:
        return np.zeros(self.padded_shape, dtype)

    def divisor(self, node: Node) -> Array:
        """What the sum over a window is divided by: its number of pixels, for each output (1, H, W, 1)."""
        if node["pool_type"] == "sum":
            return np.ones((1, 1, 1, 1))
        pad = self.window.pad
        counted = np.zeros((1, *self.padded_size, 1))
        if node["count_include_pad"]:
            counted[:, : self.size[0] + 2 * pad[0], : self.size[1] + 2 * pad[1]] = 1
        else:
            counted[self._inner] = 1
        return np.sum([counted[region] for _, region in self], axis=0)
