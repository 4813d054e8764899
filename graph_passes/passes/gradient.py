"""The training step as one graph: forward, loss and the gradient of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graph_passes.errors import GraphError
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import BATCH_NORMS, OPERATORS, Shape, is_relu
from graph_passes.operators_backward import TAKES_TWO_GRADIENTS, bias_axis

Shapes = Mapping[Ref, Shape]
Gradients = dict[str, Ref]  # name of an operator's input -> its gradient


def gradient(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> Graph:
    """Add the backward pass to a training graph that ends in SoftmaxOutput.

        before    data -> Convolution -> BatchNormRelu -> ... -> SoftmaxOutput
        after     data -> Convolution -> BatchNormReluTrain -> ... -> SoftmaxCrossEntropy
                       -> ... -> BatchNormReluBackward -> ConvolutionWgrad

    `shapes` are those of the inputs (`data`, and the label if you like); every other argument is a parameter. Backward
    operators: `graph_passes/operators_backward.py`. Outputs, by the names that `output_names` gives:

    - `loss`, `top1`, `top5`: sums over the batch, (1,). The loss is the cross entropy with smoothed targets
    - each running statistic under its own name: the value after this step
    - `<parameter>_grad`, last layers first: the order in which the backward pass has them ready. A parameter that the
      loss does not depend on (gamma with fix_gamma) has none

    A convolution's weight gradient comes before its data gradient: the data of the forward convolution is free then,
    and the bucket is full earlier. Gradients of a tensor with several readers are added with `elemwise_add`, which the
    pass `gradient_add` moves into the operator that reads the sum.

    Raises GraphError for another last operator, and operators that have no gradient here.
    """
    loss = graph[graph.outputs[0].node]
    if len(graph.outputs) != 1 or loss.op != "SoftmaxOutput":
        raise GraphError(f"the graph ends in {loss.op} '{loss.name}', not in one SoftmaxOutput: add it as the loss")
    sizes = graph.infer_shapes(shapes)
    inputs = {*shapes, loss.inputs[1].node}
    parameters = [name for name in graph.arguments if name not in inputs]
    needed = _needing_gradient(graph, parameters)

    nodes = [_training_variant(graph, node) for node in graph]
    pending = {loss.inputs[0]: [Ref(loss.name)]}  # tensor -> what its readers add to its gradient
    for node in reversed(list(graph)):
        if node.is_variable or Ref(node.name) not in pending:
            continue
        total, sums = _sum(node.name, pending.pop(Ref(node.name)))
        backward, gradients = _RULES[node.op](node, total, sizes)
        nodes += [*sums, *backward]
        for name, ref in zip(OPERATORS[node.op].input_names(node), node.inputs, strict=True):
            if name in gradients and ref.node in needed:
                pending.setdefault(ref, []).append(gradients[name])

    outputs = {name: Ref(loss.name, index) for index, name in enumerate(("loss", "top1", "top5"), start=1)}
    for node in graph:
        if node.op in BATCH_NORMS:
            outputs.update({ref.node: Ref(node.name, index) for index, ref in enumerate(node.inputs[3:5], start=2)})
    for parameter, gradients_of_readers in pending.items():
        total, sums = _sum(parameter.node, gradients_of_readers)
        nodes += sums
        outputs[f"{parameter.node}_grad"] = total
    return Graph(nodes, outputs.values(), {**graph.attrs, "output_names": ["list_str", list(outputs)]})


def output_names(graph: Graph) -> dict[str, Ref]:
    """The outputs of a graph that `gradient` made, by name."""
    return dict(zip(graph.attrs["output_names"][1], graph.outputs, strict=True))


def gradient_add(graph: Graph) -> Graph:
    """Move the sum of two gradients into the operator that reads it.

        before    a, b -> elemwise_add -> BatchNormAddReluBackward
        after     a, b -> BatchNormAddReluBackward(single_grad=False)

    Saves a write and a read of the sum at every residual block. Sums that a convolution or several operators read stay.
    """

    def fuse(node: Node) -> Node | None:
        if node.op not in TAKES_TWO_GRADIENTS or not node["single_grad"]:
            return None
        add = graph.only_used_by_one(node.inputs[0], "elemwise_add")
        if add is None:
            return None
        first, second = add.inputs
        return node.with_attrs(single_grad=False).replace(inputs=(first, *node.inputs[1:], second))

    return graph.rewrite(fuse)


def _needing_gradient(graph: Graph, parameters: Sequence[str]) -> set[str]:
    """Names of the parameters and of the nodes that depend on one."""
    needed = set(parameters)
    for node in graph:
        if any(ref.node in needed for ref in node.inputs):
            needed.add(node.name)
    return needed


def _training_variant(graph: Graph, node: Node) -> Node:
    """The node, or the operator that also leaves what its gradient needs. Keeps the name."""
    where = f"{node.op} '{node.name}'"
    if node.op in BATCH_NORMS:
        if node["use_global_stats"]:
            raise GraphError(f"{where} has use_global_stats=True, which has no gradient here: set it to False")
        if any(Ref(node.name, index) in graph.consumers for index in (1, 2)):
            raise GraphError(f"the mean or variance of {where} is read, which has no gradient here: read output 0 only")
        return node.replace(op=f"{node.op}Train", num_outputs=0)
    if node.op == "Pooling" and node["pool_type"] == "max":
        return node.replace(op="MaxPoolingTrain", num_outputs=0)
    if node.op == "SoftmaxOutput":
        if node["use_ignore"] or node["multi_output"] or node["normalization"] == "valid":
            raise GraphError(f"{where} has use_ignore, multi_output or normalization='valid', which have no gradient "
                             "here: leave them out")
        return node.replace(op="SoftmaxCrossEntropy", num_outputs=0)
    if not node.is_variable and node.op not in _RULES:
        raise GraphError(f"operator {node.op} of node '{node.name}' has no gradient; there are {', '.join(_RULES)}")
    return node


def _sum(name: str, gradients: list[Ref]) -> tuple[Ref, list[Node]]:
    """The sum of all gradients of the tensor `name`, and the nodes that add them up."""
    total, nodes = gradients[0], []
    for number, term in enumerate(gradients[1:], start=1):
        nodes.append(Node("elemwise_add", f"{name}_grad_add{number}", (total, term)))
        total = Ref(nodes[-1].name)
    return total, nodes


# --- one rule per operator: (node, gradient of its output, shapes) -> (backward nodes, gradients of its inputs) ---

_Rule = Callable[[Node, Ref, Shapes], tuple[list[Node], Gradients]]


def _weighted(node: Node, dy: Ref, shapes: Shapes) -> tuple[list[Node], Gradients]:
    """Convolution and FullyConnected."""
    data, weight, *bias = node.inputs
    wgrad = Node(f"{node.op}Wgrad", f"{node.name}_wgrad", (dy, data), node.attrs)
    dgrad = Node(f"{node.op}Dgrad", f"{node.name}_dgrad", (dy, weight), {**node.attrs, "data_shape": shapes[data]})
    nodes, gradients = [wgrad, dgrad], {"weight": Ref(wgrad.name), "data": Ref(dgrad.name)}
    if bias:
        nodes.append(Node("BiasGrad", f"{node.name}_bias_grad", (dy,), {"axis": bias_axis(node)}))
        gradients["bias"] = Ref(nodes[-1].name)
    return nodes, gradients


def _batch_norm(node: Node, dy: Ref, shapes: Shapes) -> tuple[list[Node], Gradients]:
    data, gamma, beta, *_ = node.inputs
    saved, mask = Ref(node.name, 1), Ref(node.name, 4)
    more = {"BatchNorm": (), "BatchNormRelu": (beta,), "BatchNormAddRelu": (mask,)}[node.op]
    backward = Node(f"{node.op}Backward", f"{node.name}_backward", (dy, data, gamma, saved, *more), node.attrs)
    names = ["data", "gamma", "beta", "addend"]
    gradients = {name: Ref(backward.name, index) for index, name in enumerate(names[: backward.num_outputs])}
    if node["fix_gamma"]:
        del gradients["gamma"]
    return [backward], gradients


def _relu(node: Node, dy: Ref, shapes: Shapes) -> tuple[list[Node], Gradients]:
    if node.op == "Activation" and not is_relu(node):
        raise GraphError(f"Activation '{node.name}' ({node['act_type']}) has no gradient here: use relu")
    backward = Node("ReluBackward", f"{node.name}_backward", (dy, Ref(node.name)))
    return [backward], dict.fromkeys(OPERATORS[node.op].inputs, Ref(backward.name))


def _add(node: Node, dy: Ref, shapes: Shapes) -> tuple[list[Node], Gradients]:
    return [], {"lhs": dy, "rhs": dy}


def _pooling(node: Node, dy: Ref, shapes: Shapes) -> tuple[list[Node], Gradients]:
    attrs: dict[str, Any] = {**node.attrs, "data_shape": shapes[node.inputs[0]]}
    if node["pool_type"] in ("avg", "sum"):
        backward = Node("AvgPoolingBackward", f"{node.name}_backward", (dy,), attrs)
    elif node["pool_type"] == "max" and not node["global_pool"]:
        backward = Node("MaxPoolingBackward", f"{node.name}_backward", (dy, Ref(node.name, 1)), attrs)
    else:
        kind = f"pool_type={node['pool_type']}, global_pool={node['global_pool']}"
        raise GraphError(f"Pooling '{node.name}' ({kind}) has no gradient here: use avg, or max over windows")
    return [backward], {"data": Ref(backward.name)}


def _flatten(node: Node, dy: Ref, shapes: Shapes) -> tuple[list[Node], Gradients]:
    backward = Node("FlattenBackward", f"{node.name}_backward", (dy,), {"data_shape": shapes[node.inputs[0]]})
    return [backward], {"data": Ref(backward.name)}


def _transpose(node: Node, dy: Ref, shapes: Shapes) -> tuple[list[Node], Gradients]:
    axes = node["axes"] or tuple(reversed(range(len(shapes[node.inputs[0]]))))
    inverse = tuple(axes.index(axis) for axis in range(len(axes)))
    backward = Node("transpose", f"{node.name}_backward", (dy,), {"axes": inverse})
    return [backward], {"data": Ref(backward.name)}


_RULES: dict[str, _Rule] = {
    "Convolution": _weighted,
    "FullyConnected": _weighted,
    "BatchNorm": _batch_norm,
    "BatchNormRelu": _batch_norm,
    "BatchNormAddRelu": _batch_norm,
    "relu": _relu,
    "Activation": _relu,
    "AddRelu": _relu,
    "elemwise_add": _add,
    "Pooling": _pooling,
    "Flatten": _flatten,
    "transpose": _transpose,
}
