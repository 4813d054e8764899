"""The share of the images that the GPU's JPEG engine decodes, where it is not given: measured once, and kept on disk.

What is fastest depends on the GPU, the number of CPU threads beside it, and the images: the engine, the CPU's Huffman
decoding and the CUDA cores each do a part. Of shares that are about as fast, the largest is taken: it leaves the most
of the CPU to the training loop, which has to hand a step to the GPU while the step before is computed.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import nvidia.dali

from common.disk_cache import Cache
from common.nvidia_gpus import find_gpus
from pipelines.bench import time_loader
from pipelines.dali_loader import DaliLoader, decodes_on_cpu
from pipelines.loader import LoaderConfig, require_gpu
from pipelines.progress import num_cores
from pipelines.sources import Source

CANDIDATES = (0.5, 0.65, 0.8, 0.9, 1.0)
SECONDS = 0.6  # for each, after a warm-up
NEARLY_FASTEST = 0.9  # of the highest speed. 4 H200, ResNet-50: with 0.8, the fastest alone, 24 of 190 steps were late
# by 7 to 32 ms and took 27.4 ms in the mean; with 1, at 94 % of that speed, one was, and they took 25.6 (docs/data.md)
MIN_BATCHES = 100  # an epoch of fewer is over before the measurement has paid

log = logging.getLogger("pipelines.tuning")


def tune(config: LoaderConfig, source: Source, shard: tuple[int, int]) -> LoaderConfig:
    """The configuration with `hw_decoder_load` set: what was found for this machine and data before, else by a sweep
    (about five seconds) of the training loader; left open, to take the graph's default, where neither is to be had."""
    if (config.device != "gpu" or config.hw_decoder_load is not None or source.feeds == "pixels"
            or decodes_on_cpu(config, source)):
        return config
    require_gpu(config.device_id)
    threads = config.num_threads or num_cores()
    cache = Cache(f"loader {find_gpus()[config.device_id].name} dali {nvidia.dali.__version__}")
    entry = f"hw_decoder_load-{threads}-{config.batch_size}-{config.image_size}-{len(source)}-{source.path.name}"
    if saved := cache.read(entry):
        return replace(config, hw_decoder_load=float(saved))
    if config.split != "train" or len(source) < MIN_BATCHES * config.batch_size * shard[1]:
        return config
    speeds = {
        load: time_loader(DaliLoader(replace(config, hw_decoder_load=load), shard, source), SECONDS).images_per_sec
        for load in CANDIDATES
    }
    best = max(load for load in speeds if speeds[load] >= NEARLY_FASTEST * max(speeds.values()))
    log.info("hw_decoder_load %g: %s", best, ", ".join(f"{load:g} {speed:,.0f}/s" for load, speed in speeds.items()))
    cache.write(entry, str(best).encode())
    return replace(config, hw_decoder_load=best)
