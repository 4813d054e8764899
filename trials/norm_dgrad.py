"""Times of norm_dgrad by size of cluster and places for weights. For development: `python trials/norm_dgrad.py`."""

import ctypes
import tempfile
from pathlib import Path

from common.disk_cache import Cache
from graph_passes.executors.cuda.device import Gpu
from graph_passes.executors.cuda.kernels import KernelLibrary, instance
from graph_passes.executors.cuda.lowering.norm_dgrad import NormDgrad
from graph_passes.executors.cuda.lowering.norm_stream import STREAMED_BLOCK

gpu = Gpu()
kernels = KernelLibrary(gpu, Cache("trial", Path(tempfile.mkdtemp())))
dtype = "float16"


def random(*shape, dtype="float16"):
    count = 1
    for size in shape:
        count *= size
    num_bytes = count * (2 if dtype == "float16" else 4)
    address = gpu.allocate(num_bytes)
    gpu.fill_random(address, num_bytes, dtype)
    return address


for channels, others, rows in ((1024, 256, 50176), (512, 128, 200704)):
    dz, x, dx, w = random(rows, channels), random(rows, channels), random(rows, channels), random(channels, others)
    behind, out = random(rows, others), random(rows, others)
    wide = [random(2, channels, dtype="float32"), *(random(channels, dtype="float32") for _ in range(3))]
    narrow = [random(2, others, dtype="float32"), *(random(others, dtype="float32") for _ in range(4))]
    partials, tickets = random(2 * 132 * others, dtype="float32"), gpu.allocate(4)
    gpu.fill(tickets, 0, 4)
    megabytes = rows * 2 * (3 * channels + 2 * others) / 1e6
    for turn in range(2):
        for blocks in (1, 2):
            for places in (2, 3, 4):
                way = NormDgrad(channels, others, blocks, places)
                grid = way.grid(rows, gpu.num_multiprocessors)
                maps = [gpu.tensor_map(address, dtype, tiling) for address, tiling in (
                    (dz, way.read(rows, channels)), (x, way.read(rows, channels)), (w, way.weights),
                    (behind, way.read(rows, others)), (dx, way.written(rows, channels)),
                    (out, way.written(rows, others)))]
                kernel = kernels.get("norm_dgrad.cu", instance("norm_dgrad", dtype, way.columns, blocks))

                def run():
                    kernel.launch(grid, STREAMED_BLOCK, *maps, *wide, *narrow, partials, tickets,
                                  ctypes.c_uint32(rows), *map(ctypes.c_int, (others, way.chunks, way.stages, places)),
                                  shared_bytes=way.shared_bytes)

                ms = gpu.time_ms(run, launches=16, repeats=5)
                print(f"{channels} to {others}: clusters of {blocks}, {places} places, {way.stages} stages: {ms:.4f} ms, "
                      f"{megabytes / ms:.0f} GB/s", flush=True)
    for address in (dz, x, dx, w, behind, out):
        gpu.free(address)
