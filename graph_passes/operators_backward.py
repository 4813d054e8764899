"""Rows of the operator table that only a training step has: what the `gradient` pass writes.

Every backward operator carries the attributes of the forward operator it belongs to; `forward_node` gives that one
back, so that shapes and arithmetic are written once. In this table, dy is `out_grad`, the gradient of the output, and
dy2 is `out_grad_2`, a second one to be added to it while it is read (the tensor has two readers, as at every residual
sum); dx, dw, dgamma, dbeta, dbias are the outputs `data_grad`, `weight_grad`, `gamma_grad`, `beta_grad`, `bias_grad`.

| operator | inputs | outputs |
|---|---|---|
| BatchNormTrain, BatchNormReluTrain | those of BatchNorm | output, saved, moving_mean, moving_var |
| BatchNormAddReluTrain | those of BatchNormAddRelu | output, saved, moving_mean, moving_var, mask |
| MaxPoolingTrain | data | output, winner |
| SoftmaxCrossEntropy | data, label [, loss_scale] | dx (times loss_scale); loss, top1, top5: sums over the batch |
| ConvolutionWgrad, FullyConnectedWgrad | dy, data | dw |
| ConvolutionDgrad, FullyConnectedDgrad | dy, weight | dx |
| BiasGrad | dy | dbias: sum of dy over all dimensions but `axis` |
| BatchNormBackward | dy, data, gamma, saved [, dy2] | dx, dgamma, dbeta |
| BatchNormReluBackward | dy, data, gamma, saved, beta [, dy2] | dx, dgamma, dbeta |
| BatchNormAddReluBackward | dy, data, gamma, saved, mask [, dy2] | dx, dgamma, dbeta, addend_grad |
| ReluBackward | dy, output [, dy2] | dx: dy where output > 0. Of an AddRelu, for both summands |
| MaxPoolingBackward | dy, winner [, dy2] | dx: dy at the winner of its window |
| AvgPoolingBackward | dy | dx |
| FlattenBackward | dy | dx: the same bytes in another shape |

What is kept from the forward pass, besides the data that a wgrad reads anyway, and why (bytes per element of the
output, 16-bit tensors):

- `saved` (2, channels), fp32: mean and 1 / sqrt(var + eps). Next to nothing.
- BatchNorm reads its own data again (2 bytes). The ReLU behind it keeps nothing: whether its input was positive is
  computed again from data, gamma, beta and `saved`, which are read anyway.
- `mask` of BatchNorm + add + ReLU: one bit (1/8 byte), eight channels to a byte, the lowest bit first. To compute it
  again the addend would have to be kept and read (2 bytes); reading the output instead costs 2 bytes as well.
- `winner` of max pooling: 1 byte, the place in the window, row * width + column. Its data and output instead would be
  2 * stride^2 + 2 = 10 bytes in ResNet's stem, whose pooling's data nobody else needs.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

from graph_passes.errors import GraphError
from graph_passes.graph import Node
from graph_passes.operators import OPERATORS, TRUE, Attribute, Operator, Shape, Shapes, channel_axis, window

Infer = Callable[[Node, list[Shape | None]], tuple[Shapes, Shapes]]

FORWARD_OF = {
    "BatchNormTrain": "BatchNorm",
    "BatchNormReluTrain": "BatchNormRelu",
    "BatchNormAddReluTrain": "BatchNormAddRelu",
    "MaxPoolingTrain": "Pooling",
    "SoftmaxCrossEntropy": "SoftmaxOutput",
    "ConvolutionWgrad": "Convolution",
    "ConvolutionDgrad": "Convolution",
    "FullyConnectedWgrad": "FullyConnected",
    "FullyConnectedDgrad": "FullyConnected",
    "BatchNormBackward": "BatchNorm",
    "BatchNormReluBackward": "BatchNormRelu",
    "BatchNormAddReluBackward": "BatchNormAddRelu",
    "MaxPoolingBackward": "Pooling",
    "AvgPoolingBackward": "Pooling",
    "FlattenBackward": "Flatten",
}
_OWN_ATTRIBUTES = ("data_shape", "single_grad", "no_loss_scale")  # those that the forward operator does not have


def forward_node(node: Node) -> Node:
    """The forward operator whose training variant or gradient `node` is, with its attributes; without inputs."""
    attrs = {key: value for key, value in node.attrs.items() if key not in _OWN_ATTRIBUTES}
    return Node(FORWARD_OF[node.op], node.name, (), attrs)


# --- shapes: of each operator from those of its forward operator ---


def _forward_shapes(node: Node, data: Shape | None) -> tuple[Shapes, Shapes]:
    """Shapes of the inputs and outputs of the forward operator, from that of its data."""
    forward = forward_node(node)
    if data is None:
        raise GraphError(f"the shape of the data of {node.op} '{node.name}' is not known: give it")
    unknown = [None] * (len(OPERATORS[forward.op].input_names(forward)) - 1)
    return OPERATORS[forward.op].infer(forward, [data, *unknown])


def _batch_norm_train(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    inputs, (output, channels, _) = _forward_shapes(node, shapes[0])
    outputs = [output, (2, *channels), channels, channels]
    return inputs, [*outputs, _mask_shape(output)] if node.op == "BatchNormAddReluTrain" else outputs


def _mask_shape(data: Shape) -> Shape:
    """One bit per element, packed along the last dimension."""
    return (*data[:-1], -(-data[-1] // 8))


def _max_pooling_train(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    if math.prod(window(forward_node(node)).kernel) > 256:
        raise GraphError(f"Pooling '{node.name}' has kernel={node['kernel']}: the gradient needs at most 256 elements")
    inputs, (output,) = _forward_shapes(node, shapes[0])
    return inputs, [output, output]


def _softmax_cross_entropy(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    inputs, (output,) = _forward_shapes(node, shapes[0])
    loss_scale = [] if node["no_loss_scale"] else [(1,)]
    return [*inputs, *loss_scale], [output, (1,), (1,), (1,)]


def _wgrad(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    (data, weight, *_), (output,) = _forward_shapes(node, shapes[1])
    return [output, data], [weight]


def _dgrad(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    (data, weight, *_), (output,) = _forward_shapes(node, node["data_shape"])
    return [output, weight], [data]


def _bias_grad(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    if shapes[0] is None:
        raise GraphError(f"the shape of '{node.inputs[0].node}', read by BiasGrad '{node.name}', is not known: give it")
    return [shapes[0]], [(shapes[0][node["axis"]],)]


def _batch_norm_backward(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    (data, channels, *_), _ = _forward_shapes(node, shapes[0])
    last = {
        "BatchNormBackward": [],
        "BatchNormReluBackward": [channels],
        "BatchNormAddReluBackward": [_mask_shape(data)],
    }[node.op]
    second = [] if node["single_grad"] else [data]
    addend = [data] if node.op == "BatchNormAddReluBackward" else []
    return [data, data, channels, (2, *channels), *last, *second], [data, channels, channels, *addend]


def _relu_backward(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    return OPERATORS["elemwise_add"].infer(node, shapes)


def _from_data_shape(node: Node, shapes: list[Shape | None]) -> tuple[Shapes, Shapes]:
    """Every input has the shape of the forward operator's output."""
    _, (output,) = _forward_shapes(node, node["data_shape"])
    return [output] * len(shapes), [node["data_shape"]]


# --- the rows ---


def _shape(value: Any) -> Shape:
    return tuple(int(size) for size in (ast.literal_eval(value) if isinstance(value, str) else value))


_DATA_SHAPE = {"data_shape": Attribute(_shape)}  # of the forward operator's data: the gradient's shape does not tell
_SINGLE_GRAD = {"single_grad": TRUE}
_NO_LOSS_SCALE = {"no_loss_scale": TRUE}


def _row(name: str, inputs: str, outputs: str, infer: Infer, own: dict[str, Attribute] | None = None) -> Operator:
    """A row of the table. An input in brackets is left out where its attribute in `own` is true."""
    names = tuple(inputs.replace("[", "").replace("]", "").split())
    optional = next(((word.strip("[]"), key) for word in inputs.split() if "[" in word for key in own or ()
                     if key in ("single_grad", "no_loss_scale")), None)
    attrs = {**(OPERATORS[FORWARD_OF[name]].attrs if name in FORWARD_OF else {}), **(own or {})}
    aux = ("moving_mean", "moving_var") if "moving_mean" in names else ()
    return Operator(name, names, infer, attrs, tuple(outputs.split()), optional, aux)


_BATCH_NORM = "data gamma beta moving_mean moving_var"
_KEPT = "output saved moving_mean moving_var"
_GRADS = "data_grad gamma_grad beta_grad"

OPERATORS.update({
    row.name: row
    for row in (
        _row("BatchNormTrain", _BATCH_NORM, _KEPT, _batch_norm_train),
        _row("BatchNormReluTrain", _BATCH_NORM, _KEPT, _batch_norm_train),
        _row("BatchNormAddReluTrain", f"{_BATCH_NORM} addend", f"{_KEPT} mask", _batch_norm_train),
        _row("MaxPoolingTrain", "data", "output winner", _max_pooling_train),
        _row("SoftmaxCrossEntropy", "data label [loss_scale]", "data_grad loss top1 top5", _softmax_cross_entropy,
             _NO_LOSS_SCALE),
        _row("ConvolutionWgrad", "out_grad data", "weight_grad", _wgrad),
        _row("ConvolutionDgrad", "out_grad weight", "data_grad", _dgrad, _DATA_SHAPE),
        _row("FullyConnectedWgrad", "out_grad data", "weight_grad", _wgrad),
        _row("FullyConnectedDgrad", "out_grad weight", "data_grad", _dgrad, _DATA_SHAPE),
        _row("BiasGrad", "out_grad", "bias_grad", _bias_grad, {"axis": Attribute(int)}),
        _row("BatchNormBackward", "out_grad data gamma saved [out_grad_2]", _GRADS, _batch_norm_backward, _SINGLE_GRAD),
        _row("BatchNormReluBackward", "out_grad data gamma saved beta [out_grad_2]", _GRADS, _batch_norm_backward,
             _SINGLE_GRAD),
        _row("BatchNormAddReluBackward", "out_grad data gamma saved mask [out_grad_2]", f"{_GRADS} addend_grad",
             _batch_norm_backward, _SINGLE_GRAD),
        _row("ReluBackward", "out_grad output [out_grad_2]", "data_grad", _relu_backward, _SINGLE_GRAD),
        _row("MaxPoolingBackward", "out_grad winner [out_grad_2]", "data_grad", _from_data_shape,
             {**_DATA_SHAPE, **_SINGLE_GRAD}),
        _row("AvgPoolingBackward", "out_grad", "data_grad", _from_data_shape, _DATA_SHAPE),
        _row("FlattenBackward", "out_grad", "data_grad", _from_data_shape, _DATA_SHAPE),
    )
})

TAKES_TWO_GRADIENTS = tuple(name for name, row in OPERATORS.items() if "single_grad" in row.attrs)


def bias_axis(node: Node) -> int:
    """The axis of a Convolution's or FullyConnected's output that its bias runs along."""
    return channel_axis(node["layout"]) if node.op == "Convolution" else -1
