"""The result of lowering: a list of launches on buffers, and the offset of each buffer in one arena of device
memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from graph_passes.passes.memory import Step, aligned, plan_arena
from graph_passes.passes.precision import ITEM_BYTES


@dataclass(eq=False)
class Buffer:
    """A tensor on the GPU. `address` is set when memory is planned; persistent buffers have an address from the start.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    address: int = 0
    persistent: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def whole(self) -> Buffer:
        """The buffer that owns the memory: the buffer itself, or the viewed buffer."""
        return self

    def bytes_of(self, rows: int) -> int:
        """The bytes of the first `rows` elements along the first axis."""
        return self.num_bytes // self.shape[0] * rows


class View(Buffer):
    """A buffer's memory with another shape of equally many elements."""

    def __init__(self, of: Buffer, shape: tuple[int, ...]) -> None:
        assert math.prod(shape) == math.prod(of.shape), (of, shape)
        self.name, self.shape, self.dtype, self._whole = of.name, shape, of.dtype, of.whole

    @property
    def whole(self) -> Buffer:
        return self._whole

    @property
    def address(self) -> int:  # type: ignore[override]
        return self._whole.address

    @property
    def persistent(self) -> bool:  # type: ignore[override]
        return self._whole.persistent


@dataclass(eq=False)
class Launch:
    """One kernel or cuDNN plan. Launches run one after the other on one stream."""

    node: str  # name of the graph's node
    operation: str  # 'fprop', 'batch_norm_apply', ...
    enqueue: Callable[[], None]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    flops: int = 0
    by_library: bool = False  # a cuDNN launch: costs the host up to 0.25 ms outside a CUDA graph
    # (read, written): element i of `written` depends on no other element of `read` than element i, so both may share
    # memory.
    in_place: tuple[Buffer, Buffer] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that must move through device memory: every input read once, every output written once."""
        return sum(buffer.num_bytes for buffer in (*self.reads, *self.writes))


@dataclass
class Program:
    """Launches in order, and the number of bytes that they need in the arena. `scratch`: buffers that the launches use
    in turn, besides their tensors. `loads`: functions that wait until the kernels, which may still be compiling, are
    loaded.
    """

    launches: list[Launch] = field(default_factory=list)
    scratch: tuple[Buffer, ...] = ()
    arena_bytes: int = 0
    loads: list[Callable[[], object]] = field(default_factory=list)
    _arena: int = 0  # address of the arena that contains the buffers

    def load(self) -> None:
        """Wait for the kernels. Call this before the first run and outside a CUDA graph capture, which cannot load
        code. Raises GraphError for a kernel that cannot be compiled."""
        for load in self.loads:
            load()

    def plan_memory(self) -> None:
        """Give every buffer that is not persistent its offset in the arena, as `address`; see `plan_arena`. Scratch
        buffers come after all other buffers.
        """
        steps = [
            Step(reads=[buffer for buffer in launch.reads if not buffer.persistent],
                 writes=[buffer for buffer in launch.writes if not buffer.persistent],
                 in_place={launch.in_place[1]: [launch.in_place[0]]} if launch.in_place else {})
            for launch in self.launches
        ]
        num_bytes = {buffer: buffer.num_bytes for buffer in self.buffers()}
        allocations, self.arena_bytes = plan_arena(steps, num_bytes)
        for buffer, allocation in allocations.items():
            buffer.address = allocation.offset
        for buffer in self.scratch:
            buffer.address = self.arena_bytes
            self.arena_bytes += aligned(buffer.num_bytes)

    def place(self, arena: int) -> None:
        """Move the buffers to the arena that starts at `arena`."""
        for buffer in (*self.buffers(), *self.scratch):
            if not buffer.persistent:
                buffer.address += arena - self._arena
        self._arena = arena

    def buffers(self) -> Iterable[Buffer]:
        return dict.fromkeys(buffer for launch in self.launches for buffer in (*launch.writes, *launch.reads))


def run(launches: Iterable[Launch]) -> None:
    """Enqueue all launches in order."""
    for launch in launches:
        launch.enqueue()
