"""Plain CUDA kernels on the CPU, for tests: compiled by g++, run by emulator.cc, which checks each access to memory.

`EmulatedGpu` and `EmulatedKernels` take the places of `Gpu` and `KernelLibrary`; steps.py does so in whole networks.
What is not emulated: PTX instructions but conversions (wgmma, TMA, cp.async, named barriers), and times.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from graph_passes import GraphError
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernel_library import HOPPER, SOURCES, Size

HERE = Path(__file__).parent
COMPILED = Path(__file__).parents[4] / ".pytest_cache" / "emulation"
COMPILER = shutil.which("g++")
# Instructions are named after the functions of device.h that stand for them.
PTX = frozenset(re.findall(r"\bptx_\w+", (HERE / "device.h").read_text()))
FLAGS = ("-std=c++17", "-O1", "-g1", "-gdwarf-4", "-fPIC", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE",
         f"-I{HERE}")
CHECKS = ("-fsanitize=thread", "-fsanitize=bounds-strict,alignment", "--param=tsan-instrument-func-entry-exit=0")


class Fault(AssertionError):
    """A kernel does what it must not do."""


# --- compiling ---


def translated(text: str) -> str:
    """CUDA C++ for g++: PTX instructions become calls; dynamic shared memory is where the emulator has it."""
    text = re.sub(r"\basm\s*(?:volatile)?\s*\((.*?)\);", lambda found: _call_of(found[1]), text, flags=re.DOTALL)
    return re.sub(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];",
                  r"\1 *const \2 = (\1 *)emulated_shared();", text)


def _call_of(assembler: str) -> str:
    """What stands for `asm(assembler)`: instructions, then `: results : operands`."""
    found = re.match(r'\s*((?:"(?:[^"\\]|\\.)*"\s*)*)(.*)', assembler, re.DOTALL)
    assert found
    words = re.sub(r'[{"]|\\[nt]', "", found[1]).split()  # none where a macro makes them
    name = "ptx_" + words[0].replace(".", "_") if words else ""
    if name not in PTX:
        return f'emulated_refusal("{words[0] if words else "PTX"}");'
    values = re.findall(r'"=?\w"\((.*?)\)\s*(?=[,:]\s*"|$)', found[2])
    return f"{name}({', '.join(values)});"


@cache
def _with_headers(source: str, folder: Path) -> Mapping[str, str]:
    """A file and all that it includes, translated."""
    text = (folder / source).read_text()
    files = {source: translated(text)}
    for header in re.findall(r'#include "(.*?)"', text):
        files |= _with_headers(header, folder)
    return files


@cache
def is_emulated(source: str, folder: Path = SOURCES) -> bool:
    """Whether the emulator knows all PTX instructions of a file's kernels. Those of common.cuh (named barriers) do not
    count: they are refused when they are executed."""
    return all("emulated_refusal" not in text for name, text in _with_headers(source, folder).items()
               if name != "common.cuh")


@cache
def _emulator_path() -> Path:
    target = COMPILED / f"emulator-{_digest(*((HERE / name).read_text() for name in ('emulator.cc', 'device.h')))}.so"
    return _made(target, lambda path: _run(COMPILER, *FLAGS, "-O2", "-shared", HERE / "emulator.cc", "-o", path))


def compiled(source: str, expression: str, folder: Path = SOURCES) -> Path:
    """The library of one kernel, compiled unless it has been already."""
    files = _with_headers(source, folder)
    program = (f'#include "device.h"\nnamespace kernels {{ namespace {{\n#include "{source}"\n}}\n'
               f'extern "C" void emulated_entry(void **arguments) {{ call({expression}, arguments); }}\n}}\n'
               '#pragma GCC visibility push(hidden)\nextern char __ehdr_start, _end;\n#pragma GCC visibility pop\n'
               'extern "C" void emulated_image(char **at) { at[0] = &__ehdr_start; at[1] = &_end; }\n')
    name = _digest(program, *map(str, sorted(files.items())), _emulator_path().name, *FLAGS, *CHECKS)

    def make(path: Path) -> None:
        folder = path.parent
        for file, text in (files | {"kernel.cc": program}).items():
            (folder / file).write_text(text)
        _run(COMPILER, *FLAGS, *CHECKS, "-c", folder / "kernel.cc", "-o", folder / "kernel.o", f"-I{folder}")
        _run(COMPILER, "-shared", folder / "kernel.o", _emulator_path(), "-o", path)

    return _made(COMPILED / f"{name}.so", make)


def _made(target: Path, make: Callable[[Path], None]) -> Path:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # others may make it at the same time
            made = Path(folder, target.name)
            make(made)
            made.replace(target)
    return target


def _run(*command: Any) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise GraphError(f"{' '.join(map(str, command))}\n{done.stderr[:3000]}")
    return done.stdout


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


# --- launching ---


class _Permit(ctypes.Structure):
    """`Permit` of emulator.cc."""

    _fields_ = (("begin", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("may_write", ctypes.c_size_t))


class _Launch(ctypes.Structure):
    """`Launch` of emulator.cc."""

    _fields_ = (("entry", ctypes.c_void_p), ("arguments", ctypes.c_void_p), ("image", ctypes.c_void_p * 2),
                ("shared", ctypes.POINTER(_Permit)), ("permits", ctypes.POINTER(_Permit)),
                ("sizes", ctypes.c_size_t * 2),
                ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared_bytes", ctypes.c_uint32),
                ("seed", ctypes.c_uint32), ("orders", ctypes.c_char_p))


@cache
def _emulator() -> ctypes.PyDLL:
    library = ctypes.PyDLL(str(_emulator_path()))  # holds the GIL: no other thread gives memory back during a launch
    library.emulator_launch.restype = ctypes.c_char_p
    library.emulator_add.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.emulator_remove.argtypes = (ctypes.c_void_p,)
    return library


class EmulatedKernel:
    """A loaded kernel. Raises Fault where it does what it must not do."""

    def __init__(self, gpu: EmulatedGpu, path: Path, name: str) -> None:
        self._gpu, self._path, self._name = gpu, path, name
        library = ctypes.CDLL(str(path))
        self._entry = ctypes.cast(library.emulated_entry, ctypes.c_void_p)
        self._image = (ctypes.c_void_p * 2)()
        library.emulated_image(self._image)
        variables = re.findall(r"^(\w+) (\w+) b _ZZN7kernels", _run("nm", "-S", path), re.MULTILINE)
        self._shared = [(int(self._image[0] or 0) + int(offset, 16), int(size, 16), True) for offset, size in variables]

    def launch(self, grid: Size, block: Size, *arguments: Any, shared_bytes: int = 0) -> None:
        """As `Kernel.launch`, once in each of the GPU's orders."""
        if 0 in grid:
            return
        values = [ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        shared, permits = ((_Permit * len(list_))(*list_) for list_ in (self._shared, self._gpu.permits))
        launch = _Launch(self._entry, ctypes.addressof(pointers), self._image, shared, permits,
                         (len(shared), len(permits)), grid, block, shared_bytes, next(self._gpu.seeds),
                         next(self._gpu.orders).encode())
        at = ctypes.c_void_p()
        problem = _emulator().emulator_launch(ctypes.byref(launch), ctypes.byref(at))
        if problem:
            text = re.sub(r"/\S*/", "", problem.decode())  # names of files
            raise Fault(f"{self._name}: {text}{self._line_of(at.value)}")

    def _line_of(self, address: int | None) -> str:
        """The source line of an instruction, for a message."""
        if not address:
            return ""
        offset = address - int(self._image[0] or 0) - 1
        lines = _run("addr2line", "-i", "-e", self._path, hex(offset)).splitlines()
        return f" ({', from '.join(line.rpartition('/')[2].split(' ')[0] for line in lines[:3])})"


class EmulatedKernels:
    """All kernels of a folder for one emulated GPU."""

    def __init__(self, gpu: EmulatedGpu, folder: Path = SOURCES) -> None:
        self._gpu, self._folder = gpu, folder
        self._loaded: dict[tuple[str, str], EmulatedKernel] = {}
        self._begun: dict[tuple[str, str], Future[Path]] = {}
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))

    def get(self, source: str, expression: str) -> EmulatedKernel:
        key = source, expression
        if key not in self._loaded:
            self.begin(*key)
            self._loaded[key] = EmulatedKernel(self._gpu, self._begun[key].result(), f"{source}: {expression}")
        return self._loaded[key]

    def begin(self, source: str, expression: str) -> None:
        """Raises GraphError for a kernel that is not plain, so that another way is chosen."""
        if not is_emulated(source, self._folder):
            raise GraphError(f"{source} has PTX instructions that are not emulated")
        _emulator_path()
        if (source, expression) not in self._begun:
            self._begun[source, expression] = self._pool.submit(compiled, source, expression, self._folder)

    def side_by_side(self) -> Any:
        return nullcontext()


def _forget(memory: dict[int, np.ndarray]) -> None:
    for address in memory:
        _emulator().emulator_remove(address)


class EmulatedGpu(Gpu):
    """NumPy's memory, which starts as NaN; work is done at once. It has few multiprocessors, so that blocks have
    several parts to work on.

    `orders`: in which orders each launch runs its threads and blocks, as emulator.cc has them: "f"orward, "r"everse,
    "x" by chance; the results must be the same bits. Of several such words each launch has the next.
    """

    num_multiprocessors, max_shared_bytes, capability = 3, 227 << 10, HOPPER
    name, device_id, driver_version, stream_handle = "emulation", 0, 0, 0

    def __init__(self, seed: int, orders: tuple[str, ...] = ("frx",)) -> None:
        self.seeds, self.orders = itertools.count(seed % 2**31), itertools.cycle(orders)
        self.permits: list[tuple[int, int, bool]] = []  # of the next launch; none: it may access all buffers
        self._memory: dict[int, np.ndarray] = {}
        weakref.finalize(self, _forget, self._memory)

    def memory(self) -> tuple[int, int]:
        return 1 << 34, 1 << 34

    def allocate(self, num_bytes: int) -> int:
        array = np.full(num_bytes + 512, 0xFF, np.uint8)
        address = -(-array.ctypes.data // 256) * 256
        self._memory[address] = array
        _emulator().emulator_add(address, -(-max(num_bytes, 1) // 32) * 32)  # whole vectors, as on a GPU
        return address

    def free(self, address: int) -> None:
        _emulator().emulator_remove(address)
        del self._memory[address]

    def free_all(self) -> None:
        for address in tuple(self._memory):
            self.free(address)

    def upload(self, address: int, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, address: int, shape: Any, dtype: Any) -> np.ndarray:
        array = np.empty(tuple(shape), dtype)
        ctypes.memmove(array.ctypes.data, address, array.nbytes)
        return array

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(to, source, num_bytes)

    def fill(self, address: int, byte: int, num_bytes: int) -> None:
        ctypes.memset(address, byte, num_bytes)

    def write_word(self, address: int, value: np.float32 | np.uint32) -> None:
        self.upload(address, np.asarray(value))

    def pinned(self, num_bytes: int) -> np.ndarray:
        return np.empty(num_bytes, np.uint8)

    def start_download(self, pinned: np.ndarray, address: int, beside: bool = False) -> Any:
        ctypes.memmove(pinned.ctypes.data, address, pinned.nbytes)
        return SimpleNamespace(sync=lambda: None)

    def synchronize(self) -> None: ...

    def capture(self, enqueue: Callable[[], None]) -> Any:
        return enqueue

    def replay(self, executable: Any) -> None:
        executable()

    def destroy(self, executable: Any) -> None: ...

    def timing_event(self) -> Any: ...

    def record(self, event: Any) -> None: ...
