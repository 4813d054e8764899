"""The training step as one graph: forward, loss and the gradient of every parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes import roles
from graph_passes.errors import GraphError
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import BATCH_NORMS, LOSSES, OPERATORS
from graph_passes.operators.dropout import SEED


def gradient(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> Graph:
    """Add the backward pass to a training graph that ends in SoftmaxOutput, or SigmoidOutput.

        before    data -> Convolution -> BatchNormRelu -> ... -> SoftmaxOutput
        after     data -> Convolution -> BatchNormReluTrain -> ... -> SoftmaxCrossEntropy
                       -> ... -> BatchNormReluBackward -> ConvolutionWgrad

    `shapes`: the shapes of the inputs (`data`, optionally the label); every other argument is a parameter. Each
    operator's gradient is in its description (`graph_passes/operators`). Outputs, with the names from `output_names`:

    - `loss`, `top1`, `top5`: sums over the batch, (1,). The loss is the (binary) cross entropy with smoothed targets
    - each running statistic under its own name: the value after this step
    - `<parameter>_grad`, last layers first: the order in which the backward pass completes them. A parameter that the
      loss does not depend on (gamma with fix_gamma) has none

    Layers before the first trained layer are computed as in inference: no gradient reaches frozen layers (`freeze`).

    A convolution's weight gradient comes before its data gradient: the memory of the forward convolution's data is then
    free earlier, and the bucket is full earlier. Gradients of a tensor with several readers are added with
    `elemwise_add`, which the pass `gradient_add` moves into the operator that reads the sum.

    Raises GraphError for another last operator, and operators that have no gradient here.
    """
    loss = graph[graph.outputs[0].node]
    if len(graph.outputs) != 1 or loss.op not in LOSSES:
        raise GraphError(f"the graph ends in {loss.op} '{loss.name}', not in one SoftmaxOutput: add it as the loss")
    sizes = graph.infer_shapes(shapes)
    inputs = {*shapes, loss.inputs[1].node, SEED}
    parameters = [name for name in graph.arguments if name not in inputs | roles.frozen(graph)]
    needed = _needing_gradient(graph, parameters)

    nodes = [_training_variant(graph, node) if node.name in needed else node for node in graph]
    pending = {loss.inputs[0]: [Ref(loss.name)]}  # tensor -> gradients from each reader of the tensor
    for node in reversed(list(graph)):
        if node.is_variable or Ref(node.name) not in pending:
            continue
        total, sums = _sum(node.name, pending.pop(Ref(node.name)))
        rule = OPERATORS[node.op].gradient
        assert rule, node.op  # checked by `_training_variant`
        backward, of_inputs = rule(node, total, sizes)
        nodes += [*sums, *backward]
        for name, ref in zip(OPERATORS[node.op].input_names(node), node.inputs, strict=True):
            if name in of_inputs and ref.node in needed:
                pending.setdefault(ref, []).append(of_inputs[name])

    outputs = {name: Ref(loss.name, index) for index, name in enumerate(("loss", "top1", "top5"), start=1)}
    for node in graph:
        if node.op in BATCH_NORMS and node.name in needed:
            outputs.update({ref.node: Ref(node.name, index) for index, ref in enumerate(node.inputs[3:5], start=2)})
    for parameter, gradients_of_readers in pending.items():
        total, sums = _sum(parameter.node, gradients_of_readers)
        nodes += sums
        outputs[f"{parameter.node}_grad"] = total
    return Graph(nodes, outputs.values(), {**graph.attrs, "output_names": ["list_str", list(outputs)]})


def output_names(graph: Graph) -> dict[str, Ref]:
    """The outputs of a graph from `gradient`, by name."""
    return dict(zip(graph.attrs["output_names"][1], graph.outputs, strict=True))


def gradient_add(graph: Graph) -> Graph:
    """Move the sum of two gradients into the operator that reads it.

        before    a, b -> elemwise_add -> BatchNormAddReluBackward
        after     a, b -> BatchNormAddReluBackward(single_grad=False)

    This saves a write and a read of the sum at every residual block. Sums read by a convolution or by several operators
    stay.
    """

    def fuse(node: Node) -> Node | None:
        if not node.get("single_grad", False):
            return None
        add = graph.only_used_by_one(node.inputs[0], "elemwise_add")
        if add is None:
            return None
        first, second = add.inputs
        return node.with_attrs(single_grad=False).replace(inputs=(first, *node.inputs[1:], second))

    return graph.rewrite(fuse)


def _needing_gradient(graph: Graph, parameters: Sequence[str]) -> set[str]:
    """Names of the parameters, and of all nodes that depend on a parameter."""
    needed = set(parameters)
    for node in graph:
        if any(ref.node in needed for ref in node.inputs):
            needed.add(node.name)
    return needed


def _training_variant(graph: Graph, node: Node) -> Node:
    """The node, or the node's training variant, which also outputs the tensors that the gradient needs. The name does
    not change.
    """
    if node.is_variable:
        return node
    if node.op in BATCH_NORMS and any(Ref(node.name, index) in graph.consumers for index in (1, 2)):
        raise GraphError(f"the mean or variance of {node.op} '{node.name}' is read, which has no gradient here: read "
                         "output 0 only")
    if node.op == "RNN" and any(ref in graph.consumers for ref in node.refs()[1:]):
        raise GraphError(f"the last state of RNN '{node.name}' is read, which has no gradient here: read output 0 only")
    operator = OPERATORS.get(node.op)
    if operator and operator.training:
        return node.replace(op=operator.training(node), num_outputs=0)
    if operator is None or operator.gradient is None:
        known = [name for name, each in OPERATORS.items() if each.gradient]
        raise GraphError(f"operator {node.op} of node '{node.name}' has no gradient; there are {', '.join(known)}")
    return node


def _sum(name: str, gradients: list[Ref]) -> tuple[Ref, list[Node]]:
    """The sum of all gradients of the tensor `name`, and the nodes that add them."""
    total, nodes = gradients[0], []
    for number, term in enumerate(gradients[1:], start=1):
        nodes.append(Node("elemwise_add", f"{name}_grad_add{number}", (total, term)))
        total = Ref(nodes[-1].name)
    return total, nodes
