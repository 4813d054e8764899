"""One GPU: its stream, memory copies, CUDA graphs and timing. The only module that calls the CUDA driver.

Everything of the executor runs on `Gpu.stream`, in order. The libraries cuda-core and cuda-bindings are imported when a
`Gpu` is made, so that this module can be imported without them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from graph_passes.errors import GraphError, TransientError
from graph_passes.passes.precision import ITEM_BYTES

MIN_COMPUTE_CAPABILITY = (7, 5)  # cuDNN 9 and CUDA 13 have no kernels for older GPUs
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
MIN_DRIVER_CUDA = 12000  # CUDA 12.0, in the format of cuDriverGetVersion

IPC_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
TENSOR_MAP_WORDS = 16  # CU_TENSOR_MAP_NUM_QWORDS

_NO_GPU = "install a driver and a GPU, or use the executor mxnet"
INSTALL = "install the GPU packages: `make setup`, or pip install '.[gpu]' in this project's folder"


class Tiling(NamedTuple):
    """The tiling of a tensor (lines, rows, columns), or (layers, lines, rows, columns); one copy moves one tile.
    `pitches`: distances in elements from a line to the next, and from a row to the next.
    """

    shape: tuple[int, ...]
    pitches: tuple[int, ...]
    tile: tuple[int, ...]

    @classmethod
    def of_matrix(cls, rows: int, columns: int, tile: tuple[int, int]) -> Tiling:
        """The tiling of a contiguous matrix; `tile`: rows, columns."""
        return cls((1, rows, columns), (rows * columns, columns), (1, *tile))


class Gpu:
    """This process's current GPU, one stream on it, and the driver functions that the executor needs.

    Raises GraphError if the GPU does not exist, or if the driver or a library is missing or too old.
    """

    def __init__(self, device_id: int = 0) -> None:
        try:
            from cuda.bindings import driver
            from cuda.core import Device
        except ImportError as error:
            raise GraphError(f"the cuda executor needs cuda-core and cuda-bindings ({error}): {INSTALL}") from None
        except Exception as error:  # cuda-pathfinder raises its own exception if libcuda.so is missing
            raise GraphError(f"no NVIDIA driver was found ({first_line(error)}): {_NO_GPU}") from None
        self._driver = driver
        try:
            self.check(driver.cuInit(0))
            version = self.check(driver.cuDriverGetVersion())
            count = self.check(driver.cuDeviceGetCount())
        except Exception as error:
            raise GraphError(f"the NVIDIA driver does not answer ({first_line(error)}): {_NO_GPU}") from None
        if version < MIN_DRIVER_CUDA:
            raise GraphError(f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10} only; "
                             "the cuda executor needs 12.0 or newer: update the driver")
        if not 0 <= device_id < count:
            raise GraphError(f"there is no GPU {device_id}: this machine has {count}, numbered from 0")
        self.device = Device(device_id)
        self.device.set_current()
        self.device_id = device_id
        self.capability = tuple(self.device.compute_capability)
        self.name: str = self.device.name
        if self.capability < MIN_COMPUTE_CAPABILITY:
            major, minor = self.capability
            raise GraphError(f"GPU {device_id} ({self.name}) has compute capability {major}.{minor}; cuDNN 9 needs "
                             "7.5 or newer: use the executor mxnet")
        self.driver_version: int = version
        properties = self.device.properties
        self.num_multiprocessors: int = properties.multiprocessor_count
        self.max_shared_bytes: int = properties.max_shared_memory_per_block_optin
        self.stream = self.device.create_stream()
        self.stream_handle = int(self.stream.handle)
        self._downloads = self.device.create_stream()
        self._allocated: set[int] = set()

    def check(self, result: tuple[Any, ...]) -> Any:
        """The value of a driver call. Raises TransientError if the GPU's memory is full, and otherwise RuntimeError."""
        status, *values = result
        if int(status) == OUT_OF_MEMORY:
            raise TransientError("the GPU has no memory left: use a smaller batch size, or end the other programs that "
                                 "use it")
        if int(status) != 0:
            _, text = self._driver.cuGetErrorString(status)
            raise RuntimeError(f"CUDA error {int(status)}: {text.decode() if text else 'unknown'}")
        return values[0] if len(values) == 1 else tuple(values)

    # --- memory ---

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the GPU's memory."""
        return self.check(self._driver.cuMemGetInfo())

    def check_free(self, num_bytes: int) -> None:
        """Raise TransientError, with the needed and the free bytes, if `num_bytes` bytes do not fit."""
        free, total = self.memory()
        if num_bytes > free:
            raise TransientError(f"the GPU has {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, "
                               f"{num_bytes / 2**30:.1f} GiB more are needed: use a smaller batch size")

    def allocate(self, num_bytes: int) -> int:
        """The address of new device memory, to be released by `free`. Raises TransientError if the memory does not fit.
        """
        self.check_free(num_bytes)
        address = int(self.check(self._driver.cuMemAlloc(max(num_bytes, 1))))
        self._allocated.add(address)
        return address

    def free(self, address: int) -> None:
        self.check(self._driver.cuMemFree(address))
        self._allocated.remove(address)

    def free_all(self) -> None:
        """Wait for the work in flight, and free all memory that `allocate` returned."""
        self.synchronize()
        for address in tuple(self._allocated):
            self.free(address)

    def share(self, address: int) -> bytes:
        """A handle with which another process of this machine can open memory from `allocate` (see `open_shared`)."""
        handle = self.check(self._driver.cuIpcGetMemHandle(address))
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)

    def open_shared(self, handle: bytes) -> int:
        """Address in this process of memory that another process shares, perhaps on another GPU: see `can_access`."""
        opaque = self._driver.CUipcMemHandle()
        ctypes.memmove(opaque.getPtr(), handle, IPC_HANDLE_BYTES)
        peer_access = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self.check(self._driver.cuIpcOpenMemHandle(opaque, peer_access)))

    def can_access(self, bus_id: str) -> bool:
        """Whether this GPU can access the memory of the GPU with this PCI bus id. False if this process does not see
        that GPU.
        """
        status, other = self._driver.cuDeviceGetByPCIBusId(bus_id.encode())
        if int(status) != 0:
            return False
        own = self._driver.CUdevice(self.device_id)
        return int(other) == self.device_id or bool(self.check(self._driver.cuDeviceCanAccessPeer(own, other)))

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy from host to device, in order with the stream. Returns as soon as the caller may change `array`."""
        array = np.ascontiguousarray(array)
        self.check(self._driver.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, self.stream_handle))
        self.synchronize()

    def download(self, address: int, shape: Iterable[int], dtype: Any) -> np.ndarray:
        """Copy from device to host, after all work on the stream."""
        array = np.empty(tuple(shape), dtype)
        self.check(self._driver.cuMemcpyDtoHAsync(array.ctypes.data, address, array.nbytes, self.stream_handle))
        self.synchronize()
        return array

    def pinned(self, num_bytes: int) -> np.ndarray:
        """Page-locked bytes of host memory for `start_download`. The memory is freed at the end of the process."""
        address = int(self.check(self._driver.cuMemAllocHost(num_bytes)))
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))

    def start_download(self, pinned: np.ndarray, address: int, beside: bool = False) -> Any:
        """Start to copy from device to host; `sync()` of the returned event waits for the copy. The copy has the size
        of `pinned`. With `beside`, the copy overlaps with the work enqueued from now on, which must not write to the
        source before the event.
        """
        stream = self._downloads if beside else self.stream
        if beside:
            stream.wait(self.stream)
        self.check(self._driver.cuMemcpyDtoHAsync(pinned.ctypes.data, address, pinned.nbytes, int(stream.handle)))
        return stream.record()

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        """Copy within the device, asynchronous."""
        self.check(self._driver.cuMemcpyDtoDAsync(to, source, num_bytes, self.stream_handle))

    def fill(self, address: int, byte: int, num_bytes: int) -> None:
        """Set every byte of a memory range, asynchronously."""
        if num_bytes:
            self.check(self._driver.cuMemsetD8Async(address, byte, num_bytes, self.stream_handle))

    def fill_random(self, address: int, num_bytes: int, dtype: str) -> None:
        """Fill memory with uniform random values in [-1, 1), in int8 from -127 to 127, as data for timing kernels."""
        block = np.random.default_rng(0).uniform(-1, 1, 1 << 16).astype(np.float32)
        if dtype == "float16":
            block = block.astype(np.float16)
        elif dtype == "bfloat16":
            block = (block.view(np.uint32) >> 16).astype(np.uint16)
        elif dtype == "int8":
            block = np.rint(127 * block).astype(np.int8)
        elif dtype == "float8":
            block = e4m3(block)
        first = min(num_bytes, block.nbytes)
        self.upload(address, block.view(np.uint8)[:first])
        filled = first
        while filled < num_bytes:  # double the filled part
            self.copy(address + filled, address, min(filled, num_bytes - filled))
            filled *= 2

    def write_word(self, address: int, value: np.float32 | np.uint32) -> None:
        """Write 4 bytes of device memory, in order with the stream and without waiting. The driver copies the value
        during the call.
        """
        bits = int(np.asarray(value).view(np.uint32))
        self.check(self._driver.cuMemsetD32Async(address, bits, 1, self.stream_handle))

    # --- work ---

    def launch(self, function: int, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int,
               arguments: Any) -> None:
        """Enqueue a kernel; `arguments` is a C array of pointers to its arguments."""
        # a CUkernel handle, which cuLaunchKernel accepts like a CUfunction
        function = self._driver.CUfunction(function)
        self.check(self._driver.cuLaunchKernel(function, *grid, *block, shared_bytes, self.stream_handle, arguments, 0))

    def allow_shared_bytes(self, function: int, shared_bytes: int) -> None:
        """Allow launches of a kernel to use this much dynamic shared memory."""
        attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.check(self._driver.cuKernelSetAttribute(attribute, shared_bytes, self._driver.CUkernel(function),
                                                     self._driver.CUdevice(self.device_id)))

    def tensor_map(self, address: int, dtype: str, tiling: Tiling) -> Any:
        """A descriptor of the tensor at `address` for TMA, the tensor memory accelerator of Hopper GPUs: a kernel
        argument (`TensorMap` of kernels/tma.cuh). A row of a tile has 128 or 64 bytes, which are swizzled. If the
        address is 0, the descriptor is an unusable placeholder.
        """
        if not address:
            return (ctypes.c_uint64 * TENSOR_MAP_WORDS)()
        driver, types, swizzles = self._driver, self._driver.CUtensorMapDataType, self._driver.CUtensorMapSwizzle
        opaque = self.check(driver.cuTensorMapEncodeTiled(
            {"float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             "int8": types.CU_TENSOR_MAP_DATA_TYPE_UINT8}[dtype],
            len(tiling.shape), address, [driver.cuuint64_t(size) for size in reversed(tiling.shape)],
            [driver.cuuint64_t(pitch * ITEM_BYTES[dtype]) for pitch in reversed(tiling.pitches)],
            [driver.cuuint32_t(size) for size in reversed(tiling.tile)], [driver.cuuint32_t(1)] * len(tiling.shape),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            (swizzles.CU_TENSOR_MAP_SWIZZLE_64B if tiling.tile[-1] * ITEM_BYTES[dtype] == 64 else
             swizzles.CU_TENSOR_MAP_SWIZZLE_128B),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
        words = (ctypes.c_uint64 * TENSOR_MAP_WORDS)()
        ctypes.memmove(words, int(opaque.getPtr()), ctypes.sizeof(words))
        return words

    def synchronize(self) -> None:
        self.stream.sync()

    def record_event(self) -> Any:
        """A new event that fires when all work enqueued so far is done; `event.sync()` waits for it."""
        return self.stream.record()

    def capture(self, enqueue: Callable[[], None]) -> Any:
        """Capture the work that `enqueue` puts on the stream, as an executable CUDA graph for `replay`."""
        # Thread-local: MXNet's and Horovod's threads may allocate during the capture.
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.check(self._driver.cuStreamBeginCapture(self.stream_handle, mode))
        # Python must not collect garbage during the capture: unloading a kernel or freeing an event would break it.
        collects = gc.isenabled()
        gc.disable()
        try:
            enqueue()
        finally:
            status, graph = self._driver.cuStreamEndCapture(self.stream_handle)
            if collects:
                gc.enable()
        self.check((status, graph))
        executable = self.check(self._driver.cuGraphInstantiate(graph, 0))
        self.check(self._driver.cuGraphDestroy(graph))
        return executable

    def replay(self, executable: Any) -> None:
        """Launch a captured graph asynchronously."""
        self.check(self._driver.cuGraphLaunch(executable, self.stream_handle))

    def destroy(self, executable: Any) -> None:
        """Free a captured graph, which must not be running."""
        self.check(self._driver.cuGraphExecDestroy(executable))

    # --- timing ---

    def timing_event(self) -> Any:
        return self.check(self._driver.cuEventCreate(0))

    def record(self, event: Any) -> None:
        """Record a timing event on the stream."""
        self.check(self._driver.cuEventRecord(event, self.stream_handle))

    def wait_for(self, event: Any) -> None:
        """Make the work enqueued from now on wait for an event of another stream. The host does not wait."""
        self.check(self._driver.cuStreamWaitEvent(self.stream_handle, event, 0))

    def record_in_graph(self, event: Any) -> None:
        """Record a timing event. During a capture the event becomes a node of the graph, and every replay records it.
        """
        self.check(self._driver.cuEventRecordWithFlags(event, self.stream_handle,
                                                       self._driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL))

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return float(self.check(self._driver.cuEventElapsedTime(start, end)))

    @contextlib.contextmanager
    def timer(self, enqueue: Callable[[], None], launches: int) -> Iterator[Callable[[], float]]:
        """A context with a function that replays `launches` runs of `enqueue`, captured in one CUDA graph, and returns
        the milliseconds of one run. A graph is used because many kernels run for less time than Python needs to enqueue
        them. The events are inside the graph, so the host's launch time does not count.
        """
        start, end = self.timing_event(), self.timing_event()

        def enqueue_all() -> None:
            self.record_in_graph(start)
            for _ in range(launches):
                enqueue()
            self.record_in_graph(end)

        def sample() -> float:
            self.replay(executable)
            self.synchronize()
            return self.elapsed_ms(start, end) / launches

        try:
            executable = self.capture(enqueue_all)
            try:
                yield sample
            finally:
                self.destroy(executable)
        finally:
            for event in (start, end):
                self.check(self._driver.cuEventDestroy(event))

    def time_ms(self, enqueue: Callable[[], None], launches: int = 8, repeats: int = 3) -> float:
        """Milliseconds of one run of `enqueue`: the median over `repeats` of the mean of `launches` in one CUDA
        graph."""
        with self.timer(enqueue, launches) as sample:
            sample()  # warm-up
            return statistics.median(sample() for _ in range(repeats))


def e4m3(values: np.ndarray) -> np.ndarray:
    """Values in [-1, 1] as bytes of FP8 E4M3, truncated after 3 bits of mantissa. Values below the smallest normal
    number, 2^-6, become 0. The exponent's bias is 7. Source: arXiv:2209.05433, table 1."""
    bits = values.astype(np.float16).view(np.uint16)
    # float16 has 5 exponent bits with a bias of 15; keep these and 3 mantissa bits
    sign, rest = bits >> 15, (bits & 0x7FFF) >> 7
    return (sign << 7 | np.where(rest >= 9 << 3, rest - (8 << 3), 0)).astype(np.uint8)


def first_line(error: Exception) -> str:
    """The first line of the exception's message, or the name of its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]
