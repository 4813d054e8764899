"""What norm_conv1x1.cu and norm_dgrad.cu share (norm_stream.cuh): how shared memory and rows are divided."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from graph_passes.executors.cuda.declarations import Declarations
from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.kernel_library import Size
from graph_passes.executors.cuda.kernels.conv1x1_forward import (
    CHUNK,
    CHUNK_BYTES,
    MAX_STAGES,
    PLACE_BYTES,
    SHARED_BYTES,
    TEAMS,
    TILE_ROWS,
    WARP_ROWS,
    affine_bytes,
)

_CUDA = Declarations("norm_stream.cuh")
STREAMED_BLOCK: Size = (_CUDA.value("STREAMING"), 1, 1)  # where weights are streamed, by chunks
STAGE_BYTES = 2 * PLACE_BYTES  # for two tiles of each team
WEIGHT_PLACES = _CUDA.value("WEIGHT_STAGES")  # for a chunk's weights, where they are streamed


@dataclass(frozen=True)
class NormStream(ABC):
    """How a kernel divides the rows of a BatchNorm's tensors of `channels`, and of those of `others` that are on the
    other side of the convolution. Beside what a block keeps, it has a place for results of each warp; the rest of its
    shared memory is for tiles on their way, `stages` times two for each team."""

    COLUMNS: ClassVar[tuple[int, ...]]  # that a block can make
    CONTROL_BYTES: ClassVar[int]

    channels: int
    others: int

    @property
    def columns(self) -> int:
        return next(columns for columns in self.COLUMNS if columns >= self.others)

    @property
    def chunks(self) -> int:
        return self.channels // CHUNK

    @property
    @abstractmethod
    def places(self) -> int:
        """Of how many chunks the weights have a place."""

    @property
    @abstractmethod
    def weights(self) -> Tiling: ...

    def read(self, rows: int, columns: int) -> Tiling:
        return Tiling.of_matrix(rows, columns, (TILE_ROWS, CHUNK))

    def written(self, rows: int, columns: int) -> Tiling:
        return Tiling.of_matrix(rows, columns, (WARP_ROWS, CHUNK))

    @property
    def stages(self) -> int:
        return min(MAX_STAGES, (SHARED_BYTES - self._kept_bytes) // STAGE_BYTES)

    @property
    def shared_bytes(self) -> int:
        return self._kept_bytes + self.stages * STAGE_BYTES

    def grid(self, rows: int, num_multiprocessors: int) -> Size:
        return 1, min(num_multiprocessors, -(-rows // (TEAMS * TILE_ROWS))), 1

    @property
    def _kept_bytes(self) -> int:
        kept = self.CONTROL_BYTES + affine_bytes(self.chunks) + self.places * self.columns * CHUNK_BYTES
        return kept + PLACE_BYTES  # that for a part of each warp's results
