"""Passes: pure functions from a graph to a graph, one a file. Only `precision` changes what is computed."""

from graph_passes.passes.add_relu import add_relu
from graph_passes.passes.bn_add_relu import bn_add_relu
from graph_passes.passes.bn_relu import bn_relu
from graph_passes.passes.choice import Choose, Ways, first_way, fused_way
from graph_passes.passes.conv_epilogue import conv_epilogue
from graph_passes.passes.conv_statistics import conv_statistics
from graph_passes.passes.dgrad_reduce import dgrad_reduce
from graph_passes.passes.fold_bn import fold_bn, fold_bn_params, foldings
from graph_passes.passes.gradient import gradient, gradient_add, output_names
from graph_passes.passes.group_mean import group_mean
from graph_passes.passes.layout import layout, weight_layouts
from graph_passes.passes.memory import MemoryPlan, memory
from graph_passes.passes.norm_backward import norm_backward
from graph_passes.passes.norm_pair import norm_pair
from graph_passes.passes.norm_pool import norm_pool
from graph_passes.passes.precision import precision, tensor_dtypes
from graph_passes.passes.softmax_bias import softmax_bias
from graph_passes.passes.split_norm import split_norm
from graph_passes.passes.stem import stem
from graph_passes.passes.unfuse import unfuse
from graph_passes.passes.zero_bias_grad import zero_bias_grad

__all__ = [
    "Choose",
    "MemoryPlan",
    "Ways",
    "add_relu",
    "bn_add_relu",
    "bn_relu",
    "conv_epilogue",
    "conv_statistics",
    "dgrad_reduce",
    "first_way",
    "fold_bn",
    "fold_bn_params",
    "foldings",
    "fused_way",
    "gradient",
    "gradient_add",
    "group_mean",
    "layout",
    "memory",
    "norm_backward",
    "norm_pair",
    "norm_pool",
    "output_names",
    "precision",
    "softmax_bias",
    "split_norm",
    "stem",
    "tensor_dtypes",
    "unfuse",
    "weight_layouts",
    "zero_bias_grad",
]
