"""From a network to the graph that runs: the two ordered lists of passes that everybody uses.

    step = training_step(graph, {"data": (256, 224, 224, 3), "softmax_label": (256,)}, "float16", fused_way)
    network = inference(graph, "float16", fused_way)

Executors, the memory check, `python -m graph_passes show` and the tests call these two. To add a pass is one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from graph_passes import passes
from graph_passes.graph import Graph, Node
from graph_passes.passes.choice import Choose, Ways, fused_way
from graph_passes.passes.compact_grad import compact_grad
from graph_passes.passes.conv1x1_pair import conv1x1_pair
from graph_passes.passes.conv1x1_sum import conv1x1_sum
from graph_passes.passes.conv3x3 import conv3x3_dgrad
from graph_passes.passes.conv3x3_wgrad import conv3x3_wgrad
from graph_passes.passes.conv_epilogue import conv_epilogue
from graph_passes.passes.conv_statistics import conv_statistics
from graph_passes.passes.dgrad_reduce import dgrad_reduce
from graph_passes.passes.group_mean import group_mean
from graph_passes.passes.norm_backward import norm_backward
from graph_passes.passes.norm_conv import norm_conv1x1, norm_conv3x3, unread_output
from graph_passes.passes.norm_dgrad import norm_dgrad
from graph_passes.passes.norm_grad_add import norm_grad_add
from graph_passes.passes.norm_pair import norm_pair
from graph_passes.passes.norm_pool import norm_pool
from graph_passes.passes.quantise import CLASSIFIER_KEPT, Kept, Scales, quantise
from graph_passes.passes.quantise_squares import quantise_squares
from graph_passes.passes.quantised_pair import quantised_pair
from graph_passes.passes.quantised_stem_pool import quantised_stem_pool
from graph_passes.passes.quantised_sum import quantised_sum
from graph_passes.passes.quantised_way import quantised_way
from graph_passes.passes.rnn_algorithm import rnn_algorithm
from graph_passes.passes.softmax_bias import softmax_bias
from graph_passes.passes.split_norm import split_norm
from graph_passes.passes.stem import stem
from graph_passes.passes.stem_pool import stem_pool
from graph_passes.passes.zero_bias_grad import zero_bias_grad

Pass = Callable[[Graph], Graph]
Shapes = Mapping[str, Sequence[int]]  # of the inputs
OF_SEVERAL = ("stem_pool", "conv1x1_sum", "conv1x1_pair")  # passes that fuse a convolution with more than its epilogue
# What is in both: fusions of operators of the network.
FUSED: Mapping[str, Pass] = {"bn_add_relu": passes.bn_add_relu, "bn_relu": passes.bn_relu, "add_relu": passes.add_relu}


def training_passes(shapes: Shapes, dtype: str, choose: Choose, grouped: bool = False) -> dict[str, Pass]:
    """The passes of `training_step` by name, in order."""
    listed: dict[str, Pass] = {
        "draw_masks": lambda graph: passes.draw_masks(graph, shapes["data"][0]),
        **FUSED,
        "fold_frozen": passes.fold_frozen,
        "gradient": lambda graph: passes.gradient(graph, shapes),
        "gradient_add": passes.gradient_add,
        "precision": lambda graph: passes.precision(graph, dtype),
        "softmax_bias": softmax_bias,
        "zero_bias_grad": lambda graph: zero_bias_grad(graph, shapes),
        "split_norm": split_norm,
        "norm_pair": norm_pair,
        "norm_pool": norm_pool,
        "stem": lambda graph: stem(graph, shapes, choose),
        "conv_statistics": lambda graph: conv_statistics(graph, choose),
        "norm_conv1x1": lambda graph: norm_conv1x1(graph, choose),
        "norm_conv3x3": lambda graph: norm_conv3x3(graph, choose),
        "stem_pool": lambda graph: stem_pool(graph, choose),  # this and the next three: what is frozen, and biases
        "conv_epilogue": lambda graph: conv_epilogue(graph, choose),
        "conv1x1_sum": lambda graph: conv1x1_sum(graph, choose),
        "conv1x1_pair": lambda graph: conv1x1_pair(graph, choose),
        "compact_grad": compact_grad,
        "dgrad_reduce": lambda graph: dgrad_reduce(graph, choose),
        "conv3x3_dgrad": lambda graph: conv3x3_dgrad(graph, choose),  # its BatchNorm's second half is for the next
        "norm_backward": lambda graph: norm_backward(graph, choose),
        "norm_dgrad": lambda graph: norm_dgrad(graph, choose),
        "conv3x3_wgrad": lambda graph: conv3x3_wgrad(graph, shapes, choose),
        "norm_grad_add": norm_grad_add,
        "unread_output": unread_output,
        "rnn_algorithm": lambda graph: rnn_algorithm(graph, choose),
    }
    return listed | ({"group_mean": group_mean} if grouped else {})


def inference_passes(dtype: str, choose: Choose) -> dict[str, Pass]:
    """The passes of `inference` by name, in order."""
    return {
        "remove_dropout": passes.remove_dropout,
        **FUSED,
        "fold_bn": passes.fold_bn,
        "precision": lambda graph: passes.precision(graph, dtype),
        "softmax_bias": softmax_bias,
        "stem_pool": lambda graph: stem_pool(graph, choose),
        "conv_epilogue": lambda graph: conv_epilogue(graph, choose),
        "conv1x1_sum": lambda graph: conv1x1_sum(graph, choose),
        "conv1x1_pair": lambda graph: conv1x1_pair(graph, choose),
        "rnn_algorithm": lambda graph: rnn_algorithm(graph, choose),
    }


def quantised_passes(dtype: str, scales: Scales, kept: Kept = CLASSIFIER_KEPT) -> dict[str, Pass]:
    """The passes of inference in INT8 by name, in order; `dtype` is that of what stays in floats."""
    return {
        **inference_passes(dtype, fused_way),
        **dict.fromkeys(OF_SEVERAL, lambda graph: graph),  # convolutions are quantised one by one
        "conv_epilogue": lambda graph: conv_epilogue(graph, fused_way, groups=True),
        "quantise": lambda graph: quantise(graph, scales, kept),
    }


def gpu_quantised_passes(dtype: str, scales: Scales, kept: Kept, choose: Choose) -> dict[str, Pass]:
    """Those of inference in INT8 on a GPU: the same integers, in the forms that its kernels take."""

    def of_floats(graph: Graph, node: Node, ways: Ways) -> str:
        """Where a way depends on the device: for a convolution that stays in floats. `quantise` takes fused ones."""
        stays = kept.first and graph[node.inputs[0].node].is_variable
        return (choose if stays else fused_way)(graph, node, ways)

    return {
        **quantised_passes(dtype, scales, kept),
        "conv_epilogue": lambda graph: conv_epilogue(graph, of_floats, groups=True),
        "quantise_squares": quantise_squares,
        "quantised_way": lambda graph: quantised_way(graph, choose),
        "quantised_stem_pool": lambda graph: quantised_stem_pool(graph, choose),
        "quantised_sum": lambda graph: quantised_sum(graph, choose),
        "quantised_pair": lambda graph: quantised_pair(graph, choose),
    }


def training_step(graph: Graph, shapes: Shapes, dtype: str, choose: Choose, grouped: bool = False) -> Graph:
    """Forward, loss and backward of a training graph, as it will run.

    Args:
        graph: a network in NHWC that ends in SoftmaxOutput.
        shapes: of its inputs: `data` (N, H, W, C), and the label if you like.
        dtype: of its tensors: "float16", "bfloat16" or "float32".
        choose: answers where it depends on the device which way is faster (`passes/choice.py`).
        grouped: BatchNorm's statistics are shared with other GPUs.

    Raises GraphError for what cannot be trained.
    """
    return run(training_passes(shapes, dtype, choose, grouped), graph)


def inference(graph: Graph, dtype: str, choose: Choose) -> Graph:
    """The forward pass with running statistics, as it will run, with the parameters that `fold_bn_params` gives."""
    return run(inference_passes(dtype, choose), graph)


def run(listed: Mapping[str, Pass], graph: Graph) -> Graph:
    """The passes, one after the other."""
    for each in listed.values():
        graph = each(graph)
    return graph
