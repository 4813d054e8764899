"""What a lowered graph is: a list of launches on buffers, and where each buffer lies in one arena of device memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "uint8": 1}
ALIGNMENT = 256  # bytes, as cudaMalloc's; 16 would do for our vectors and for cuDNN


@dataclass(eq=False)
class Buffer:
    """A tensor on the GPU. `address` is set once memory is planned; persistent ones have it from the start."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    address: int = 0
    persistent: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(eq=False)
class Launch:
    """One kernel or cuDNN plan. Launches run one after the other on one stream."""

    node: str  # of the graph
    operation: str  # 'fprop', 'batch_norm_apply', ...
    enqueue: Callable[[], None]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    flops: int = 0
    # (read, written): element i of `written` depends on element i of `read` only, so both may share memory.
    in_place: tuple[Buffer, Buffer] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that must move through device memory: every input read once, every output written once."""
        return sum(buffer.num_bytes for buffer in (*self.reads, *self.writes))


@dataclass
class Program:
    """Launches in order, and the number of bytes of the arena that they need."""

    launches: list[Launch] = field(default_factory=list)
    arena_bytes: int = 0

    def plan_memory(self) -> None:
        """Give every buffer that is not persistent its offset in the arena, as `address`, from lifetimes.

        A buffer lives from the launch that writes it first to the last one that reads it. The largest buffer is placed
        first, each at the lowest offset where nothing lies that is alive at the same time (greedy by size: Pisarchyk
        and Lee, arXiv:2001.03288).
        """
        first: dict[Buffer, int] = {}
        last: dict[Buffer, int] = {}
        for step, launch in enumerate(self.launches):
            for buffer in (*launch.writes, *launch.reads):
                if not buffer.persistent:
                    first.setdefault(buffer, step)
                    last[buffer] = step
        owner: dict[Buffer, Buffer] = {}  # a buffer that took over another one's memory -> that one
        for step, launch in enumerate(self.launches):
            if launch.in_place:
                source, target = (owner.get(buffer, buffer) for buffer in launch.in_place)
                fits = source in last and target in last and source is not target
                if fits and last[source] == step and first[target] == step and source.num_bytes >= target.num_bytes:
                    owner[target] = source
                    last[source] = last.pop(target)
                    del first[target]
        placed: list[tuple[int, int, int, int]] = []  # first, last, start, end
        for buffer in sorted(first, key=lambda b: (-b.num_bytes, first[b])):
            start = 0
            for other_first, other_last, other_start, other_end in sorted(placed, key=lambda p: p[2]):
                if other_first <= last[buffer] and first[buffer] <= other_last:
                    if other_start - start >= buffer.num_bytes:
                        break
                    start = max(start, other_end)
            end = start + -(-buffer.num_bytes // ALIGNMENT) * ALIGNMENT
            placed.append((first[buffer], last[buffer], start, end))
            buffer.address = start
        for buffer, source in owner.items():
            buffer.address = source.address
        self.arena_bytes = max((end for *_, end in placed), default=0)

    def place(self, arena: int) -> None:
        """Turn offsets into addresses in the arena that starts at `arena`."""
        for buffer in self.buffers():
            if not buffer.persistent:
                buffer.address += arena

    def buffers(self) -> Iterable[Buffer]:
        return dict.fromkeys(buffer for launch in self.launches for buffer in (*launch.writes, *launch.reads))


def run(launches: Iterable[Launch]) -> None:
    """Enqueue them all, in order."""
    for launch in launches:
        launch.enqueue()
