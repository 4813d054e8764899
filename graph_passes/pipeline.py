"""From a network to the graph that runs: the ordered lists of passes, used by every caller.

    step = training_step(graph, {"data": (256, 224, 224, 3), "softmax_label": (256,)}, "float16", fewest)
    network = inference(graph, "float16", fewest)

The passes of a list rewrite the graph, one after the other. The pass `cover` fuses: it lists all candidates by the
rules of the kernels (`executors/cuda/kernels/`) and takes the candidates of the least total price (`cover.py`), so the
order of the rules does not matter. Executors, the memory check, `python -m graph_passes show` and the tests call these
functions. A new pass needs one line in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from graph_passes import passes
from graph_passes.candidates import Candidates
from graph_passes.choice import Price, covered, fewest, limited
from graph_passes.executors.cuda.kernels import RULES
from graph_passes.executors.cuda.kernels.batch_norm_pair import always_paired
from graph_passes.executors.cuda.kernels.batch_norm_relu_max_pool import batch_norm_relu_max_pool
from graph_passes.graph import Graph, Ref
from graph_passes.operators import Shape
from graph_passes.passes.compact_grad import compact_grad
from graph_passes.passes.conv_epilogue import conv_epilogue, saturate_clip
from graph_passes.passes.group_mean import group_mean
from graph_passes.passes.quantise import CLASSIFIER_KEPT, Kept, Scales, quantise
from graph_passes.passes.quantise_squares import quantise_squares
from graph_passes.passes.softmax_bias import softmax_bias
from graph_passes.passes.split_norm import split_norm
from graph_passes.passes.zero_bias_grad import zero_bias_grad

Pass = Callable[[Graph], Graph]
Shapes = Mapping[str, Sequence[int]]  # shapes of the inputs
# Passes of both lists: fusions of a network's operators.
FUSED: Mapping[str, Pass] = {"bn_add_relu": passes.bn_add_relu, "bn_relu": passes.bn_relu, "add_relu": passes.add_relu}
# In a network in INT8, convolutions that stay in floats are not fused.
OF_SEVERAL = ("StemPool", "Conv1x1ForwardSumRelu", "Conv1x1Pair")

def training_passes(shapes: Shapes, dtype: str, price: Price, grouped: bool = False) -> dict[str, Pass]:
    """The passes of `training_step` by name, in order."""
    listed: dict[str, Pass] = {
        "draw_masks": lambda graph: passes.draw_masks(graph, shapes["data"][0]),
        **FUSED,
        "layer_scale": passes.layer_scale,
        "fold_frozen": passes.fold_frozen,
        "gradient": lambda graph: passes.gradient(graph, shapes),
        "gradient_add": passes.gradient_add,
        "precision": lambda graph: passes.precision(graph, dtype),
        "softmax_bias": softmax_bias,
        "zero_bias_grad": lambda graph: zero_bias_grad(graph, shapes),
        "split_norm": split_norm,
        "batch_norm_relu_max_pool": batch_norm_relu_max_pool,
        "compact_grad": compact_grad,
        "conv_epilogue": conv_epilogue,  # gradients of frozen parameters, and of biases
        "cover": lambda graph: cover(graph, always_paired(price) if grouped else price, graph.infer_shapes(shapes)),
    }
    return listed | ({"group_mean": group_mean} if grouped else {})


def inference_passes(dtype: str, price: Price) -> dict[str, Pass]:
    """The passes of `inference` by name, in order."""
    return {
        "remove_dropout": passes.remove_dropout,
        **FUSED,
        "layer_scale": passes.layer_scale,
        "fold_bn": passes.fold_bn,
        "precision": lambda graph: passes.precision(graph, dtype),
        "softmax_bias": softmax_bias,
        "conv_epilogue": conv_epilogue,
        "cover": lambda graph: cover(graph, price),
    }


def quantised_passes(dtype: str, scales: Scales, kept: Kept = CLASSIFIER_KEPT) -> dict[str, Pass]:
    """The passes of inference in INT8 by name, in order. `dtype`: the type of layers that stay in floats. Convolutions
    are quantised one by one.
    """
    listed: dict[str, Pass] = {
        **inference_passes(dtype, fewest),
        "conv_epilogue": lambda graph: conv_epilogue(saturate_clip(graph), groups=True),
        "quantise": lambda graph: quantise(graph, scales, kept),
    }
    return {name: each for name, each in listed.items() if name not in ("layer_scale", "cover")}


def gpu_quantised_passes(dtype: str, scales: Scales, kept: Kept, price: Price) -> dict[str, Pass]:
    """The passes of inference in INT8 on a GPU: the integers do not change, but tensors get the forms that the GPU's
    kernels read.
    """
    return {
        **quantised_passes(dtype, scales, kept),
        "quantise_squares": quantise_squares,
        "cover": lambda graph: cover(graph, limited(price, lambda each: each.op not in OF_SEVERAL)),
    }


def candidates(graph: Graph, shapes: Mapping[Ref, Shape] | None = None) -> Candidates:
    """All candidates for the tensors of a graph that is not fused yet. `shapes`: the shapes of the graph's tensors;
    without shapes, rules that depend on shapes find nothing.
    """
    table = Candidates(graph, shapes or {})
    table.apply(RULES)
    return table


def cover(graph: Graph, price: Price, shapes: Mapping[Ref, Shape] | None = None) -> Graph:
    """The graph of the candidates with the least total price."""
    return covered(candidates(graph, shapes), price)


def training_step(graph: Graph, shapes: Shapes, dtype: str, price: Price, grouped: bool = False) -> Graph:
    """Forward, loss and backward of a training graph, in the form that runs.

    Args:
        graph: a network in NHWC that ends in SoftmaxOutput.
        shapes: the shapes of the inputs: `data` (N, H, W, C), and optionally the label.
        dtype: the type of the tensors: "float16", "bfloat16" or "float32".
        price: gives the price of each candidate; on a GPU the price is the time (`choice.py`).
        grouped: BatchNorm's statistics are shared with other GPUs.

    Raises GraphError if the network cannot be trained.
    """
    return run(training_passes(shapes, dtype, price, grouped), graph)


def inference(graph: Graph, dtype: str, price: Price) -> Graph:
    """The forward pass with running statistics, in the form that runs, with the parameters of `fold_bn_params`."""
    return run(inference_passes(dtype, price), graph)


def run(listed: Mapping[str, Pass], graph: Graph) -> Graph:
    """Run the passes one after the other."""
    for each in listed.values():
        graph = each(graph)
    return graph
