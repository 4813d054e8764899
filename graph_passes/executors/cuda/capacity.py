"""Checks whether a training step fits into a GPU's memory and the kernels' 32-bit indices, and finds the largest batch
that fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from graph_passes.errors import CapacityError
from graph_passes.executors.cuda.parameters import ParameterStore, padded_channels
from graph_passes.graph import Graph, Ref
from graph_passes.operators import Shape
from graph_passes.passes import memory, tensor_dtypes
from graph_passes.passes.precision import ITEM_BYTES

GIB = 2**30
# Memory that a batch may need beyond the planner's arena, as a share of the arena. The lowered step also has workspaces
# of convolutions and partial sums (6 % in ResNet-18, 1.6 % in ResNet-50), and validation has folded weights. A batch
# larger than the present one also takes more memory in the loader.
HEADROOM = 0.15
# Most elements of one tensor. Kernels index elements with 32 bits, some of them signed, and cuDNN has failed with more
# elements (pytorch/pytorch, issue 95024 and pull request 134890). ResNet-50 reaches this limit after 2,674 images of
# 224 pixels.
MAX_ELEMENTS = 2**31 - 1


def check_sizes(shapes: Mapping[Ref, Shape]) -> None:
    """Raise GraphError for a tensor with more elements than the kernels can index."""
    for ref, shape in shapes.items():
        if math.prod(shape) > MAX_ELEMENTS:
            raise CapacityError(f"'{ref.node}' has {math.prod(shape):,} elements {tuple(shape)}, more than the "
                                f"{MAX_ELEMENTS:,} of the cuda executor: use a smaller batch size, or smaller images")


def most_images(step: Graph, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The largest batch whose tensors the kernels can all index, for images of the size in `shapes`. Arguments as for
    `check_fits`."""
    data = shapes["data"]
    sizes = [math.prod(data[:-1]) * padded_channels(data[-1])]
    for ref, shape in step.infer_shapes(_inputs(step, shapes)).items():
        if shape and shape[0] == data[0] and not (step[ref.node].is_variable and ref.node not in shapes):
            sizes.append(math.prod(shape))
    return MAX_ELEMENTS // (max(sizes) // data[0])


def check_fits(step: Graph, shapes: Mapping[str, tuple[int, ...]], store: ParameterStore, free: int,
               total: int) -> int:
    """Bytes of the step's arena, without the workspaces of single kernels. Raises CapacityError, before any kernel is
    chosen and timed, if the GPU certainly has too little memory or the batch is too large for the kernels.

    Args: step: the training graph, after the passes gradient and precision. shapes: the shapes of the graph's inputs
        `data` (NHWC) and `softmax_label`. store: the parameters and everything else that does not grow with the batch.
        free, total: free and total bytes of the GPU's memory.
    """
    images, height, width, channels = shapes["data"]
    pixel_bytes = padded_channels(channels) * ITEM_BYTES[tensor_dtypes(step)[Ref("data")]]
    arena_bytes = memory(step, _inputs(step, shapes)).arena_bytes
    growing = arena_bytes + images * height * width * pixel_bytes
    fixed = sum(array.num_bytes for array in store.arrays.values())
    most = most_images(step, shapes)
    if growing + fixed > free:
        raise too_little_memory(shapes["data"], growing, fixed, free, total, most)
    if images > most:
        raise CapacityError(f"batches of {images} images of {height}x{width} make a tensor of more than "
                            f"{MAX_ELEMENTS:,} elements, the limit of the cuda executor: use a "
                            f"batch size of at most {most}")
    return arena_bytes


def _inputs(step: Graph, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the step graph's inputs that cannot be inferred."""
    return {**shapes, **({"loss_scale": (1,)} if "loss_scale" in step.variables else {})}


def largest_batch(images: int, growing: int, free: int, most: int) -> int:
    """The number of images that certainly fit into `free` bytes if `images` of them need `growing` bytes; at most
    `most`."""
    return min(most, int(max(0, free) * images / (growing * (1 + HEADROOM))))


def too_little_memory(data: tuple[int, ...], growing: int, fixed: int, free: int, total: int,
                      most: int) -> CapacityError:
    """The error that names the largest batch that certainly fits. `growing`: bytes that batches of the shape `data`
    need, in proportion to their size; `fixed`: bytes needed in addition, for any batch; `most`: the largest number of
    images that the kernels can index.
    """
    images, height, width, _ = data
    largest = largest_batch(images, growing, free - fixed, most)
    advice = f"use a batch size of at most {largest}" if largest else "free memory on it, or use smaller images"
    return CapacityError(f"the GPU has {free / GIB:.1f} of {total / GIB:.1f} GiB free, but batches of {images} images "
                         f"of {height}x{width} need {(growing + fixed) / GIB:.1f} GiB: {advice}")
