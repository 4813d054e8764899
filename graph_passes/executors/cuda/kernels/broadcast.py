"""Products and sums of two tensors, of one shape or of images with one number for each image and channel; means over
the pixels."""

from __future__ import annotations

import ctypes

from graph_passes.executors.cuda.builder import Builder, Launches, padded_rows, reads_padded, require
from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.kernel_library import count, threads
from graph_passes.executors.cuda.kernels import pointwise
from graph_passes.executors.cuda.operands import In, Out
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node
from graph_passes.operators import Shape
from graph_passes.operators.arithmetic import mean_axes

PIXEL_THREADS = Declarations("broadcast.cu").value("THREADS")  # threads of a block of pixel_sums


def of_two(builder: Builder, node: Node) -> None:
    """Launch a product or a sum of two tensors. They have one shape, or one of them has one number for each image and
    channel.
    """
    x, y, z = builder.input(node, "lhs"), builder.input(node, "rhs"), builder.output(node)
    adds = node.op == "broadcast_add"
    if x.shape == y.shape:
        source = "elementwise.cu" if adds else "pointwise.cu"
        vectors = pointwise.whole_vectors(z)
        builder.launch(node, source, builder.kernel("add" if adds else "multiply"), *threads(vectors), In(x), In(y),
                       Out(z, over=x), count(vectors))
        return
    x, y = (x, y) if x.shape == z.shape else (y, x)
    pixels, pitch = _pixels_and_pitch(node, x.shape, y.shape)
    vectors = builder.vectors(z)
    builder.launch(node, "broadcast.cu", builder.kernel("broadcast", adds), *threads(vectors), In(x), In(y),
                   Out(z, over=x), count(vectors), count(pixels), count(pitch))


def product_backward(builder: Builder, node: Node) -> None:
    dz, x, y = (builder.input(node, role) for role in ("out_grad", "lhs", "rhs"))
    dx, dy = builder.output(node, "lhs_grad"), builder.output(node, "rhs_grad")
    if x.shape == y.shape:
        pointwise.launch(builder, node, builder.kernel("multiply_backward"), In(dz), In(x), In(y), Out(dx), Out(dy),
                         of=dz)
        return
    if x.shape != dz.shape:
        x, y, dx, dy = y, x, dy, dx
    pixels, pitch = _pixels_and_pitch(node, x.shape, y.shape)
    vectors = builder.vectors(dz)
    builder.launch(node, "broadcast.cu", builder.kernel("broadcast", False), *threads(vectors), In(dz), In(y), Out(dx),
                   count(vectors), count(pixels), count(pitch))
    _pixel_sums(builder, node, dz, x, dy, pixels, pitch)


def sum_to(builder: Builder, node: Node) -> None:
    dy, dx = builder.input(node, "out_grad"), builder.output(node)
    _pixel_sums(builder, node, dy, None, dx, *_pixels_and_pitch(node, dy.shape, dx.shape))


def _pixel_sums(builder: Builder, node: Node, dy: Buffer, x: Buffer | None, ds: Buffer, pixels: int,
                pitch: int) -> None:
    builder.launch(node, "broadcast.cu", builder.kernel("pixel_sums"), (dy.shape[0] * pitch, 1, 1),
                   (PIXEL_THREADS, 1, 1), In(dy), In(x), Out(ds), count(pixels), count(pitch))


def mean(builder: Builder, node: Node) -> None:
    """Launch the mean over the pixels of images, like global average pooling."""
    x, y = builder.input(node, "data"), builder.output(node)
    _require_pixels(node, x.shape)
    vectors = builder.vectors(y)
    builder.launch(node, "pooling.cu", builder.kernel("global_average_pool"), *threads(vectors), In(x), Out(y),
                   count(vectors), *map(ctypes.c_int, _sizes(x.shape)))


def mean_backward(builder: Builder, node: Node) -> None:
    dy, dx = builder.input(node, "out_grad"), builder.output(node)
    _require_pixels(node, dx.shape)
    vectors = builder.vectors(dx)
    builder.launch(node, "pooling.cu", builder.kernel("global_average_pool_backward"), *threads(vectors), In(dy),
                   Out(dx), count(vectors), *map(ctypes.c_int, _sizes(dx.shape)))


def _require_pixels(node: Node, images: Shape) -> None:
    require(len(images) == 4 and mean_axes(node, len(images)) == (1, 2), node,
            f"is over dimensions {node['axis']} of {images}: there is a kernel for means over height and width")


def _pixels_and_pitch(node: Node, images: Shape, of_images: Shape) -> tuple[int, int]:
    """Pixels of an image, and vectors of a pixel. Raises GraphError for another kind of broadcasting."""
    require(len(images) == 4 and of_images == (images[0], 1, 1, images[3]), node,
            f"has the shapes {images} and {of_images}: there are kernels for equal shapes, and for images with one "
            "number for each image and channel")
    return _sizes(images)


def _sizes(images: Shape) -> tuple[int, int]:
    """The number of pixels of an image, and the number of vectors of a pixel."""
    return images[1] * images[2], images[3] // VECTOR


def _needs_vectors(builder: Builder, node: Node) -> bool:
    """Whether one tensor is broadcast to the other, which needs whole vectors; otherwise the operation is elementwise.
    """
    return reads_padded(builder, node) or len({builder.shapes[ref] for ref in node.inputs}) > 1


LAUNCHES: Launches = {
    **dict.fromkeys(("elemwise_mul", "broadcast_mul", "broadcast_add"), padded_rows(of_two, _needs_vectors)),
    "ProductBackward": padded_rows(product_backward, _needs_vectors),
    "SumTo": padded_rows(sum_to),
    "mean": padded_rows(mean),
    "MeanBackward": padded_rows(mean_backward),
}
