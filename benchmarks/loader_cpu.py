"""Our loader on the CPU against MXNet's ImageRecordIter on the same file, in turn, in one run. Writes
results/loader_cpu.json.

    python benchmarks/loader_cpu.py [--data FOLDER]

Both read one RecordIO file made of the given images (default: the real ImageNet JPEGs in $RESNET_REAL_DATA), decode,
cut out a random window of 8 to 100 % of the area with ratio 3/4 to 4/3, resize it to 224x224, flip every other one,
subtract the mean, divide by the deviation and give fp32 batches. Both are asked for as many threads; ImageRecordIter
takes at most half the cores less one, and at least one (it says so when it starts). Ours filters when it shrinks an
image, ImageRecordIter takes four pixels; ours comes as NHWC, theirs as NCHW, which is what each one's network wants.
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
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # one epoch after the other

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
    """Times of a batch in ms, one for each round: the mean over `num_batches` after `warm_up` others, as many as can
    have lain ready. While one program is measured the other's queues are full, and its threads stand still."""
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
    """What is measured."""

    data: Path = SAMPLE
    """Class folders with JPEGs."""
    batch: Positive = 32
    """Images in a batch."""
    size: Positive = 224
    """Height and width of an image."""
    threads: Positive = NUM_CORES
    """Of each program."""
    rounds: Positive = 9
    """Measurements of each program."""


def main() -> None:
    arguments = read_options(LoaderOptions)
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder)
        num_images, _ = write_records(plan_files(arguments.data, "train"), records, "train", Options())
        settings = (records, arguments.batch, arguments.size, arguments.threads)
        programs = {"ours": our_loader(*settings), "peer": image_record_iter(*settings)}
        # ImageRecordIter decodes hundreds of images ahead, so an epoch of 900 images goes by before two are timed.
        epoch = num_images // arguments.batch
        times = measure(programs, arguments.rounds, num_batches=2 * epoch, warm_up=epoch)
    write_result("loader_cpu", times["ours"], arguments.batch, Peer("MXNet ImageRecordIter", times["peer"]))


if __name__ == "__main__":
    run(main)
