"""LayerNorm over the channels."""

from __future__ import annotations

import ctypes
import math

from graph_passes.executors.cuda.builder import Builder, Launches, require
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import Size, count
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators.joining import axis_of

WARPS, WARP, THREADS = Declarations("layer_norm.cu").values("WARPS", "WARP", "THREADS")


def forward(builder: Builder, node: Node) -> None:
    x, y = builder.input(node, "data"), builder.output(node)
    rows, channels = _rows_and_channels(node, x)
    gamma, beta = builder.input(node, "gamma"), builder.input(node, "beta")
    builder.launch(node, "layer_norm.cu", builder.kernel("layer_norm"), *_grid(rows), In(x), In(gamma), In(beta),
                   Out(y, over=x), Out(builder.output(node, "mean")), Out(builder.output(node, "std")),
                   ctypes.c_float(node["eps"]), count(rows), count(channels))


def backward(builder: Builder, node: Node) -> None:
    dy, x, gamma = (builder.input(node, role) for role in ("out_grad", "data", "gamma"))
    rows, channels = _rows_and_channels(node, x)
    statistics = Buffer(f"{node.name}:statistics", (rows, 2), "float32")
    builder.launch(node, "layer_norm.cu", builder.kernel("layer_norm_backward"), *_grid(rows), In(dy), In(x), In(gamma),
                   Out(builder.output(node, "data_grad")), Out(statistics), ctypes.c_float(node["eps"]), count(rows),
                   count(channels))
    builder.launch(node, "layer_norm.cu", builder.kernel("layer_norm_sums"), (channels, 1, 1), (THREADS, 1, 1), In(dy),
                   In(x), In(statistics), Out(builder.output(node, "gamma_grad")),
                   Out(builder.output(node, "beta_grad")), count(rows), count(channels))


def _grid(rows: int) -> tuple[Size, Size]:
    return (-(-rows // WARPS), 1, 1), (WARPS * WARP, 1, 1)


def _rows_and_channels(node: Node, x: Buffer) -> tuple[int, int]:
    axis = axis_of(node, "axis", len(x.shape))
    require(axis == len(x.shape) - 1, node, f"is along dimension {axis} of {x.shape}: there is a kernel for the last "
            "one, the channels of NHWC")
    return math.prod(x.shape[:-1]), x.shape[-1]


LAUNCHES: Launches = {"LayerNorm": forward, "LayerNormBackward": backward}
