"""Measures the best fraction of images for the GPU's JPEG engine, once, and keeps the result on disk.

The fastest fraction depends on the GPU, the number of CPU threads, and the images, because the engine, the CPU (Huffman
decoding) and the CUDA cores share the work. Among fractions that are about equally fast, the largest is taken. It
leaves the most CPU time to the training loop, which must launch each step while the GPU computes the previous step.
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
SECONDS = 0.6  # seconds of measuring per candidate, after a warm-up
# Candidates with at least this fraction of the highest speed count as equally fast. On 4 H200 (ResNet-50), 0.8 was
# fastest for the loader alone, but 24 of 190 training steps were 7 to 32 ms late, and the mean step took 27.4 ms. With
# 1.0, at 94 % of that loader speed, one step was late, and the mean step took 25.6 ms (docs/data.md).
NEARLY_FASTEST = 0.9
MIN_BATCHES = 100  # a shorter epoch ends before the measurement has paid off

log = logging.getLogger("pipelines.tuning")


def tune(config: LoaderConfig, source: Source, shard: tuple[int, int]) -> LoaderConfig:
    """Set `hw_decoder_load` if it is not given: from an earlier measurement with this machine and data, otherwise by
    measuring now.

    The measurement is a sweep of the training loader (about five seconds). If neither is possible, the option stays
    unset and the graph uses its default.
    """
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
