"""Geometry shared by norm_conv1x1.cu and norm_dgrad.cu (norm_stream.cuh): how shared memory and rows are divided."""

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
STREAMED_BLOCK: Size = (_CUDA.value("STREAMING"), 1, 1)  # threads of a block that streams its weights
STAGE_BYTES = 2 * PLACE_BYTES  # two tiles of each team
WEIGHT_PLACES = _CUDA.value("WEIGHT_STAGES")  # slots for the weights of a chunk, if they are streamed


@dataclass(frozen=True)
class NormStream(ABC):
    """How a kernel divides the rows of a BatchNorm's tensors with `channels` channels; `others` is the number of
    channels on the other side of the convolution. Besides its weights, a block has result slots for each warp. The rest
    of its shared memory holds tiles in flight: `stages` pairs of tiles for each team."""

    COLUMNS: ClassVar[tuple[int, ...]]  # columns that a block can compute
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
        """The number of chunks of weights in shared memory."""

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
        return kept + PLACE_BYTES  # room for one part of each warp's results
