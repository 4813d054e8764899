"""Our CUDA C++ kernels (kernels/*.cu): compiled by NVRTC at first use, kept on disk, launched with typed arguments.

    kernel = KernelLibrary(gpu, cache).get("pooling.cu", "max_pool<half>")
    kernel.launch(*threads(vectors), x_address, y_address, count(vectors))
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

from common.disk_cache import Cache
from common.phases import KERNELS, phase
from graph_passes.errors import GraphError
from graph_passes.executors.cuda.declarations import SOURCES
from graph_passes.executors.cuda.device import INSTALL, Gpu

Size = tuple[int, int, int]  # grid in blocks, block in threads
# dynamic shared memory; up to 48 KiB, including static shared memory, need no permission
DEFAULT_SHARED_BYTES = 32 << 10
# each compilation takes 45 MB of memory; the longest of 60 kernels takes a sixteenth of the total time
MOST_COMPILED_AT_ONCE = 16
HOPPER = (9, 0)
C_TYPES = {"float16": "half", "bfloat16": "bfloat16", "float32": "float"}  # our dtype names -> names in the .cu files


class Written(str):
    """Generated source code, which can be given in place of the name of a file of kernels/."""


def threads(items: int) -> tuple[Size, Size]:
    """Grid and block with one thread for each element."""
    return (-(-items // 256), 1, 1), (256, 1, 1)


def count(value: int) -> ctypes.c_uint32:
    """An unsigned 32-bit kernel argument. Raises GraphError if the value does not fit: ctypes would truncate it."""
    if not 0 <= value < 2**32:
        raise GraphError(f"{value:,} does not fit into a kernel's 32-bit argument: use a smaller batch size, or a "
                         "smaller network")
    return ctypes.c_uint32(value)


def instance(name: str, *arguments: object) -> str:
    """The name of a template's instance: `instance("add", "float16", True)` is "add<half, true>"."""
    def spelled(argument: object) -> str:
        return str(argument).lower() if isinstance(argument, bool) else C_TYPES.get(str(argument), str(argument))

    return f"{name}<{', '.join(map(spelled, arguments))}>"


def architecture(capability: tuple[int, ...]) -> str:
    """NVRTC's name for a GPU; for Hopper sm_90a, which includes Hopper's special instructions."""
    return f"sm_{capability[0]}{capability[1]}{'a' if capability == HOPPER else ''}"


def compile_kernel(source: str, expression: str, arch: str) -> tuple[bytes, str]:
    """Compile one kernel of kernels/`source`, or of `source` itself if it is `Written`. Returns the machine code and
    the kernel's symbol name. `expression` is `name` or `name<arguments>`.

    `arch` is NVRTC's, such as 'sm_90a'. Compiling needs NVRTC, but neither a GPU nor a driver.
    """
    from cuda.core import Program, ProgramOptions

    is_file = not isinstance(source, Written)
    name, text = (source, (SOURCES / source).read_text()) if is_file else ("written.cu", str(source))
    options = ProgramOptions(arch=arch, std="c++17", include_path=[str(SOURCES)], name=name)
    compiled = Program(text, "c++", options).compile("cubin", name_expressions=(expression,))
    return bytes(compiled.code), _text(compiled.symbol_mapping[expression])


class Kernel:
    """A loaded kernel."""

    def __init__(self, gpu: Gpu, cubin: bytes, symbol: str) -> None:
        from cuda.core import ObjectCode

        self._gpu = gpu
        self._code = ObjectCode.from_cubin(cubin)
        self._kernel = self._code.get_kernel(symbol)
        self._shared_bytes = DEFAULT_SHARED_BYTES

    def launch(self, grid: Size, block: Size, *arguments: Any, shared_bytes: int = 0) -> None:
        """Enqueue the kernel on the GPU's stream. An `int` argument is a device address; all others are ctypes values.
        An empty grid, for an array without elements, is not launched: CUDA would refuse it."""
        if 0 in grid:
            return
        if shared_bytes > self._shared_bytes:
            self._gpu.allow_shared_bytes(int(self._kernel.handle), shared_bytes)
            self._shared_bytes = shared_bytes
        values = [ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._gpu.launch(int(self._kernel.handle), grid, block, shared_bytes, ctypes.addressof(pointers))


class KernelLibrary:
    """All kernels of one GPU."""

    def __init__(self, gpu: Gpu, cache: Cache) -> None:
        self._gpu, self._cache = gpu, cache
        self._loaded: dict[tuple[str, str], Kernel] = {}
        self._begun: dict[tuple[str, str], Future[tuple[bytes, str]]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def get(self, source: str, expression: str) -> Kernel:
        """The kernel `expression` of kernels/`source`; compiled unless the machine code is on this machine's disk."""
        key = (source, expression)
        if key not in self._loaded:
            with phase(KERNELS):
                code = self._begun_or_compiled(*key) if key in self._begun else self._kept(*key) or self._compiled(*key)
            self._loaded[key] = Kernel(self._gpu, *code)
        return self._loaded[key]

    @contextlib.contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Within this context, kernels announced by `begin` are compiled in parallel, one per core."""
        cores = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(min(cores, MOST_COMPILED_AT_ONCE), thread_name_prefix="nvrtc")
        try:
            yield
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
            self._begun.clear()

    def begin(self, source: str, expression: str) -> None:
        """Announce that a kernel will be needed. Within `side_by_side`, another core begins to read or compile the
        kernel, and `get` waits for the result.
        """
        key = (source, expression)
        if self._pool and key not in self._loaded and key not in self._begun:
            self._begun[key] = self._pool.submit(lambda: self._kept(*key) or self._compiled(*key))

    def _begun_or_compiled(self, source: str, expression: str) -> tuple[bytes, str]:
        begun = self._begun[source, expression]
        if begun.cancel():  # its compilation had not begun
            return self._kept(source, expression) or self._compiled(source, expression)
        return begun.result()

    def _kept(self, source: str, expression: str) -> tuple[bytes, str] | None:
        """The machine code and symbol name from the disk; None if the disk does not have them."""
        entry = self._cache.read(self._name(source, expression))
        if entry is None:
            return None
        head, cubin = entry.split(b"\n", 1)
        return cubin, json.loads(head)["symbol"]

    def _compiled(self, source: str, expression: str) -> tuple[bytes, str]:
        arch = architecture(self._gpu.capability)
        try:
            cubin, symbol = compile_kernel(source, expression, arch)
        except ImportError as error:
            raise GraphError(f"NVRTC is missing ({error}): {INSTALL}") from None
        description = {"source": source, "expression": expression, "arch": arch, "symbol": symbol}
        self._cache.write(self._name(source, expression), json.dumps(description).encode() + b"\n" + cubin)
        return cubin, symbol

    def _name(self, source: str, expression: str) -> str:
        """Name of the kernel's file on disk."""
        what = f"{sources_digest()} {source} {expression} {architecture(self._gpu.capability)}"
        return "kernel-" + hashlib.sha256(what.encode()).hexdigest()[:32]


@cache
def sources_digest() -> str:
    """A digest of all kernel sources. It changes with every edit."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.cu*")))).hexdigest()


def _text(symbol: bytes | str) -> str:
    return symbol.decode() if isinstance(symbol, bytes) else symbol
