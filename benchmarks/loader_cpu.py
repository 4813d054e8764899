"""Our loader on the CPU against MXNet's ImageRecordIter on the same file, alternating. Writes results/loader_cpu.json.

    python benchmarks/loader_cpu.py [--data FOLDER]

Both read one RecordIO file made of the given images (default: the real ImageNet JPEGs in $RESNET_REAL_DATA). They
decode, cut out a random window of 8 to 100 % of the area with ratio 3/4 to 4/3, resize it to 224x224, flip every second
image, subtract the mean, divide by the standard deviation, and return fp32 batches. Both get the same number of
threads, but ImageRecordIter uses at most half the cores minus one, and at least one (it says so when it starts). Ours
antialiases when it shrinks an image, ImageRecordIter interpolates four pixels. Ours returns NHWC, theirs NCHW, as the
networks need.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from record import SAMPLE, Peer, run, write_result

from common.command_line import Positive, read_options
from common.mxnet_compat import mx
from pipelines import MEAN, STD, LoaderConfig, open_loader
from pipelines.make_records import Options, plan_files, write_records
from pipelines.progress import num_cores

NUM_CORES = num_cores()
NextBatch = Callable[[], None]


def our_loader(data: Path, batch: int, size: int, threads: int) -> NextBatch:
    loader = open_loader(LoaderConfig(data=str(data), batch_size=batch, image_size=size, num_threads=threads))
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epochs without end

    def next_batch() -> None:
        next(batches).data.wait_to_read()

    return next_batch


def image_record_iter(data: Path, batch: int, size: int, threads: int) -> NextBatch:
    iterator = mx.io.ImageRecordIter(
        path_imgrec=str(data / "train.rec"),
        path_imgidx=str(data / "train.idx"),
        data_shape=(3, size, size),
        batch_size=batch,
        shuffle=True,
        random_resized_crop=True,
        min_random_area=0.08,
        max_random_area=1.0,
        min_aspect_ratio=3 / 4,
        max_aspect_ratio=4 / 3,
        rand_mirror=True,
        preprocess_threads=threads,
        prefetch_buffer=2,
        **{f"mean_{channel}": mean for channel, mean in zip("rgb", MEAN, strict=True)},
        **{f"std_{channel}": std for channel, std in zip("rgb", STD, strict=True)},
    )

    def next_batch() -> None:
        try:
            batch = iterator.next()
        except StopIteration:
            iterator.reset()
            batch = iterator.next()
        batch.data[0].wait_to_read()

    return next_batch


def measure(programs: dict[str, NextBatch], num_rounds: int, num_batches: int, warm_up: int) -> dict[str, list[float]]:
    """For each program, the ms per batch in each round: the mean over `num_batches`.

    `warm_up` batches come first, as many as may lie ready in the queues. While one program is measured, the other's
    queues are full, so its threads do nothing.
    """
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(num_rounds):
        for name, next_batch in programs.items():
            for _ in range(warm_up):
                next_batch()
            start = time.perf_counter()
            for _ in range(num_batches):
                next_batch()
            times[name].append((time.perf_counter() - start) * 1e3 / num_batches)
    return times


@dataclass(frozen=True)
class LoaderOptions:
    """Options of the measurement."""

    data: Path = SAMPLE
    """Class folders with JPEGs."""
    batch: Positive = 32
    """Images in a batch."""
    size: Positive = 224
    """Height and width of an image."""
    threads: Positive = NUM_CORES
    """Threads of each program."""
    rounds: Positive = 9
    """Measurements of each program."""


def main() -> None:
    arguments = read_options(LoaderOptions)
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder)
        num_images, _ = write_records(plan_files(arguments.data, "train"), records, "train", Options())
        settings = (records, arguments.batch, arguments.size, arguments.threads)
        programs = {"ours": our_loader(*settings), "peer": image_record_iter(*settings)}
        # ImageRecordIter decodes hundreds of images ahead, so few batches of a 900-image epoch could be timed.
        epoch = num_images // arguments.batch
        times = measure(programs, arguments.rounds, num_batches=2 * epoch, warm_up=epoch)
    write_result("loader_cpu", times["ours"], arguments.batch, Peer("MXNet ImageRecordIter", times["peer"]))


if __name__ == "__main__":
    run(main)
