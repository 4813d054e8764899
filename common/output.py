"""Standard output and standard error: line by line, and a write that fails ends a program in one sentence, or not at
all."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from common.program import as_typed


def make_safe() -> None:
    """For the start of a program. Input and output that are closed (`<&-`, `>&-`), full, or a pipe that nobody reads,
    and output whose locale lacks a character, must not end in a trace; and a line is written when it is printed, into a
    file too.

    A closed descriptor would be given to the first file that the program opens, where what is printed would end up.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # as Python has it where it was started without
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # until the program ends
    for name, errors in (("stdout", "replace"), ("stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if _descriptor_of(stream) or not isinstance(stream, io.TextIOWrapper):
            continue
        if type(stream) is io.TextIOWrapper and stream.fileno() in (1, 2):
            setattr(sys, name, _safe(stream, errors))
        else:  # somebody else's, such as pytest's
            stream.reconfigure(errors=errors)
    if not os.environ.get("COLUMNS", "1").strip("0").isdecimal():
        del os.environ["COLUMNS"]  # rich prints nothing into 0 columns


def _safe(stream: io.TextIOWrapper, errors: str) -> io.TextIOWrapper:
    """The same stream on a `_Descriptor`."""
    with contextlib.suppress(OSError):
        stream.flush()
    is_buffered = isinstance(stream.buffer, io.BufferedWriter)  # not with `python -u`
    descriptor: Any = _Descriptor(stream.fileno())
    return io.TextIOWrapper(io.BufferedWriter(descriptor) if is_buffered else descriptor, stream.encoding, errors,
                            line_buffering=True, write_through=stream.write_through)


def make_lasting() -> None:
    """From now on nothing that is printed raises OSError. What cannot be written to standard output goes to standard
    error."""
    if descriptor := _descriptor_of(sys.stdout):
        descriptor.lasting = True


def failed_output() -> OSError | None:
    """Flushes standard output; returns its first failed write, which a library may have swallowed."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    descriptor = _descriptor_of(sys.stdout)
    return descriptor.failure if descriptor else None


def print_error(sentence: object, apart: bool = False) -> None:
    """`print_line` for what ends a program."""
    print_line(f"error: {as_typed(str(sentence))}", apart)


def print_line(text: str, apart: bool = False) -> None:
    """On stderr, in one piece: other processes write there too, and print writes its end apart where PYTHONUNBUFFERED
    is set. `apart`: below an empty line, as a process that was killed may have left half a line there, for Horovod and
    MXNet write theirs in pieces."""
    sys.stderr.write("\n" * apart + f"{text}\n")
    sys.stderr.flush()


class _Descriptor(io.FileIO):
    """Standard output or standard error.

    Standard error takes everything: what cannot be written is dropped. So does standard output that is `lasting`: from
    the first failure on, standard error or nothing takes its place. Else that failure is raised, once, and kept: what
    is printed until the program has ended is dropped, and Python itself has nothing to complain of when it ends.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.lasting = number == 2
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        if not self.failure:
            try:
                self._write_all(data)
            except OSError as error:
                if not self.lasting:
                    error.filename = "standard output"
                    self.failure = error
                    raise
                self._replace(error, data)
        return len(memoryview(data))

    def _write_all(self, data: Any) -> None:
        left = memoryview(data)
        while left:
            count = super().write(left)  # fewer, where the disk becomes full or a signal comes
            if count is None:  # another program has made the descriptor one that does not wait
                select.select([], [self], [])
            left = left[count or 0:]

    def _replace(self, error: OSError, data: Any) -> None:
        if self.fileno() == 1:
            sentence = (f"standard output cannot be written any more ({error.strerror}): what follows is on standard "
                        "error\n")
            with contextlib.suppress(OSError):
                os.write(2, sentence.encode())
                os.dup2(2, 1)
                return self._write_all(data)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def _descriptor_of(stream: Any) -> _Descriptor | None:
    """Under a stream that `make_safe` has made; None under another one, such as pytest's."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw if isinstance(raw, _Descriptor) else None


@contextlib.contextmanager
def without_lines(unwanted: re.Pattern[bytes]) -> Iterator[None]:
    """Inside, lines that match `unwanted` are kept off standard error, where libraries write them by file descriptor;
    all others appear afterwards."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            os.write(2, b"".join(line for line in caught if not unwanted.search(line)))
