"""Generated images for the tests of the data pipelines, in folders and in RecordIO files."""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from nvidia import dali
from PIL import Image

from common.mxnet_compat import mx
from pipelines import ImageTransform
from pipelines.augment import WINDOW, Augmenter, Device, changes, source_code
from pipelines.gpu import GpuDevice
from pipelines.graph import Derived, ImageInputs
from pipelines.operations import FAMILIES, Numbers, applied, fn, numbers
from pipelines.recordio import pack_record

Images = list[tuple[bytes, int]]  # encoded image, label

# All augmentations at once, each with a high probability.
EVERYTHING = ImageTransform(
    crop_padding=5, cutout=0.2, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, grey=0.3, blur=0.5, solarise=0.3,
    auto_augment="randaugment", random_erasing=0.5, train_interpolation="random",
)  # fmt: skip


def smooth_image(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """A picture without sharp edges, on which different decoders and resizers agree closely."""
    cells = rng.integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, image_format: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def write_folder(folder: Path, num_images: int, num_classes: int, seed: int) -> list[Path]:
    """Write class folders c00, c01, ... with images of odd sizes; returns the files in the loader's order."""
    rng = np.random.default_rng(seed)
    files = []
    for i in range(num_images):
        path = folder / f"c{i % num_classes:02}" / f"{i:03}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        width, height = rng.integers(40, 130, 2)
        path.write_bytes(encode(smooth_image(rng, int(width), int(height)), quality=95))
        files.append(path)
    return sorted(files)


def write_records(path: Path, images: list[bytes], labels: list[float]) -> None:
    """Write a .rec file and its .idx."""
    path.parent.mkdir(parents=True, exist_ok=True)
    offset, lines = 0, []
    with path.open("wb") as file:
        for key, (image, label) in enumerate(zip(images, labels, strict=True)):
            lines.append(f"{key}\t{offset}\n")
            offset += file.write(pack_record(label, image, key))
    path.with_suffix(".idx").write_text("".join(lines))


def write_tar(path: Path, members: dict[str, bytes], format: int = tarfile.USTAR_FORMAT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def samples(images: Images, start: int = 0, folder: str = "") -> dict[str, bytes]:
    members = {}
    for i, (image, label) in enumerate(images, start):
        members |= {f"{folder}{i:04}.json": b"{}", f"{folder}{i:04}.cls": b"%d\n" % label, f"{folder}{i:04}.jpg": image}
    return members


def operated(
    images: np.ndarray,
    operations: Sequence[int],
    magnitudes: Sequence[float],
    fill: float = 0,
    device: str = "cpu",
) -> np.ndarray:
    """Apply to each image (N, H, W, 3) its operation: in a DALI graph, or with the kernels ("kernels", "gpu")."""
    count, height, width, _ = images.shape
    these = numbers(np.array(operations), np.array(magnitudes), height, width)
    size = np.full((count, 2), (height, width), np.float32)
    if device != "cpu":
        # A policy with one round, and a batch that keeps the pixels as they are.
        transform = ImageTransform(auto_augment="randaugment", randaugment_operations=1, mean=(0, 0, 0), std=(1, 1, 1))
        inputs = ImageInputs(None, None, mirror=np.zeros(count, np.int32), size=size)
        return augmented(images, transform, changes(transform, inputs, Derived(), [these]), device, fill)

    @dali.pipeline_def(batch_size=count, num_threads=1, device_id=None)
    def graph():
        image, size_node, *nodes = fn.external_source(lambda: (images, size, *these), num_outputs=2 + len(these),
                                                      batch=True)
        image = fn.reinterpret(image, layout="HWC")
        return applied(image, Numbers(*nodes), frozenset(FAMILIES.values()), fill, size_node)

    pipeline = graph()
    pipeline.build()
    return pipeline.run()[0].as_array()


def augmented(
    images: Sequence[np.ndarray], transform: ImageTransform, what: tuple[np.ndarray, ...], device: str,
    fill: float | None = None, size: tuple[int, int] | None = None,
) -> np.ndarray:
    """Run the kernels of augment.cu on images (height, width, 3) of individual sizes; returns fp32 of `size` (height,
    width; None: the first image's). They run on a GPU, or compiled for the CPU ("kernels")."""
    source = source_code(transform, "float32", 3)
    if fill is not None:
        source = re.sub(r"FILL = [^;]*;", f"FILL = {fill:.1f}f;", source)
    where: Device = GpuDevice(0, source) if device == "gpu" else CpuDevice(source)
    arrays = [where.empty(array.shape, "uint8") for array in (*images, *what)]
    for array, values in zip(arrays, (*images, *what), strict=True):
        array[:] = values
    if device == "gpu":
        mx.nd.waitall()
    addresses = [where.address(array) for array in arrays]
    windows = np.array([(address, *image.shape[:2]) for address, image in zip(addresses, images)], WINDOW)  # noqa: B905
    augmenter = Augmenter(transform, "float32", 3, where)
    result = augmenter(size or images[0].shape[:2], windows, *addresses[len(images):])
    return result.asnumpy() if device == "gpu" else result


class CpuDevice:
    """Runs the kernels on the CPU, compiled by g++. Kernels with __syncthreads run with a few real threads, other
    kernels in blocks of one thread."""

    def __init__(self, source: str) -> None:
        folder = Path(__file__).resolve().parents[2] / ".pytest_cache" / "kernels"
        library = folder / f"{hashlib.sha256((CUDA_ON_THE_CPU + source).encode()).hexdigest()}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            text = CUDA_ON_THE_CPU.replace("KERNELS", source)
            building = library.with_suffix(f".{os.getpid()}")
            options = ["-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-pthread"]
            command = ["g++", *options, "-o", str(building), "-"]
            subprocess.run(command, input=text, text=True, check=True)
            building.rename(library)
        self._library = ctypes.CDLL(str(library))

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.full(shape, 77, dtype)

    def address(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def upload(self, array: np.ndarray, values: np.ndarray) -> None:
        array[:] = np.frombuffer(values.tobytes(), np.uint8)

    def launch(self, kernel: str, grid: tuple[int, int], block: int, *arguments: int | np.int32) -> None:
        values = [ctypes.c_void_p(each) if isinstance(each, int) else ctypes.c_int(int(each)) for each in arguments]
        blocks = grid[0] * (block if kernel in ("change_images", "finish_images") else 1), grid[1]
        getattr(self._library, f"run_{kernel}")(*map(ctypes.c_int, blocks), *values)

    def synchronize(self) -> None:
        pass


# Definitions that C++ lacks compared with CUDA, and a loop over the blocks for each kernel.
CUDA_ON_THE_CPU = """
#include <cmath>
#include <cstring>
#include <pthread.h>
#include <thread>
#include <vector>
#define __global__
#define __device__
#define __constant__ static const
#define __shared__ static
#define __restrict__
#define __launch_bounds__(threads, blocks)
struct Size { int x, y; };
static thread_local Size blockIdx, threadIdx = {0, 0};
static Size blockDim = {1, 1};
static pthread_barrier_t barrier;
static void __syncthreads() { if (blockDim.x > 1) pthread_barrier_wait(&barrier); }
static void atomicAdd(unsigned *to, unsigned value) { *to += value; }
static unsigned __ldg(const unsigned *from) { return *from; }
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
    return ((unsigned long long)high << 32 | low) >> bits;
}
static unsigned __byte_perm(unsigned low, unsigned high, unsigned places) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= (bytes >> 8 * (places >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
static float __uint_as_float(unsigned bits) { float number; std::memcpy(&number, &bits, 4); return number; }
static unsigned __float_as_uint(float number) { unsigned bits; std::memcpy(&bits, &number, 4); return bits; }
KERNELS
template <class Kernel> static void run(int threads, int x, int y, Kernel kernel) {
    blockDim.x = threads;
    pthread_barrier_init(&barrier, nullptr, threads);
    const auto one = [=](int thread) {
        threadIdx.x = thread;
        for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x) {
                kernel();
                __syncthreads();  // before the next block has the shared memory
            }
    };
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(one, thread);
    one(0);
    for (std::thread &other : others) other.join();
    pthread_barrier_destroy(&barrier);
}
#define RUN(kernel, threads, parameters, ...) \\
    extern "C" void run_##kernel parameters { run(threads, blocks_x, blocks_y, [=] { kernel(__VA_ARGS__); }); }
RUN(resize_images, 3, (int blocks_x, int blocks_y, const Window *windows, const Finish *finishes, uint8 *y, int height,
    int width), windows, finishes, y, height, width)
RUN(resize_and_finish, 3, (int blocks_x, int blocks_y, const Window *windows, const Finish *finishes, Pixel *y,
    int height, int width), windows, finishes, y, height, width)
RUN(measure_images, 1, (int blocks_x, int blocks_y, const uint8 *x, const Change *changes, Statistics *statistics,
    int pixels, int round, int rounds), x, changes, statistics, pixels, round, rounds)
RUN(change_images, 1, (int blocks_x, int blocks_y, const uint8 *x, const Change *changes, const Statistics *statistics,
    uint8 *y, int height, int width, int round, int rounds), x, changes, statistics, y, height, width, round, rounds)
RUN(finish_images, 1, (int blocks_x, int blocks_y, const uint8 *x, const Change *changes, const Statistics *statistics,
    const Finish *finishes, Pixel *y, int height, int width, int round, int rounds),
    x, changes, statistics, finishes, y, height, width, round, rounds)
"""
