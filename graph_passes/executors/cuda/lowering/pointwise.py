"""The fused backward passes of 1x1 convolutions by dgrad_reduce.cu and norm_backward.cu: what they serve, and their
launches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from graph_passes.executors.cuda.kernels import HOPPER, Size, count, instance
from graph_passes.executors.cuda.lowering import batch_norm, batch_norm_pair
from graph_passes.executors.cuda.lowering.builder import Buffers, Builder, rows_and_channels
from graph_passes.executors.cuda.parameters import VECTOR
from graph_passes.executors.cuda.program import Buffer
from graph_passes.graph import Node, Ref
from graph_passes.operators import window
from graph_passes.operators_backward import forward_node

VECTOR_BYTES, FLOAT_BYTES = 16, 4
OUT_CHANNELS = (64, 128, 256)  # of the convolution: chunks of 64 whose tiles fit into shared memory
BLOCK: Size = (512, 1, 1)
TILE_ROWS = 64


def _serves(builder: Builder, dgrad: Node) -> bool:
    """Is this the data gradient of a 1x1 convolution that the kernels can make, with the products that Hopper has?"""
    forward = forward_node(dgrad)
    if forward.op != "Convolution":
        return False
    sizes = window(forward)
    return (builder.gpu.capability == HOPPER and builder.dtype in ("float16", "bfloat16")
            and sizes.kernel == (1, 1) and sizes.stride == (1, 1) and sizes.pad == (0, 0) and forward["num_group"] == 1
            and builder.input(dgrad, 1).shape[0] in OUT_CHANNELS)


def _stages(k: int) -> int:
    """Tiles of rows that have a place in shared memory: `Shape::STAGES` of both kernels."""
    return 2 if k > 128 else 3


# --- the gradient of the data, with the sums of the BatchNorm that reads it ---


class DgradReduce:
    """`dgrad_reduce`, for convolutions of at least 128 channels to `k`."""

    COLUMNS = 128

    def __init__(self, k: int) -> None:
        self.k = k

    @staticmethod
    def serves(builder: Builder, dgrad: Node) -> bool:
        return _serves(builder, dgrad) and builder.input(dgrad, 1).shape[3] >= DgradReduce.COLUMNS

    def grid(self, rows: int, columns: int, num_multiprocessors: int) -> Size:
        """Blocks for columns and rows, one for each multiprocessor."""
        blocks = -(-columns // self.COLUMNS)
        return blocks, max(1, min(num_multiprocessors // blocks, -(-rows // TILE_ROWS))), 1

    def shared_bytes(self, add: bool, pair: bool) -> int:
        """sizeof(Shared<Shape<k, add, pair>>) of dgrad_reduce.cu."""
        weights = self.k * self.COLUMNS // VECTOR * VECTOR_BYTES
        stage = (self.k + (1 + add + pair) * self.COLUMNS) * TILE_ROWS // VECTOR * VECTOR_BYTES
        return weights + _stages(self.k) * stage


def dgrad_reduce(builder: Builder, dgrad: Node, node: Node) -> None:
    """The gradient of a convolution's data, the residual's added to it, masked as `batch_norm.dz`, and the sums of the
    BatchNormAddReluBackward `node` (and its shortcut's)."""
    norms, (dy, w) = batch_norm_pair.norms(builder, node), (builder.input(dgrad, index) for index in range(2))
    x, saved = ([builder.input(norm, index) for norm in norms] for index in (1, 3))
    dgamma, dbeta = ([builder.output(norm, index) for norm in norms] for index in (1, 2))
    mask, dz = builder.input(node, 4), batch_norm.dz(builder, node)
    gradients = (node.inputs[0],) if node["single_grad"] else (node.inputs[0], node.inputs[-1])
    addend = next((builder.buffers[ref] for ref in gradients if ref != Ref(dgrad.name)), None)
    (rows, columns), k, flags = rows_and_channels(node, x[0]), w.shape[0], (addend is not None, len(norms) == 2)
    way = DgradReduce(k)
    grid = way.grid(rows, columns, builder.gpu.num_multiprocessors)
    builder.reserve_partials((1 + len(norms)) * columns * grid[1])
    second = [None] * (2 - len(norms))
    builder.launch(node, "dgrad_reduce.cu", builder.kernel("dgrad_reduce", k, *flags), grid, BLOCK,
                   (dy, w, *x, *second, addend, mask, dz, *saved, *second, *dgamma, *second, *dbeta, *second,
                    builder.partials, builder.persistent.tickets, count(rows), ctypes.c_int(columns)),
                   (dy, w, *x, addend, mask, *saved), (dz, *dgamma, *dbeta),
                   in_place=(addend, dz) if addend else None, shared_bytes=way.shared_bytes(*flags),
                   flops=2 * rows * columns * k)


# --- from a BatchNorm through the convolution before it to the BatchNorm before that ---


@dataclass(frozen=True)
class NormConvolution:
    """The backward pass of a BatchNorm and of the 1x1 convolution before it, as far as one launch can make it."""

    norm: Node
    wgrad: Node
    dgrad: Node
    behind: Node | None  # the BatchNormReluBackward that reads the dgrad, if its sums can be made too


def convolution_before(builder: Builder, norm: Node) -> NormConvolution | None:
    """The 1x1 convolution whose output a BatchNorm backward makes the gradient of, where one launch may make that
    gradient and all that comes of it."""
    readers = builder.readers(norm)
    kinds = {reader.op: reader for reader in readers}
    if len(readers) != 2 or kinds.keys() != {"ConvolutionWgrad", "ConvolutionDgrad"}:
        return None
    wgrad, dgrad = kinds["ConvolutionWgrad"], kinds["ConvolutionDgrad"]
    if not NormBackward.serves(builder, dgrad):
        return None
    behind = builder.readers(dgrad)
    reduces = [reader.op for reader in behind] == ["BatchNormReluBackward"] and behind[0]["single_grad"]
    if builder.group:
        reduces = False  # its sums are shared before they are used: that has no place in a way that is timed
    return NormConvolution(norm, wgrad, dgrad, behind[0] if reduces else None)


class NormBackward:
    """`norm_backward`, for convolutions of 64 channels to `k`: the weights' gradient fits into a block's registers."""

    COLUMNS = 64

    def __init__(self, k: int) -> None:
        self.k = k

    @staticmethod
    def serves(builder: Builder, dgrad: Node) -> bool:
        return _serves(builder, dgrad) and builder.input(dgrad, 1).shape[3] == NormBackward.COLUMNS

    def grid(self, rows: int, num_multiprocessors: int) -> Size:
        return 1, min(num_multiprocessors, -(-rows // TILE_ROWS)), 1

    @property
    def shared_bytes(self) -> int:
        """sizeof(Shared<Shape<k>>) of norm_backward.cu."""
        weights = self.k * self.COLUMNS // VECTOR * VECTOR_BYTES
        stage = (2 * self.k + 2 * self.COLUMNS) * TILE_ROWS // VECTOR * VECTOR_BYTES
        return weights + _stages(self.k) * stage + (4 * self.k + 3 * self.COLUMNS) * FLOAT_BYTES


def norm_backward(builder: Builder, one: NormConvolution, dz: Buffer, relu: bool) -> None:
    """The gradients of the weights and of the data, or the sums of the BatchNorm that reads the latter. `relu`: has it
    still to be applied to `dz`?"""
    x, saved, gamma = (builder.input(one.norm, index) for index in (1, 3, 2))
    dgamma, dbeta = builder.output(one.norm, 1), builder.output(one.norm, 2)
    w, dw, beta = builder.input(one.dgrad, 1), builder.output(one.wgrad), builder.input(one.norm, 4) if relu else None
    (rows, k), columns, way = rows_and_channels(one.norm, x), w.shape[3], NormBackward(w.shape[0])
    grid = way.grid(rows, builder.gpu.num_multiprocessors)
    builder.reserve_partials(2 * columns * grid[1])
    parts = Buffer(f"{one.wgrad.name}:parts", (grid[1], k, columns), "float32")
    more: Buffers
    if one.behind:
        behind, gamma_2, saved_2, beta_2 = (builder.input(one.behind, index) for index in range(1, 5))
        out, more = batch_norm.dz(builder, one.behind), (saved_2, gamma_2, beta_2)
        sums: Buffers = (builder.output(one.behind, 1), builder.output(one.behind, 2))
    else:
        behind, out = builder.input(one.wgrad, 1), builder.output(one.dgrad)
        more, sums = (None, None, None), (None, None)
    reads = (dz, x, saved, gamma, beta, dgamma, dbeta, w, behind)
    builder.launch(one.norm, "norm_backward.cu", builder.kernel("norm_backward", k, relu, one.behind is not None), grid,
                   BLOCK,
                   (*reads, out, *more, *sums, parts, builder.partials, builder.persistent.tickets, count(rows)),
                   (*reads, *more), (out, *sums, parts), shared_bytes=way.shared_bytes, flops=4 * rows * columns * k)
    vectors = k * columns // VECTOR
    builder.launch(one.wgrad, "norm_backward.cu", instance("sum_parts", dw.dtype), (-(-vectors // 16), 1, 1),
                   (256, 1, 1), (parts, dw, ctypes.c_int(grid[1]), count(vectors)), (parts,), (dw,))
