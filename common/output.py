"""Line-buffered standard output and error. A failed write ends the program with one sentence, or is ignored after
`make_lasting`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import select
import sys
from typing import Any

from common.program import as_typed


def make_safe() -> None:
    """Make printing safe; called at the start of a program.

    Afterwards none of these causes a stack trace: closed input or output (`<&-`, `>&-`), a full disk, a pipe that
    nobody reads, a locale that lacks a character. Each printed line is written at once, also to a file.

    A closed descriptor would otherwise be reused by the first file that the program opens, and printed text would end
    up in that file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open() takes the lowest free number, which is this descriptor
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # Python sets the stream to None if its descriptor was closed at the start
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # open until the program ends
    for name, errors in (("stdout", "replace"), ("stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if _descriptor_of(stream) or not isinstance(stream, io.TextIOWrapper):
            continue
        if type(stream) is io.TextIOWrapper and stream.fileno() in (1, 2):
            setattr(sys, name, _safe(stream, errors))
        else:  # the stream belongs to another library, such as pytest
            stream.reconfigure(errors=errors)
    if not os.environ.get("COLUMNS", "1").strip("0").isdecimal():
        del os.environ["COLUMNS"]  # rich prints nothing if COLUMNS is 0


def _safe(stream: io.TextIOWrapper, errors: str) -> io.TextIOWrapper:
    """Rebuild the stream on a `_Descriptor`."""
    with contextlib.suppress(OSError):
        stream.flush()
    is_buffered = isinstance(stream.buffer, io.BufferedWriter)  # `python -u` makes the stream unbuffered
    descriptor: Any = _Descriptor(stream.fileno())
    return io.TextIOWrapper(io.BufferedWriter(descriptor) if is_buffered else descriptor, stream.encoding, errors,
                            line_buffering=True, write_through=stream.write_through)


def make_lasting() -> None:
    """Make printing never raise OSError from now on: text that cannot be written to standard output goes to standard
    error.
    """
    if descriptor := _descriptor_of(sys.stdout):
        descriptor.lasting = True


def failed_output() -> OSError | None:
    """Flush standard output and return the error of its first failed write, even if a library has swallowed the error.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    descriptor = _descriptor_of(sys.stdout)
    return descriptor.failure if descriptor else None


def shows_bars(console: Any) -> bool:
    """Whether a rich.console.Console can show a progress bar: on a terminal, and in a notebook with ipywidgets. Without
    ipywidgets rich would print a warning instead of the bar.
    """
    return console.is_terminal and (not console.is_jupyter or importlib.util.find_spec("ipywidgets") is not None)


def print_error(sentence: object, apart: bool = False) -> None:
    """Print the error that ends a program; `apart` as in `print_line`."""
    print_line(f"error: {as_typed(str(sentence))}", apart)


def print_line(text: str, apart: bool = False) -> None:
    """Print a line on stderr in one write, so that text of other processes does not land inside the line.

    If PYTHONUNBUFFERED is set, print() would write the end of the line separately. `apart`: print an empty line first,
    because a killed process may have left half a line (Horovod and MXNet write their lines in pieces).
    """
    sys.stderr.write("\n" * apart + f"{text}\n")
    sys.stderr.flush()


class _Descriptor(io.FileIO):
    """The file under standard output or standard error.

    Standard error never fails: text that cannot be written is dropped. Standard output that is `lasting` never fails
    either: after the first failure, text goes to standard error, and is dropped if standard error fails too. Standard
    output that is not `lasting` raises its first failure once and keeps it. All later text is dropped, so Python has no
    text to flush, and no error to print, when it exits.
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
            count = super().write(left)  # super().write() writes fewer bytes if the disk fills up or a signal arrives
            if count is None:  # None: another program has made the descriptor non-blocking
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
    """The `_Descriptor` of a stream that `make_safe` has rebuilt; None for another stream, such as pytest's."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw if isinstance(raw, _Descriptor) else None
