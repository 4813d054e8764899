"""Recurrent layers through cuDNN (whole sequences and all layers in one call), and the choice of its algorithm.

    before    RNNTrain, RNNBackward
    after     RNNTrain(algorithm=persist_static), RNNBackward(algorithm=persist_static)

A layer and its backward pass use the same algorithm, because the backward pass reads the algorithm's `reserve`;
inference chooses its own algorithm. Persistent algorithms keep the weights on the chip. These are faster if the weights
fit and the batch has few sequences.
"""

from __future__ import annotations

from collections.abc import Iterator

from graph_passes import operators
from graph_passes.candidates import Candidate, Candidates
from graph_passes.executors.cuda.builder import Builder, Launches
from graph_passes.executors.cuda.operands import In, InOut, Out
from graph_passes.executors.cuda.program import Buffer
from graph_passes.executors.cuda.recurrent import RecurrentPlan, RecurrentProblem
from graph_passes.graph import Node
from graph_passes.operators.rnn import ALGORITHMS, flops


def rnn_algorithm(table: Candidates, layer: Candidate) -> Iterator[Node]:
    """Yield the RNN or RNNTrain with each of the algorithms, which `operators/rnn.py` lists."""
    for algorithm in ALGORITHMS:
        yield layer.node.with_attrs(algorithm=algorithm)


def rnn_backward(table: Candidates, layer: Candidate) -> Iterator[Node]:
    """Yield the backward pass that reads the `reserve` of another RNNTrain with equal results."""
    for other in table.makers(layer.output("output"), "RNNTrain"):
        reserve = other.output("reserve")
        for backward in table.readers(reserve, "RNNBackward"):
            inputs = tuple(layer.output("reserve") if ref == reserve else ref for ref in backward.node.inputs)
            yield backward.node.with_attrs(algorithm=layer["algorithm"]).replace(inputs=inputs)


def forward(builder: Builder, node: Node) -> None:
    plan, training = _plan(builder, node), node.op == "RNNTrain"
    reserve = None
    if training:  # only cuDNN knows the size of `reserve`
        reserve = builder.output(node, "reserve", shape=(-(-plan.reserve_bytes // builder.item_bytes),))
    x, y = builder.input(node, "data"), builder.output(node)
    builder.call(node, "rnn_forward", plan.forward, *_read(builder, node), Out(y),
                 Out(_output(builder, node, "state_output")), Out(_output(builder, node, "statecell_output")),
                 Out(reserve), workspace_bytes=plan.workspace_bytes, flops=flops(node, x.shape))


def backward(builder: Builder, node: Node) -> None:
    """Launch all gradients. The gradients of data and weights each take as many operations as the forward pass."""
    plan = _plan(builder, node)
    reserve = builder.input(node, "reserve")
    # too small only if the node is timed alone; in a step the forward pass has made and filled the buffer
    if reserve.num_bytes < plan.reserve_bytes:
        reserve.shape, reserve.dtype = (plan.reserve_bytes,), "uint8"
    gradients = [Out(_output(builder, node, f"{name}_grad")) for name in ("data", "parameters", "state", "state_cell")]
    builder.call(node, "rnn_backward", plan.backward, In(builder.input(node, "out_grad")), *_read(builder, node),
                 In(builder.input(node, "output")), InOut(reserve), *gradients,
                 workspace_bytes=plan.workspace_bytes, flops=2 * flops(node, builder.input(node, "data").shape))


def _plan(builder: Builder, node: Node) -> RecurrentPlan:
    (steps, sequences, features), (parameters,) = (
        builder.input(node, name).shape for name in ("data", "parameters"))
    return builder.recurrent.plan(RecurrentProblem(
        node["mode"], node["num_layers"], node["bidirectional"], steps, sequences, features, node["state_size"],
        parameters, builder.dtype, training=node.op != "RNN", algorithm=node["algorithm"]))


def _read(builder: Builder, node: Node) -> list[In]:
    """The operands of data, parameters and initial states."""
    names = operators.OPERATORS[node.op].input_names(node)
    return [In(builder.input(node, name) if name in names else None)
            for name in ("data", "parameters", "state", "state_cell")]


def _output(builder: Builder, node: Node, role: str) -> Buffer | None:
    """The output's buffer; None if the node has no such output."""
    return builder.output(node, role) if role in operators.OPERATORS[node.op].output_names(node) else None


RULES = (("RNN", rnn_algorithm), ("RNNTrain", rnn_algorithm), ("RNNTrain", rnn_backward))
LAUNCHES: Launches = {"RNN": forward, "RNNTrain": forward, "RNNBackward": backward}
