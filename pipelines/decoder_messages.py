"""Catches the messages of the image decoding libraries and finds the image that each message is about.

libjpeg decodes as much as it can of a damaged JPEG, reports success, and writes a line without the file's name to C's
stderr: 'Corrupt JPEG data: premature end of data segment'. This module catches these lines. After decoding a batch, the
caller asks whether there were any. If there were messages, the images are decoded again in ever smaller groups, until
each message belongs to one image.

nvImageCodec writes about images that it cannot decode to C++'s std::cerr ('[ERROR] [jpeg_parser] Invalid marker'). Its
lines are dropped, because such images are reported anyway.

C's stderr and std::cerr write to the same FILE of glibc. This module replaces the FILE's descriptor by the descriptor
of a pipe; file descriptor 2 is unchanged. A child process waits for the end of this process, and then writes the
remaining content of the pipe to standard error.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from common.quiet import on_their_way
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
# nvImageCodec's lines about an image, with colours: ESC[0;31m[ERROR] ESC[0m[jpeg_parser] Invalid marker
_OF_NVIMAGECODEC = re.compile(r"^\x1b\[[\d;]*m\[ERROR\] \x1b\[0m"
                              r"\[(\w+_parser|(libjpeg_turbo|libtiff|opencv)\w*_decoder)\] ")
_PIPE_BYTES = 1 << 20  # largest pipe that Linux allows every user
_FILENO = 112  # offset of the file descriptor in a FILE of glibc, on 64-bit machines (bits/types/struct_FILE.h)
_SPLICE_NONBLOCK = 2  # glibc's SPLICE_F_NONBLOCK
_PATIENCE = 0.1  # seconds to wait for the rest of a line
# Shell script of the child: waits until the other end of its standard input is closed, then copies the pipe to standard
# error.
_LAST_WORDS = "read _; exec cat <&1 >&2"
GROUP_SIZE = 64  # images decoded together to see whether there is any message


class DecoderMessages:
    """Takes what C and C++ libraries write to stderr: keeps the lines of image decoders until `take`, drops the lines
    of nvImageCodec about images, and passes all other lines on. Python's sys.stderr is a separate stream and does not
    change.

    Raises RuntimeError if the C library is not glibc.
    """

    def __init__(self) -> None:
        self._taken: list[str] = []
        self._lock = threading.Lock()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._reader, writer = _pipe()  # a decoder must never wait for our reader
        self._copied, self._copy = _pipe()
        self._alive = _pass_on_last_words(self._reader)
        self._place = self._file_descriptor()
        self._place.value, before = writer, self._place.value
        threading.Thread(target=self._pass_on, name="C's stderr", daemon=True).start()
        atexit.register(self._end, before)
        on_their_way.append(self._pass_on_now)

    def _file_descriptor(self) -> ctypes.c_int:
        """The field of C's stderr that holds its file descriptor."""
        stream = ctypes.c_void_p.in_dll(self._libc, "stderr")
        assert stream.value
        place = ctypes.c_int.from_address(stream.value + _FILENO)
        if place.value != self._libc.fileno(stream):
            raise RuntimeError("C's stderr is not a FILE of glibc, so messages of decoders cannot be read")
        return place

    def take(self) -> list[str]:
        """The decoders' lines since the last call."""
        with self._lock:
            self._read()
            taken, self._taken = self._taken, []
        return taken

    def _read(self, partly: bool = False) -> bool:
        """Keep, drop or pass on each line in the pipe; with `partly`, also a last line without its end. Lines are
        removed from the pipe only afterwards, so that no line is lost. Returns whether a line without its end is left.
        """
        while content := self._content():
            size = len(content) if partly else content.rfind(b"\n") + 1
            if not size:
                return True
            for line in content[:size].splitlines(keepends=True):
                text = line.decode(errors="replace").rstrip("\n")
                if _OF_NVIMAGECODEC.search(text):
                    continue
                if _OF_DECODERS.search(text):
                    self._taken.append(text.strip())
                else:
                    _write(line)
            while size:
                size -= len(os.read(self._reader, size))
        return False

    def _content(self) -> bytes:
        """The content of the pipe, without removing it."""
        size = self._libc.tee(self._reader, self._copy, _PIPE_BYTES, _SPLICE_NONBLOCK)  # -1: it is empty
        content = b""
        while len(content) < size:
            content += os.read(self._copied, size)
        return content

    def _pass_on(self) -> None:
        while True:
            select.select([self._reader], [], [])
            with self._lock:
                is_partial = self._read()
            if is_partial:
                time.sleep(_PATIENCE)
                self._pass_on_now()

    def _pass_on_now(self) -> None:
        with self._lock:
            self._read(partly=True)

    def _end(self, before: int) -> None:
        self._place.value = before
        self._pass_on_now()


def _pipe() -> tuple[int, int]:
    ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with contextlib.suppress(OSError):  # the user may have too many pipes
        fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return ends


def _pass_on_last_words(pipe: int) -> int:
    """Start the child that writes the remaining content of a pipe to standard error after this process has ended.
    Returns the file descriptor whose end tells the child that this process has ended.
    """
    lifeline, alive = os.pipe2(os.O_CLOEXEC)
    waiting = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_CLOEXEC)  # opens the pipe's read end a second time
    with contextlib.suppress(FileNotFoundError):  # a container may have no shell
        child = subprocess.Popen(["sh", "-c", _LAST_WORDS], stdin=lifeline, stdout=waiting,
                                 start_new_session=True)  # so that Ctrl-C does not reach the child
        child.returncode = 0  # keeps Python from waiting for the child
    os.close(lifeline)
    os.close(waiting)
    return alive


def _write(line: bytes) -> None:
    """Write to standard error; does nothing if its reader has gone."""
    with contextlib.suppress(OSError):
        while line:
            line = line[os.write(2, line):]


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
        self._images: list[np.ndarray] = []  # images to be decoded next

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
