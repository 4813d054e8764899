"""Mixed precision: which tensors of the training step are 16-bit and which stay in fp32."""

from __future__ import annotations

import re

from graph_passes.errors import GraphError
from graph_passes.graph import Graph, Node, Ref
from graph_passes.operators import LOSSES, OPERATORS

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "uint8": 1, "int8": 1, "float8": 1}
DTYPES = ("float16", "bfloat16", "float32")  # types of a network
LOSS_SCALE = "loss_scale"

# Inputs and outputs that keep their dtype in every precision, by their names in the operator table.
_FIXED = {
    **dict.fromkeys(("gamma", "beta", "bias", "gamma_grad", "beta_grad", "bias_grad"), "float32"),
    **dict.fromkeys(("moving_mean", "moving_var", "mean", "var", "saved", "sums"), "float32"),
    **dict.fromkeys(("label", "loss", LOSS_SCALE, "factors", "tokens"), "float32"),
    "seed": "uint32",
    **dict.fromkeys(("top1", "top5"), "int32"),
    **dict.fromkeys(("mask", "winner"), "uint8"),
}


def precision(graph: Graph, dtype: str) -> Graph:
    """Make tensors, convolution and classifier weights, and their gradients 16-bit. This is the only pass that changes
    results in training.

        before    data, weight -> Convolution -> BatchNormReluTrain -> ... -> SoftmaxCrossEntropy(data, label)
        after     the same nodes, each marked dtype=float16; in fp16 also SoftmaxCrossEntropy(data, label, loss_scale)

    `dtype` is "float16", "bfloat16", or "float32", which changes nothing (TF32 is an option of the executor). Run this
    pass after `gradient`; `tensor_dtypes` returns the dtype of each tensor.

    - fp32 throughout: BatchNorm's statistics, gamma, beta, biases, the gradients of these, and everything from the
      logits to the loss. Every sum is taken in fp32.
    - The classifier: its product is 16-bit; softmax reads the logits as fp32 and adds the bias in fp32. MXNet's AMP has
      the same lists (FullyConnected 16-bit, SoftmaxOutput fp32), and NVIDIA's MXNet ResNet casts to fp32 here: fp16
      rounds a logit of 16 by at most 2^-7, which is harmless, but exp and the sum of exps need fp32's range.
    - The 16-bit weights are copies. The optimizer keeps fp32 masters, because a step below half a unit in the last
      place of a 16-bit weight would be lost (Micikevicius et al., arXiv:1710.03740, section 3.1).
    - fp16 only: the gradient at the logits, and so every other gradient, is multiplied by the new input `loss_scale`
      (1,), because gradients of activations fall below fp16's smallest number, 2^-24 (same paper, section 3.2). The
      optimizer divides by the loss scale. bf16 has fp32's range and needs no loss scale.

    Raises GraphError for another dtype.
    """
    if dtype not in DTYPES:
        raise GraphError(f"there is no precision '{dtype}': choose one of {', '.join(DTYPES)}")
    if dtype == "float32":
        return graph
    fixed = {
        ref.node
        for node in graph
        if node.op in OPERATORS
        for role, ref in zip(OPERATORS[node.op].input_names(node), node.inputs, strict=True)
        if role_of(role) in _FIXED
    }
    loss_scale = Node("null", graph.unused_name(LOSS_SCALE))

    def mark(node: Node) -> Node | list[Node]:
        if node.is_variable:
            return node if node.name in fixed else node.with_attrs(dtype=dtype)
        marked = node.with_attrs(dtype=dtype)
        if node.op in LOSSES.values() and dtype == "float16":
            scaled = (*node.inputs, Ref(loss_scale.name))
            return [loss_scale, marked.with_attrs(no_loss_scale=False).replace(inputs=scaled)]
        return marked

    return graph.rewrite(mark)


def tensor_dtypes(graph: Graph) -> dict[Ref, str]:
    """The dtype of every tensor, variables included: a name of NumPy, or "bfloat16"."""
    return {ref: dtype for node in graph for ref, dtype in zip(node.refs(), node_dtypes(node), strict=False)}


def node_dtypes(node: Node) -> list[str]:
    """The dtypes of a node's outputs."""
    own = node.attrs.get("dtype", "float32")
    roles = OPERATORS[node.op].output_names(node) if node.op in OPERATORS else ("output",) * node.num_outputs
    return ["float32" if node.op in LOSSES else _FIXED.get(role_of(role), own) for role in roles]


def role_of(name: str) -> str:
    """The role of an input or output; `saved` for `saved_2`, if an operator has several of a kind."""
    return re.sub(r"_\d$", "", name)
