"""Geometry shared by stem_forward.cu and stem_pool.cu (stem_rows.cuh): how images are divided."""

from __future__ import annotations

import math

from graph_passes.executors.cuda.builder import Builder, require, require_hopper
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size
from graph_passes.executors.cuda.kernels.stem import FILTERS
from graph_passes.graph import Node
from graph_passes.operators import Shape

_CUDA = Declarations("stem_rows.cuh")


class StemRows:
    """How the kernels of stem_rows.cuh divide their work: into strips of rows of their output. A block has three teams
    of warps; each team computes one strip at a time."""

    BLOCK: Size = (_CUDA.value("THREADS"), 1, 1)
    TEAMS = _CUDA.value("TEAMS")
    MAX_WIDTH = 2 * _CUDA.value("WIDTH")  # pixels of an image row
    ROWS = 1  # convolution rows per output row
    SHARED_BYTES = Declarations("stem_forward.cu").sizeof("Shared")

    def __init__(self, shape: Shape, num_multiprocessors: int) -> None:
        """`shape`: the shape of the output, (N, H, W, 64)."""
        images, height, _, _ = shape

        def rows_in_turn(strips: int) -> int:
            """Convolution rows that the busiest team computes; each strip costs one row more."""
            rounds = -(-images * strips // (self.TEAMS * num_multiprocessors))
            return rounds * (self.ROWS * -(-height // strips) + 1)

        strips = min(range(1, height + 1), key=rows_in_turn)
        self.strip = -(-height // strips)
        items = images * -(-height // self.strip)
        self.grid: Size = (min(num_multiprocessors, -(-items // self.TEAMS)), 1, 1)
        self.tiling = Tiling.of_matrix(math.prod(shape[:3]), FILTERS, (shape[2], FILTERS))


def require_rows(builder: Builder, node: Node, images: Shape) -> None:
    """Raise GraphError if the kernels of stem_rows.cuh do not support the GPU or these images."""
    require_hopper(builder, node)
    _, _, width, channels = images
    require(width % 2 == 0 and width <= StemRows.MAX_WIDTH and channels == 4, node,
            f"reads images of {channels} channels and {width} pixels' width: its kernel takes 4 and, if even, up to "
            f"{StemRows.MAX_WIDTH}")
