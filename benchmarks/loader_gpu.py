"""Our loader on the GPU against PyTorch's DataLoader with torchvision, on the same images, alternating.

    PEER_PYTHON=/path/to/python-with-torch python benchmarks/loader_gpu.py [--data FOLDER]

Writes results/loader_jpeg_1gpu.json. Speeds with other settings, among them the loader on the CPU, are lines of
results/loader_jpeg_1gpu.jsonl. Both read the given images (default: the real ImageNet JPEGs in $RESNET_REAL_DATA) over
and over, ours from a RecordIO file made of them, the peer from their folders. Ours decodes a random window, resizes it,
flips and normalises; its batches are NHWC fp16 with 4 channels in the GPU's memory. The peer's batches are fp32 in
pinned memory of the host. Both may use all cores.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from record import RESULTS, SAMPLE, Peer, flags, run, write_result
from torch_peer import TorchPeer, all_times, take_turns

from common.command_line import Positive, read_options
from pipelines import LoaderConfig
from pipelines.bench import bench_settings, time_loader
from pipelines.dali_loader import DaliLoader
from pipelines.make_records import Options, plan_files, write_records
from pipelines.progress import num_cores
from pipelines.sources import open_source
from pipelines.tuning import tune

NUM_CORES = num_cores()
NAME = "loader_jpeg_1gpu"
REPEATS = 400  # times the few images occur in an epoch, so that no benchmark, on any number of GPUs, uses them up


def repeated_records(images: Path, folder: Path) -> Path:
    """Write a RecordIO file of the images, with an index that names each image many times; returns its folder."""
    count, _ = write_records(plan_files(images, "train"), folder, "train", Options())
    offsets = [line.split("\t")[1] for line in (folder / "train.idx").read_text().splitlines()]
    lines = [f"{turn * count + key}\t{offset}\n" for turn in range(REPEATS) for key, offset in enumerate(offsets)]
    (folder / "train.idx").write_text("".join(lines))
    return folder


def write_lines(name: str, lines: list[dict[str, Any]]) -> None:
    """Write measurements that accompany a published figure, one JSON object per line."""
    (RESULTS / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@dataclass(frozen=True)
class LoaderOptions:
    """Options of the measurement."""

    data: Path = SAMPLE
    """Class folders with JPEGs."""
    batch: Positive = 256
    """Images in a batch."""
    size: Positive = 224
    """Height and width of an image."""
    workers: Positive = NUM_CORES
    """Worker processes of the peer."""
    rounds: Positive = 2
    """Rounds; ours and the peer alternate."""
    seconds: float = 3.0
    """Seconds of ours in each round; half for each other setting."""
    device: Literal["gpu", "cpu"] = "gpu"
    """cpu is for trying this program out."""


def main() -> None:
    arguments = read_options(LoaderOptions)
    peer = None
    if "PEER_PYTHON" in os.environ:
        peer = TorchPeer("--loader-only", *flags(arguments, "data", "workers", "batch", "size"))
    with tempfile.TemporaryDirectory() as folder:
        config = LoaderConfig(
            data=str(repeated_records(arguments.data, Path(folder))), batch_size=arguments.batch,
            image_size=arguments.size, dtype="float16", channels=4, device=arguments.device)
        source = open_source(config.data, "train")
        config = tune(config, source, (0, 1))
        programs: dict[str, Callable[[], dict[str, Any]]] = {
            "ours": lambda: time_loader(DaliLoader(config, (0, 1), source), arguments.seconds)._asdict()}
        if peer:
            programs["peer"] = peer.measure
        turns = take_turns(arguments.rounds, programs)
        compared = None
        if peer:
            peer.close()
            compared = Peer(turns["peer"][0]["name"], all_times(turns["peer"]), peer.versions)
        write_result(NAME, all_times(turns["ours"]), arguments.batch, compared)
        tuned = {"num_threads": num_cores(), "prefetch": config.prefetch, "hw_decoder_load": config.hw_decoder_load,
                 "batch_size": config.batch_size, "device": config.device}
        lines = []
        for changes, speed in bench_settings(config, arguments.seconds / 2):
            lines.append({**tuned, **changes, **speed._asdict()})
            print({**tuned, **changes}, f"{speed.images_per_sec:,.0f} images/sec")
            write_lines(NAME, lines)


if __name__ == "__main__":
    run(main)
