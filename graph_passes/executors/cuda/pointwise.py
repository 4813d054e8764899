"""The fused 1x1 convolutions of dgrad_reduce.cu and norm_backward.cu: what they serve, and how to launch them."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernels import HOPPER
from graph_passes.operators import Window

WARP, VECTOR_BYTES, FLOAT_BYTES = 32, 16, 4
CHANNELS = 32  # of input and output must be multiples of it
MIN_COMPUTE_CAPABILITY = (8, 0)  # mma.sync of bfloat16
Size = tuple[int, int, int]


def serves(gpu: Gpu, dtype: str, w_ohwi: tuple[int, ...], window: Window) -> bool:
    """Can tensor cores compute this convolution's backward pass as a matrix product?"""
    pointwise = window.kernel == (1, 1) and window.stride == (1, 1) and window.pad == (0, 0)
    return (gpu.capability >= MIN_COMPUTE_CAPABILITY and dtype in ("float16", "bfloat16") and pointwise
            and w_ohwi[0] % CHANNELS == 0 and w_ohwi[3] % CHANNELS == 0)


@dataclass(frozen=True)
class DgradReduce:
    """The template arguments of `dgrad_reduce` that are open to choice. `k`: channels of the convolution's output."""

    k: int
    warps_m: int
    warps_n: int
    column_tiles: int

    def __str__(self) -> str:
        return ", ".join(map(str, astuple(self)))

    @property
    def block(self) -> Size:
        return self.warps_m * self.warps_n * WARP, 1, 1

    @property
    def block_columns(self) -> int:
        return self.warps_n * self.column_tiles * 8

    def grid(self, rows: int, columns: int, num_multiprocessors: int) -> Size:
        """Blocks for columns and rows, one for each multiprocessor."""
        blocks = -(-columns // self.block_columns)
        return blocks, max(1, min(num_multiprocessors // blocks, -(-rows // (self.warps_m * 16)))), 1

    def shared_bytes(self, num_sums: int) -> int:
        """For the weights, and when all is done for sums."""
        weights = self.k // 8 * self.block_columns * VECTOR_BYTES
        return max(weights, num_sums * self.warps_m * self.block_columns * FLOAT_BYTES)


def dgrad_reduce_ways(gpu: Gpu, k: int, columns: int, pair: bool) -> list[DgradReduce]:
    """Those worth timing, by what was fast on an H200. From 256 channels on none was: docs/performance.md."""
    offered = (DgradReduce(k, *sizes) for sizes in (((3, 4, 4), (2, 4, 8)) if pair else ((3, 4, 8), (3, 4, 4))))
    return [way for way in offered
            if k <= 128 and way.block_columns <= columns and way.shared_bytes(3) + (4 << 10) <= gpu.max_shared_bytes]


class NormBackward:
    """`norm_backward`, for convolutions of 64 channels to `k`: the weights' gradient fits into a block's registers."""

    COLUMNS, ROWS = 64, 64
    block: Size = (512, 1, 1)

    def __init__(self, k: int) -> None:
        self.k = k

    @staticmethod
    def serves(gpu: Gpu, k: int, columns: int) -> bool:
        """Only Hopper has these matrix products, and they want chunks of 64 channels."""
        return gpu.capability == HOPPER and k in (64, 128, 256) and columns == NormBackward.COLUMNS

    def grid(self, rows: int, num_multiprocessors: int) -> Size:
        return 1, min(num_multiprocessors, -(-rows // self.ROWS)), 1

    @property
    def shared_bytes(self) -> int:
        """sizeof(Shared<Shape<k>>) of norm_backward.cu."""
        weights = self.k // 8 * self.COLUMNS * VECTOR_BYTES
        stage = (2 * self.k + 2 * self.COLUMNS) * self.ROWS // 8 * VECTOR_BYTES
        return weights + 2 * stage + (4 * self.k + 3 * self.COLUMNS) * FLOAT_BYTES
