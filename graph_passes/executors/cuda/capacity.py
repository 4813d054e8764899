"""Whether a training step fits into a GPU's memory, and the largest batch that does."""

from __future__ import annotations

from collections.abc import Mapping

from graph_passes.errors import GraphError
from graph_passes.executors.cuda.parameters import ParameterStore, padded_channels
from graph_passes.graph import Graph, Ref
from graph_passes.passes import memory, tensor_dtypes
from graph_passes.passes.precision import ITEM_BYTES

GIB = 2**30
# What a batch may need beyond the planner's arena, relative to it: the lowered step has workspaces of convolutions and
# partial sums besides (6 % in ResNet-18, 1.6 % in ResNet-50), validation has folded weights; and where a batch is
# larger than the loader's, the loader will take more of the same memory.
HEADROOM = 0.15


def check_fits(step: Graph, shapes: Mapping[str, tuple[int, ...]], store: ParameterStore, free: int,
               total: int) -> int:
    """Bytes of the step's arena, but for what single kernels need besides. Raises GraphError where the GPU is certain
    to have too little memory, before kernels are chosen and timed.

    Args:
        step: the training graph, after the passes gradient and precision.
        shapes: of its inputs `data` (NHWC) and `softmax_label`.
        store: the parameters and all else that does not grow with the batch.
        free, total: bytes of the GPU.
    """
    images, height, width, channels = shapes["data"]
    scale = {"loss_scale": (1,)} if "loss_scale" in step.variables else {}
    pixel_bytes = padded_channels(channels) * ITEM_BYTES[tensor_dtypes(step)[Ref("data")]]
    arena_bytes = memory(step, {**shapes, **scale}).arena_bytes
    growing = arena_bytes + images * height * width * pixel_bytes
    fixed = sum(array.num_bytes for array in store.arrays.values())
    if growing + fixed > free:
        raise too_little_memory(shapes["data"], growing, fixed, free, total)
    return arena_bytes


def largest_batch(images: int, growing: int, free: int) -> int:
    """How many images are sure to fit into `free` bytes where `images` need `growing` bytes."""
    return int(max(0, free) * images / (growing * (1 + HEADROOM)))


def too_little_memory(data: tuple[int, ...], growing: int, fixed: int, free: int, total: int) -> GraphError:
    """The error that names the largest batch that is sure to fit. `growing`: bytes that batches of the shape `data`
    need, in proportion to their size; `fixed`: bytes needed besides."""
    images, height, width, _ = data
    largest = largest_batch(images, growing, free - fixed)
    advice = f"use a batch size of at most {largest}" if largest else "free memory on it, or use smaller images"
    return GraphError(f"the GPU has {free / GIB:.1f} of {total / GIB:.1f} GiB free, but batches of {images} images "
                      f"of {height}x{width} need {(growing + fixed) / GIB:.1f} GiB: {advice}")
