"""The executor in NumPy: the oracle for every operator, fused or not, forward and backward. Small shapes only.

It runs the fully fused graphs of `graph_passes/pipeline.py`, one operator after the other, each by its description in
`graph_passes/operators`. `forward` and `backward` instead run a network as given, without passes and without a graph of
the backward pass. Tests check the passes against these two functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graph_passes import pipeline
from graph_passes.choice import fewest
from graph_passes.errors import GraphError
from graph_passes.executors.base import NO_DRAWS, Draws, Executor, Metrics, parse_device
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import LOSSES, OPERATORS, Operator
from graph_passes.operators.batch_norm import batch_statistics
from graph_passes.operators.dropout import SEED, words_of
from graph_passes.operators.softmax import smoothed_targets
from graph_passes.passes import fold_bn_params, output_names
from graph_passes.passes.quantise import Kept, Scales

Array = np.ndarray
Values = dict[Ref, Array]


class ReferenceExecutor(Executor):
    """Runs a graph in NumPy, as the oracle for the other executors.

    Arrays are of `dtype`: "float32" or "float64". `network_dtype` is the type that the passes see: with "bfloat16" the
    passes include the fusions for 16-bit types, but all operators are computed in `dtype`.
    """

    def __init__(self, graph: Graph, shapes: Mapping[str, Sequence[int]], device: str = "cpu(0)",
                 dtype: str = "float32", network_dtype: str = "float32") -> None:
        super().__init__(graph, shapes)
        if parse_device(device)[0] != "cpu":
            raise GraphError(f"the reference executor cannot run on the device '{device}': give cpu(0)")
        if network_dtype not in ("float32", "bfloat16"):
            raise GraphError(f"the reference executor has no network dtype '{network_dtype}', which would need a loss "
                             "scale: give float32 or bfloat16")
        sizes = graph.infer_shapes(self.input_shapes)
        self._dtype, self._network_dtype = np.dtype(dtype), network_dtype
        arrays = {name: np.zeros(sizes[Ref(name)], self._dtype) for name in graph.variables}
        self.aux = {name: arrays[name] for name in graph.aux}
        self.params = {name: arrays[name] for name in graph.arguments if name not in self.input_shapes}
        self.grads = {name: np.zeros_like(array) for name, array in self.params.items() if name not in self.frozen}
        self._sums = np.zeros(4)  # sums of the fields of Metrics
        self._latest = np.empty((0, 0))  # probabilities of the latest inference
        self._steps: dict[tuple[int, ...], Graph] = {}  # shape of the data -> step graph
        self._inference: Graph | None = None

    def step_graph(self, data_shape: tuple[int, ...]) -> Graph:
        """The graph that `forward_backward` runs for data of this shape."""
        if data_shape not in self._steps:
            shapes = self.input_shapes | {"data": data_shape}
            self._steps[data_shape] = pipeline.training_step(self.graph, shapes, self._network_dtype, fewest)
        return self._steps[data_shape]

    def inference_graph(self) -> Graph:
        """The graph that `infer` runs."""
        if self._inference is None:
            self._inference = pipeline.inference(self.graph, self._network_dtype, fewest)
        return self._inference

    def forward_backward(self, data: Any, label: Any, accumulate: bool = False, draws: Draws = NO_DRAWS) -> None:
        inputs = self._inputs(data, label) | {SEED: words_of(draws.seed)}
        if draws.own_share(*inputs["data"].shape[1:3]) < 1:
            inputs |= self._mixed(inputs, draws)
        params = self.params
        if self.frozen:
            fused = pipeline.run(pipeline.FUSED, self.graph)
            params = params | fold_bn_params(fused, params, self.aux, frozen_only=True)
        results = run(self.step_graph(inputs["data"].shape), params | self.aux | inputs)
        for name, grad in self.grads.items():
            grad[...] = results.get(f"{name}_grad", 0.0) + (grad if accumulate else 0.0)
        for name, statistics in self.aux.items():
            statistics[...] = results.get(name, statistics)
        self._sums += [*(results[name].item() for name in ("loss", "top1", "top5")), len(inputs["data"])]

    def infer(self, data: Any, label: Any = None, num_valid: int = 0) -> None:
        graph = self.inference_graph()
        variables = self._inference_values() | self._inputs(data, label)
        values: Values = {Ref(name): variables[name] for name in graph.variables}
        for node in graph:
            if not node.is_variable:
                values.update(zip(node.refs(), evaluate(node, [values[ref] for ref in node.inputs]), strict=False))
        self._latest = values[graph.outputs[0]]
        if num_valid:
            last = graph[graph.outputs[0].node]
            scores, label, *bias = (values[ref] for ref in last.inputs)
            # class weights are only for training
            counting = last.derive(LOSSES[last.op], last.name, last.inputs, class_weights=())
            _, *sums = evaluate(counting, [scores[:num_valid], label[:num_valid], *bias])
            self._sums += [*(total.item() for total in sums), num_valid]

    def forward(self, data: Any, label: Any = None) -> Array:
        self.infer(data, label, 0 if label is None else len(data))
        return self._latest

    def request_probabilities(self) -> Callable[[], np.ndarray]:
        latest = self._latest.astype(np.float32)
        return lambda: latest

    def read_metrics(self) -> Metrics:
        loss_sum, top1, top5, count = self._sums
        self._sums[:] = 0
        return Metrics(float(loss_sum), int(top1), int(top5), int(count))

    def synchronize(self) -> None:
        """Do nothing: all work is synchronous."""

    def _inputs(self, data: Any, label: Any) -> dict[str, Array]:
        """The inputs of the network by name; inference does not read the label."""
        given, inputs = {"data": data, "softmax_label": label}, {}
        for name, shape in self.input_shapes.items():
            array = given.get(name)
            array = np.zeros(shape) if array is None else _numpy(array)
            self.check_input(name, array.shape)
            inputs[name] = array.astype(self._dtype)
        return inputs

    def _mixed(self, inputs: Mapping[str, Array], draws: Draws) -> dict[str, Array]:
        """Images, and targets (N, classes) in place of labels, each mixed with row n - 1 - i of the batch."""
        loss = self.graph[self.graph.outputs[0].node]
        classes = self.graph.infer_shapes(self.input_shapes)[loss.inputs[0]][1]
        label, data = loss.inputs[1].node, inputs["data"]
        share = draws.own_share(*data.shape[1:3])
        targets = smoothed_targets(loss, inputs[label], classes, self._dtype)
        if draws.cutmix:
            top, left, bottom, right = draws.cutmix
            mixed = data.copy()
            mixed[:, top:bottom, left:right] = data[::-1, top:bottom, left:right]
        else:
            mixed = share * data + (1 - share) * data[::-1]
        return {"data": mixed, label: share * targets + (1 - share) * targets[::-1]}

    def _inference_values(self) -> dict[str, Array]:
        """Values of the variables of `inference_graph`, without its inputs."""
        params = fold_bn_params(pipeline.run(pipeline.FUSED, self.graph), self.params, self.aux)
        return self.params | self.aux | params


class QuantisedExecutor(ReferenceExecutor):
    """Inference in INT8, exact to the bit: the oracle for GPUs, and an executor for users without one.

    Args: graph, shapes: the network and the shapes of its inputs, as for every executor. scales, kept: as in
        `passes/quantise.py`. params: by `quantise_params`.
    """

    def __init__(self, graph: Graph, shapes: Mapping[str, Sequence[int]], scales: Scales, kept: Kept,
                 params: Mapping[str, Array]) -> None:
        super().__init__(graph, shapes)
        self._quantised = pipeline.run(pipeline.quantised_passes("float32", scales, kept), self.graph)
        self._values = dict(params)

    def inference_graph(self) -> Graph:
        return self._quantised

    def _inference_values(self) -> dict[str, Array]:
        return self._values


# --- graphs that the passes have made ---


def run(graph: Graph, variables: Mapping[str, Array]) -> dict[str, Array]:
    """Run a graph of the pass `gradient` or a later pass, in the dtype of the variables. Returns its outputs by
    name."""
    values = {Ref(name): array for name, array in variables.items()}
    for node in graph:
        if not node.is_variable:
            values.update(zip(node.refs(), evaluate(node, [values[ref] for ref in node.inputs]), strict=True))
    return {name: values[ref] for name, ref in output_names(graph).items()}


def evaluate(node: Node, inputs: Sequence[Array]) -> Sequence[Array]:
    """The outputs of one node."""
    return _operator(node).compute(node, *inputs)


# --- networks without passes ---


def forward(graph: Graph, values: Mapping[Ref, Array], training: bool) -> Values:
    """The outputs of all nodes, from the values of all variables. `training`: use the batch's statistics."""
    values = dict(values)
    for node in graph:
        if node.is_variable:
            continue
        operator, inputs = _operator(node), [values[ref] for ref in node.inputs]
        if training and operator.aux and not node["use_global_stats"]:
            inputs[3:5] = batch_statistics(node, inputs[0])
        values.update(zip(node.refs(), operator.compute(node, *inputs), strict=False))
    return values


def backward(graph: Graph, values: Mapping[Ref, Array], training: bool = True,
             output_gradient: Array | None = None) -> Values:
    """Gradients of a loss with respect to all tensors, from the values that `forward` returned.

    `output_gradient`: the gradient of the graph's first output. A SoftmaxOutput is its own loss and needs none.
    """
    gradients: dict[Ref, Any] = defaultdict(float)  # an array containing 0 would turn fp32 into float64
    output = graph.outputs[0]
    gradients[output] = np.ones_like(values[output]) if output_gradient is None else output_gradient
    for node in reversed(list(graph)):
        if node.is_variable or Ref(node.name) not in gradients:
            continue
        rule = _operator(node).numpy_gradient
        if rule is None:
            raise GraphError(f"{node.op} '{node.name}' has no gradient in the reference executor")
        inputs = [values[ref] for ref in node.inputs]
        outputs = [values[Ref(node.name, i)] for i in range(len(OPERATORS[node.op].output_names(node)))]
        for ref, gradient in zip(node.inputs, rule(node, inputs, outputs, gradients[Ref(node.name)], training),
                                 strict=True):
            if gradient is not None:
                gradients[ref] = gradients[ref] + gradient
    return dict(gradients)


def _operator(node: Node) -> Operator:
    if node.op not in OPERATORS:
        raise GraphError(f"the reference executor has no operator {node.op} (node '{node.name}'): it has "
                         f"{', '.join(OPERATORS)}")
    return OPERATORS[node.op]


def _numpy(array: Any) -> Array:
    return array.asnumpy() if hasattr(array, "asnumpy") else np.asarray(array)
