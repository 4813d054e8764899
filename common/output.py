"""Standard output and standard error that cannot end a program."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

from common.program import as_typed


def make_safe() -> None:
    """Input and output that were closed before the start (`<&-`, `>&-`), and output whose locale lacks a character,
    must not end in a trace.

    A closed descriptor would be given to the first file that the program opens, where what is printed would end up.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # as Python has it where it was started without
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # until the program ends
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if name == "stdout" else "backslashreplace")


def make_lasting() -> None:
    """From now on nothing that is printed raises OSError. What cannot be written to standard output (nobody reads the
    pipe any more, the disk is full) goes to standard error, and what cannot be written there is dropped."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper or stream.fileno() != descriptor:
            continue  # somebody else's
        is_buffered = isinstance(stream.buffer, io.BufferedWriter)  # not with `python -u`
        raw = stream.buffer.raw if is_buffered else stream.buffer
        if not isinstance(raw, _Lasting):
            with contextlib.suppress(OSError):
                stream.flush()
            lasting: Any = _Lasting(descriptor)
            setattr(sys, name, io.TextIOWrapper(
                io.BufferedWriter(lasting) if is_buffered else lasting, stream.encoding, stream.errors,
                line_buffering=stream.line_buffering, write_through=stream.write_through))


def print_error(sentence: object, apart: bool = False) -> None:
    """`print_line` for what ends a program."""
    print_line(f"error: {as_typed(str(sentence))}", apart)


def print_line(text: str, apart: bool = False) -> None:
    """On stderr, in one piece: other processes write there too, and print writes its end apart where PYTHONUNBUFFERED
    is set. `apart`: below an empty line, as a process that was killed may have left half a line there, for Horovod and
    MXNet write theirs in pieces."""
    sys.stderr.write("\n" * apart + f"{text}\n")
    sys.stderr.flush()


class _Lasting(io.FileIO):
    """Writes to a descriptor, which takes another's place where that fails."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self.fileno() == 1:
                sentence = (f"standard output cannot be written any more ({error.strerror}): what follows is on "
                            "standard error\n")
                try:
                    os.write(2, sentence.encode())
                    os.dup2(2, 1)
                    return super().write(data)
                except OSError:
                    pass
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)
