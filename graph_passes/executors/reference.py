"""The executor in NumPy: the oracle for every operator and every fused one, forward and backward. Small shapes only.

It runs the graph as it is given, in any layout, one operator after the other; the arithmetic is in
`reference_operators.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graph_passes.errors import GraphError
from graph_passes.executors import reference_operators as ops
from graph_passes.executors.base import TOP_K, Executor, Metrics, parse_device
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import OPERATORS, is_relu
from graph_passes.operators_backward import bias_axis

Array = np.ndarray
Values = dict[Ref, Array]


class Operation(NamedTuple):
    """`forward(node, inputs, training)` gives the outputs; `backward(node, inputs, outputs, dy, training)` gives the
    gradient of each input, None for inputs that have none. dy is the gradient of the first output."""

    forward: Callable[[Node, Sequence[Array], bool], list[Array]]
    backward: Callable[[Node, Sequence[Array], Sequence[Array], Array, bool], list[Array | None]]


class ReferenceExecutor(Executor):
    """See `base.Executor`; arrays are NumPy's, of `dtype`: "float32" or "float64"."""

    def __init__(
        self, graph: Graph, shapes: Mapping[str, Sequence[int]], device: str = "cpu(0)", dtype: str = "float32"
    ) -> None:
        super().__init__(graph, shapes)
        if parse_device(device)[0] != "cpu":
            raise GraphError(f"the reference executor cannot run on the device '{device}': give cpu(0)")
        sizes = graph.infer_shapes(self.input_shapes)
        self._dtype = np.dtype(dtype)
        arrays = {name: np.zeros(sizes[Ref(name)], self._dtype) for name in graph.variables}
        self.aux = {name: arrays[name] for name in graph.aux}
        self.params = {name: arrays[name] for name in graph.arguments if name not in self.input_shapes}
        self.grads = {name: np.zeros_like(array) for name, array in self.params.items()}
        self._sums = np.zeros(4)  # the fields of Metrics

    def forward_backward(self, data: Any, label: Any, accumulate: bool = False, mixup: float = 1.0) -> None:
        values = self._forward(data, label, training=True, mixup=mixup)
        gradients = backward(self.graph, values)
        for name, grad in self.grads.items():
            grad[...] = gradients.get(Ref(name), 0.0) + (grad if accumulate else 0.0)
        for node in self.graph:
            if not node.is_variable and OPERATORS[node.op].aux:
                for ref, new in zip(node.inputs[3:5], _new_running_statistics(node, values), strict=True):
                    self.aux[ref.node][...] = new
        self._count(values, label, len(label))

    def forward(self, data: Any, label: Any = None) -> Array:
        values = self._forward(data, label, training=False)
        if label is not None:
            self._count(values, label, len(label))
        return values[self.graph.outputs[0]]

    def evaluate(self, data: Any, label: Any, num_valid: int) -> None:
        self._count(self._forward(data, label, training=False), label, num_valid)

    def read_metrics(self) -> Metrics:
        loss_sum, top1, top5, count = self._sums
        self._sums[:] = 0
        return Metrics(float(loss_sum), int(top1), int(top5), int(count))

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def _forward(self, data: Any, label: Any, training: bool, mixup: float = 1.0) -> Values:
        given = {"data": data, "softmax_label": label}
        values: Values = {Ref(name): array for name, array in (self.params | self.aux).items()}
        for name, shape in self.input_shapes.items():
            array = given.get(name)
            array = np.zeros(shape) if array is None else _numpy(array)  # inference does not read the label
            self.check_input(name, array.shape)
            values[Ref(name)] = array.astype(self._dtype)
        if mixup < 1:
            loss = self.graph[self.graph.outputs[0].node]
            scores = self.graph.infer_shapes(self.input_shapes)[loss.inputs[0]]
            values[loss.inputs[1]] = ops.smoothed_targets(loss, values[loss.inputs[1]], scores[1], self._dtype)
            for ref in (Ref("data"), loss.inputs[1]):
                values[ref] = mixup * values[ref] + (1 - mixup) * values[ref][::-1]
        return forward(self.graph, values, training)

    def _count(self, values: Values, label: Any, num_valid: int) -> None:
        """Add the first `num_valid` images of a batch to the metrics."""
        output = self.graph.outputs[0]
        probabilities, label = values[output][:num_valid], _numpy(label)[:num_valid].astype(int)
        node, classes = self.graph[output.node], probabilities.shape[1]
        targets = ops.smoothed_targets(node, values[node.inputs[1]][:num_valid], classes, np.dtype(float))
        loss = -(targets * np.log(np.maximum(probabilities, 1.2e-38))).sum()
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, :TOP_K] == label[:, None]
        self._sums += loss, best[:, 0].sum(), best.sum(), len(label)


def forward(graph: Graph, values: Mapping[Ref, Array], training: bool) -> Values:
    """The outputs of all nodes, from the values of all variables."""
    values = dict(values)
    for node in graph:
        if not node.is_variable:
            outputs = _operation(node).forward(node, [values[ref] for ref in node.inputs], training)
            values.update({Ref(node.name, i): output for i, output in enumerate(outputs)})
    return values


def backward(
    graph: Graph, values: Mapping[Ref, Array], training: bool = True, output_gradient: Array | None = None
) -> Values:
    """Gradients of a loss with regard to all tensors, from the values that `forward` gave.

    `output_gradient` is that of the graph's first output; a SoftmaxOutput, which is its own loss, needs none.
    """
    gradients: dict[Ref, Array] = defaultdict(lambda: np.zeros(()))
    output = graph.outputs[0]
    gradients[output] = np.ones_like(values[output]) if output_gradient is None else output_gradient
    for node in reversed(list(graph)):
        if node.is_variable or Ref(node.name) not in gradients:
            continue
        inputs = [values[ref] for ref in node.inputs]
        outputs = [values[Ref(node.name, i)] for i in range(len(OPERATORS[node.op].outputs))]
        input_gradients = _operation(node).backward(node, inputs, outputs, gradients[Ref(node.name)], training)
        for ref, gradient in zip(node.inputs, input_gradients, strict=True):
            if gradient is not None:
                gradients[ref] = gradients[ref] + gradient
    return dict(gradients)


def _operation(node: Node) -> Operation:
    if node.op not in OPERATIONS:
        known = ", ".join(OPERATIONS)
        raise GraphError(f"the reference executor has no operator {node.op} (node '{node.name}'): it has {known}")
    return OPERATIONS[node.op]


def _numpy(array: Any) -> Array:
    return array.asnumpy() if hasattr(array, "asnumpy") else np.asarray(array)


# --- batch norm and what is fused with it ---


def _statistics(node: Node, inputs: Sequence[Array], training: bool) -> ops.Statistics:
    if training and not node["use_global_stats"]:
        return ops.batch_statistics(node, inputs[0])
    return ops.Statistics(*inputs[3:5])


def _batch_norm(node: Node, inputs: Sequence[Array], training: bool) -> list[Array]:
    x, gamma, beta = inputs[:3]
    statistics = _statistics(node, inputs, training)
    y = ops.batch_norm(node, x, gamma, beta, statistics)
    if node.op == "BatchNormAddRelu":
        y = y + inputs[5]
    return [y if node.op == "BatchNorm" else ops.relu(y), *statistics]


def _batch_norm_backward(
    node: Node, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array, training: bool
) -> list[Array | None]:
    if node.op != "BatchNorm":
        dy = ops.relu_backward(dy, outputs[0])
    from_batch = training and not node["use_global_stats"]
    gradients = ops.batch_norm_backward(node, dy, inputs[0], inputs[1], ops.Statistics(*outputs[1:]), from_batch)
    return [*gradients, None, None, *([dy] if node.op == "BatchNormAddRelu" else [])]


def _new_running_statistics(node: Node, values: Mapping[Ref, Array]) -> ops.Statistics:
    """Running mean and variance of a batch norm after a training step."""
    running = ops.Statistics(*(values[ref] for ref in node.inputs[3:5]))
    if node["use_global_stats"]:
        return running
    return ops.running_statistics(node, running, ops.Statistics(values[Ref(node.name, 1)], values[Ref(node.name, 2)]))


# --- operators with attributes that choose the arithmetic ---


def _convolution_backward(
    node: Node, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array, training: bool
) -> list[Array | None]:
    x, weight = inputs[:2]
    bias = [] if len(inputs) == 2 else [ops.bias_grad(dy, bias_axis(node))]
    return [ops.convolution_dgrad(node, dy, weight, x.shape), ops.convolution_wgrad(node, dy, x), *bias]


def _fully_connected_backward(
    node: Node, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array, training: bool
) -> list[Array | None]:
    x, weight = inputs[:2]
    bias = [] if len(inputs) == 2 else [ops.bias_grad(dy, bias_axis(node))]
    return [ops.fully_connected_dgrad(dy, weight, x.shape), ops.fully_connected_wgrad(node, dy, x), *bias]


def _pooling(node: Node, inputs: Sequence[Array], training: bool) -> list[Array]:
    if node["pool_type"] == "lp":
        raise GraphError(f"Pooling '{node.name}' has pool_type='lp': the reference executor has max, avg and sum")
    return [ops.max_pooling(node, inputs[0])[0] if node["pool_type"] == "max" else ops.avg_pooling(node, inputs[0])]


def _pooling_backward(
    node: Node, inputs: Sequence[Array], outputs: Sequence[Array], dy: Array, training: bool
) -> list[Array | None]:
    (x,) = inputs
    if node["pool_type"] == "max":
        return [ops.max_pooling_backward(node, dy, ops.max_pooling(node, x)[1], x.shape)]
    return [ops.avg_pooling_backward(node, dy, x.shape)]


def _activation(node: Node, inputs: Sequence[Array], training: bool) -> list[Array]:
    if not is_relu(node):
        raise GraphError(f"Activation '{node.name}' has act_type='{node['act_type']}': the reference executor has relu")
    return [ops.relu(inputs[0])]


def _axes(node: Node, x: Array) -> tuple[int, ...]:
    return node["axes"] or tuple(reversed(range(x.ndim)))


_BATCH_NORM = Operation(_batch_norm, _batch_norm_backward)
_RELU = Operation(_activation, lambda node, x, y, dy, training: [ops.relu_backward(dy, y[0])])

OPERATIONS: dict[str, Operation] = {
    "Convolution": Operation(lambda node, x, training: [ops.convolution(node, *x)], _convolution_backward),
    "BatchNorm": _BATCH_NORM,
    "BatchNormRelu": _BATCH_NORM,
    "BatchNormAddRelu": _BATCH_NORM,
    "Activation": _RELU,
    "relu": _RELU,
    "elemwise_add": Operation(lambda node, x, training: [x[0] + x[1]], lambda node, x, y, dy, training: [dy, dy]),
    "AddRelu": Operation(
        lambda node, x, training: [ops.relu(x[0] + x[1])],
        lambda node, x, y, dy, training: [ops.relu_backward(dy, y[0])] * 2,
    ),
    "Pooling": Operation(_pooling, _pooling_backward),
    "FullyConnected": Operation(lambda node, x, training: [ops.fully_connected(node, *x)], _fully_connected_backward),
    "Flatten": Operation(
        lambda node, x, training: [x[0].reshape(len(x[0]), -1)],
        lambda node, x, y, dy, training: [dy.reshape(x[0].shape)],
    ),
    "transpose": Operation(
        lambda node, x, training: [x[0].transpose(_axes(node, x[0]))],
        lambda node, x, y, dy, training: [dy.transpose(np.argsort(_axes(node, x[0])))],
    ),
    "softmax": Operation(
        lambda node, x, training: [ops.softmax(x[0], node["axis"])],
        lambda node, x, y, dy, training: [ops.softmax_backward(dy, y[0], node["axis"])],
    ),
    "SoftmaxOutput": Operation(
        lambda node, x, training: [ops.softmax(x[0])],
        lambda node, x, y, dy, training: [ops.softmax_output_backward(node, y[0], x[1]), None],
    ),
}
