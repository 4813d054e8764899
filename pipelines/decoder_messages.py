"""Catches the messages of the image decoding libraries and finds the image that each message is about.

libjpeg decodes as much as it can of a damaged JPEG, reports success, and writes a line without the file's name to C's
stderr: 'Corrupt JPEG data: premature end of data segment'. This module catches these lines. After decoding a batch, the
caller asks whether there were any. If so, the images are decoded again in ever smaller groups, until each message
belongs to one image.

Messages of nvImageCodec itself ('[ERROR] [jpeg_parser] Invalid marker') are not caught. They go through C++'s
std::cerr, which keeps the stream that it started with; redirecting the file descriptor instead would lose the last
words of a process that dies. They concern images that cannot be decoded, which are reported anyway.
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

# libjpeg's messages about the content of a file (jerror.h), and the prefix of libpng's lines.
_OF_DECODERS = re.compile(
    r"\bJPEG\b|\bJFIF\b|^libpng |^Bogus |^Input file read error|^(Empty|Premature end of) input file|"
    r"^Invalid (component ID|SOS|progressive|restart)|^Unsupported (color|marker)|^Inconsistent progression|"
    r"^(Arithmetic|Huffman|Missing Huffman|Quantization) |^Sampling factors|^Component index|^Too many color|"
    r"^Unknown Adobe"
)
_LINE_BUFFERED = 1  # glibc's _IOLBF
GROUP_SIZE = 64  # images decoded together to see whether there is any message


class DecoderMessages:
    """Replaces C's stderr: keeps the lines of image decoders until `take`, and passes all other lines on.

    Python's sys.stderr is a separate stream and stays as it is. Setting the C variable `stderr` is allowed 'just like
    any others' (manual of the GNU C Library, 'Standard Streams').
    """

    def __init__(self) -> None:
        self._taken: list[str] = []
        self._rest = b""
        self._lock = threading.Lock()
        self._reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # a decoder must never wait for our reader
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
        """The decoders' lines since the last call."""
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
    """The decoder messages of this process; the first call starts to catch them."""
    return DecoderMessages()


class DecoderCheck:
    """Finds out which of some images the decoder complains about.

    Args:
        read: returns the encoded bytes of image `i` (uint8); raises OSError or BrokenRecordError.
        num_threads: threads that decode; 0 takes all cores.
        max_pixels: larger images are not decoded.
    """

    def __init__(self, read: Callable[[int], np.ndarray], num_threads: int = 0, max_pixels: int = MAX_PIXELS) -> None:
        self._read = read
        self._num_threads = num_threads or num_cores()
        self._graph = GraphConfig(training=False, transform=ImageTransform(), image_size=1, dtype="float32", channels=3,
                                  device="cpu", stage="decode", max_pixels=max_pixels)
        self._pipeline: Any = None
        self._images: list[np.ndarray] = []  # to be decoded next

    def __call__(self, indices: Sequence[int], alone: Container[int] = ()) -> dict[int, str]:
        """Map each image that the decoder complains about to its message, or to REFUSED.

        Images that decode without a message and images that cannot be read are left out. Images in `alone`, which are
        likely to be refused, are decoded one by one. Nothing else in this process may decode meanwhile.
        """
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
        # prefetch=1: no batch is made ahead, so the messages are about these images only.
        self._pipeline = self._pipeline or build_pipeline(self._graph, self._feed, GROUP_SIZE, self._num_threads,
                                                          prefetch=1)
        decoder_messages().take()
        try:
            self._pipeline.run()
        except RuntimeError:  # at least one image was refused
            self._pipeline = None
            return [REFUSED]
        return decoder_messages().take()

    def _feed(self) -> ImageInputs:
        return ImageInputs(self._images, np.zeros(len(self._images), np.float32))
