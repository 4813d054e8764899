"""Passes: pure functions from a graph to a graph, one per file. Only `precision` and `quantise` change results.

Passes change what is computed, or only its form. A fusion that only some devices support is not a pass but a rule
beside its kernel (`executors/cuda/kernels/`); the pass `cover` of `pipeline.py` chooses among these.
"""

from graph_passes.passes.add_relu import add_relu
from graph_passes.passes.bn_add_relu import bn_add_relu
from graph_passes.passes.bn_relu import bn_relu
from graph_passes.passes.draw_masks import draw_masks
from graph_passes.passes.dropout import dropout
from graph_passes.passes.fold_bn import fold_bn, fold_bn_params, fold_frozen, foldings
from graph_passes.passes.freeze import BACKBONE, freeze, slow_backbone
from graph_passes.passes.gradient import gradient, gradient_add, output_names
from graph_passes.passes.layer_scale import layer_scale
from graph_passes.passes.layout import layout, reading_nhwc, weight_layouts
from graph_passes.passes.loss import binary_cross_entropy, custom_loss, stock_loss, weigh_classes
from graph_passes.passes.memory import MemoryPlan, memory
from graph_passes.passes.precision import precision, tensor_dtypes
from graph_passes.passes.remove_dropout import remove_dropout
from graph_passes.passes.stochastic_depth import stochastic_depth
from graph_passes.passes.unfuse import unfuse

__all__ = [
    "BACKBONE",
    "MemoryPlan",
    "add_relu",
    "binary_cross_entropy",
    "bn_add_relu",
    "bn_relu",
    "custom_loss",
    "draw_masks",
    "dropout",
    "fold_bn",
    "fold_bn_params",
    "fold_frozen",
    "foldings",
    "freeze",
    "gradient",
    "gradient_add",
    "layer_scale",
    "layout",
    "memory",
    "output_names",
    "precision",
    "reading_nhwc",
    "remove_dropout",
    "slow_backbone",
    "stochastic_depth",
    "stock_loss",
    "tensor_dtypes",
    "unfuse",
    "weigh_classes",
    "weight_layouts",
]
