"""What the libraries that decode images say of damaged ones, and of which image they say it.

libjpeg draws what it can of a damaged JPEG, counts it as decoded, and writes a line without the file's name to C's
stderr: 'Corrupt JPEG data: premature end of data segment'. These lines are caught there, so that whoever had images
decoded can ask whether there were any, and then have the images decoded in ever smaller groups to see whose they are.

Lines of nvImageCodec itself, '[ERROR] [jpeg_parser] Invalid marker', are not among them: they go by C++'s std::cerr,
which keeps the stream that it began with, and whoever catches the file descriptor loses the last words of a process
that dies. They are of images that cannot be decoded, which are named as such.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import re
import select
import threading
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from pipelines.graph import GraphConfig, ImageInputs, build_pipeline
from pipelines.inspect_image import REFUSED
from pipelines.progress import num_cores
from pipelines.recordio import BrokenRecordError
from pipelines.transform import MAX_PIXELS, ImageTransform

# What libjpeg says of what is in a file (jerror.h), and the way in which libpng begins its lines.
_OF_DECODERS = re.compile(
    r"\bJPEG\b|\bJFIF\b|^libpng |^Bogus |^Input file read error|^(Empty|Premature end of) input file|"
    r"^Invalid (component ID|SOS|progressive|restart)|^Unsupported (color|marker)|^Inconsistent progression|"
    r"^(Arithmetic|Huffman|Missing Huffman|Quantization) |^Sampling factors|^Component index|^Too many color|"
    r"^Unknown Adobe"
)
_LINE_BUFFERED = 1  # glibc's _IOLBF
GROUP_SIZE = 64  # images decoded at once, to see whether there is a message at all


class DecoderMessages:
    """C's stderr, without the lines of image decoders, which are kept until they are taken; all others go where they
    went before. Python's own sys.stderr is another one.

    The variable `stderr` may be set 'just like any others' (manual of the GNU C Library, 'Standard Streams').
    """

    def __init__(self) -> None:
        self._taken: list[str] = []
        self._rest = b""
        self._lock = threading.Lock()
        self._reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # a decoder never waits for who reads here
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        libc.setvbuf.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
        stream = libc.fdopen(writer, b"w")
        libc.setvbuf(stream, None, _LINE_BUFFERED, 0)
        variable = ctypes.c_void_p.in_dll(libc, "stderr")
        before = ctypes.c_void_p(variable.value)
        variable.value = stream
        threading.Thread(target=self._pass_on, name="C's stderr", daemon=True).start()
        atexit.register(self._end, variable, before)

    def take(self) -> list[str]:
        """The lines of decoders since the last call."""
        with self._lock:
            self._read()
            taken, self._taken = self._taken, []
        return taken

    def _read(self) -> None:
        try:
            while part := os.read(self._reader, 1 << 16):
                self._rest += part
        except BlockingIOError:
            pass
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if _OF_DECODERS.search(text := line.decode(errors="replace")):
                self._taken.append(text.strip())
            else:
                os.write(2, line + b"\n")

    def _pass_on(self) -> None:
        while True:
            select.select([self._reader], [], [])
            with self._lock:
                self._read()

    def _end(self, variable: ctypes.c_void_p, before: ctypes.c_void_p) -> None:
        variable.value = before.value
        with self._lock:
            self._read()


@functools.cache
def decoder_messages() -> DecoderMessages:
    """Those of this process, caught from the first call on."""
    return DecoderMessages()


class DecoderCheck:
    """Asks the decoder of single images what it says of them.

    Args:
        read: the encoded bytes of image `i` (uint8); raises OSError or BrokenRecordError.
        num_threads: of the decoding; 0 takes all cores.
        max_pixels: images of more are not decoded.
    """

    def __init__(self, read: Callable[[int], np.ndarray], num_threads: int = 0, max_pixels: int = MAX_PIXELS) -> None:
        self._read = read
        self._num_threads = num_threads or num_cores()
        self._graph = GraphConfig(training=False, transform=ImageTransform(), image_size=1, dtype="float32", channels=3,
                                  device="cpu", stage="decode", max_pixels=max_pixels)
        self._pipeline: Any = None
        self._images: list[np.ndarray] = []  # to be decoded next

    def __call__(self, indices: Sequence[int], alone: Container[int] = ()) -> dict[int, str]:
        """What the decoder says of some images, or REFUSED; those of which it says nothing, and those that cannot be
        read, are left out. `alone`: images that it is likely to refuse. Nothing else in this process may decode
        meanwhile."""
        found: dict[int, str] = {}
        others = [i for i in indices if i not in alone]
        groups = [others[start : start + GROUP_SIZE] for start in range(0, len(others), GROUP_SIZE)]
        groups += [[i] for i in indices if i in alone]
        while groups:
            group = groups.pop()
            lines = self._decode(group)
            if lines and len(group) == 1:
                found[group[0]] = lines[0]
            elif lines:
                groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        return found

    def _decode(self, indices: Sequence[int]) -> list[str]:
        self._images = []
        for i in indices:
            with contextlib.suppress(OSError, BrokenRecordError):
                self._images.append(self._read(i))
        if not self._images:
            return []
        # No batch is made ahead: the messages are to be those of these images.
        self._pipeline = self._pipeline or build_pipeline(self._graph, self._feed, GROUP_SIZE, self._num_threads,
                                                          prefetch=1)
        decoder_messages().take()
        try:
            self._pipeline.run()
        except RuntimeError:  # at one of them at least
            self._pipeline = None
            return [REFUSED]
        return decoder_messages().take()

    def _feed(self) -> ImageInputs:
        return ImageInputs(self._images, np.zeros(len(self._images), np.float32))
