"""Operands state how a launch uses each of its buffers. Only the launch itself states this."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graph_passes.executors.cuda.device import Tiling
from graph_passes.executors.cuda.program import Buffer


@dataclass(frozen=True)
class In:
    """A buffer that is read. None is a null pointer."""

    buffer: Buffer | None


@dataclass(frozen=True)
class Out:
    """A buffer that is written. `over`: an operand whose memory the output may share, because element i of the output
    depends on no other element of that operand than element i. None is a null pointer.
    """

    buffer: Buffer | None
    over: Buffer | None = None


@dataclass(frozen=True)
class InOut:
    """A buffer that is read and written."""

    buffer: Buffer


@dataclass(frozen=True)
class Scratch:
    """Scratch memory of one launch, which holds no tensor."""

    buffer: Buffer


@dataclass(frozen=True)
class Tiled:
    """A tensor that TMA reads or writes in tiles (kernels/tma.cuh)."""

    operand: In | Out
    tiling: Tiling


Operand = In | Out | InOut | Scratch


def reads(operands: Iterable[object]) -> tuple[Buffer, ...]:
    """The buffers that are read, without duplicates."""
    return tuple(dict.fromkeys(each.buffer.whole for each in _plain(operands)
                               if isinstance(each, In | InOut) and each.buffer))


def writes(operands: Iterable[object]) -> tuple[Buffer, ...]:
    return tuple(each.buffer.whole for each in _plain(operands) if isinstance(each, Out | InOut) and each.buffer)


def in_place(operands: Iterable[object]) -> tuple[Buffer, Buffer] | None:
    """The pair (read, written) if the output may share an input's memory. None if that input is also another operand,
    as in relu(conv(x) + x): elements of this input may be needed after they are overwritten.
    """
    plain = list(_plain(operands))
    given = [each.buffer.whole for each in plain if isinstance(each, In | InOut) and each.buffer]
    return next(((each.over.whole, each.buffer.whole) for each in plain
                 if isinstance(each, Out) and each.over and each.buffer and given.count(each.over.whole) == 1), None)


def _plain(operands: Iterable[object]) -> Iterator[object]:
    return (each.operand if isinstance(each, Tiled) else each for each in operands)
