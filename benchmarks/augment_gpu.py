"""Measures the cost of augmentation on a GPU: the loader's speed and GPU time with each augmentation.

    python benchmarks/augment_gpu.py [--data FOLDER]

The loader shares the GPU with the training step. So for each augmentation this program measures the loader's
images/sec, and the GPU's work for a single batch: number of launches, and the sum of their times, with our own kernels
(pipelines/augment.cu) listed separately. Then it measures these kernels alone on images that need no resize, with one
family of operations for all images of a batch: policies mix these families. Writes both as lines of
results/augment_1gpu.jsonl. Times and launches come from CUPTI (trace_gpu.py); without it they are left out. The images
are those of loader_gpu.py.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from loader_gpu import repeated_records, write_lines
from record import SAMPLE, rounded, run
from trace_gpu import KernelTrace

from common.command_line import Positive, read_options
from common.environment import git_commit, hardware
from common.errors import UserError
from pipelines import ImageTransform, LoaderConfig
from pipelines.augment import WINDOW, Augmenter, changes, source_code
from pipelines.bench import time_loader
from pipelines.dali_loader import DaliLoader
from pipelines.gpu import GpuDevice
from pipelines.graph import Derived, ImageInputs
from pipelines.operations import Operation, numbers
from pipelines.sources import Source, open_source
from pipelines.tuning import tune

NAME = "augment_1gpu"
OURS = ("resize_images", "resize_and_finish", "change_images", "finish_images", "measure_images")
BATCHES = 8  # number of traced batches
AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "crop and flip": {},
    "random erasing": {"random_erasing": 1.0},
    "TrivialAugment": {"auto_augment": "trivialaugment"},
    "TrivialAugment, erasing 0.1": {"auto_augment": "trivialaugment", "random_erasing": 0.1},
    "RandAugment": {"auto_augment": "randaugment"},
    "AutoAugment": {"auto_augment": "autoaugment"},
    "colours": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
    "blur 0.5": {"blur": 0.5},
}
OPERATIONS = {
    "warp": (Operation.ROTATE, 30), "matrix": (Operation.COLOR, 1.5), "bits": (Operation.POSTERIZE, 4),
    "contrast": (Operation.CONTRAST, 1.5), "auto_contrast": (Operation.AUTO_CONTRAST, 0),
    "sharpness": (Operation.SHARPNESS, 1.5), "equalize": (Operation.EQUALIZE, 0), "identity": (Operation.IDENTITY, 0),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    data: Path = SAMPLE
    """Class folders with JPEGs."""
    batch: Positive = 256
    """Images in a batch."""
    size: Positive = 224
    """Height and width of an image."""
    seconds: float = 2.0
    """Measuring time of the loader with each augmentation."""
    augmentations: Annotated[tuple[str, ...], "NAME"] = tuple(AUGMENTATIONS)
    """Augmentations to measure."""
    hw_decoder_load: float = -1.0
    """Fraction of the images for the GPU's JPEG engine; below 0: the loader chooses."""


def main() -> None:
    options = read_options(Options)
    if unknown := set(options.augmentations) - set(AUGMENTATIONS):
        raise UserError(f"--augmentations {', '.join(sorted(unknown))}: choose from {', '.join(AUGMENTATIONS)}")
    machine = {"hardware": f"1x {hardware()['gpus'][0]}" if hardware()["gpus"] else "", "commit": git_commit() or ""}
    lines: list[dict[str, Any]] = []
    for line in (*measure_loaders(options), *measure_families(options)):
        print(shown(line), flush=True)
        lines.append({**line, "batch": options.batch, "size": options.size, **machine})
        write_lines(NAME, lines)


def shown(line: dict[str, Any]) -> str:
    """A result line as text."""
    speed = f"{line['images_per_sec']:>8,.0f} images/sec" if "images_per_sec" in line else 19 * " "
    work = ""
    if "launches" in line:
        work = (f"  {line['launches']:>6,.1f} launches, {line['gpu_ms']:6.3f} ms a batch; "
                f"of ours {line['our_launches']:.0f}, {line['our_ms']:6.3f} ms")
    return f"{line['name']:<28}{speed}{work}"


def measure_loaders(options: Options) -> Iterator[dict[str, Any]]:
    """Measure the loader with each augmentation; yields one result line each."""
    with tempfile.TemporaryDirectory() as folder:
        config = LoaderConfig(
            data=str(repeated_records(options.data, Path(folder))), batch_size=options.batch, image_size=options.size,
            dtype="float16", channels=4, device="gpu",
            hw_decoder_load=options.hw_decoder_load if options.hw_decoder_load >= 0 else None)
        source = open_source(config.data, "train")
        config = tune(config, source, (0, 1))
        for name in options.augmentations:
            augmented = replace(config, transform=ImageTransform(**AUGMENTATIONS[name]))
            speed = time_loader(DaliLoader(augmented, (0, 1), source), options.seconds)
            yield {"name": name, **speed._asdict(), "step_ms": rounded(speed.step_ms),
                   **traced_loader(augmented, source)}


def measure_families(options: Options) -> Iterator[dict[str, Any]]:
    """Measure our kernels alone with each of OPERATIONS; yields one result line each."""
    count, size = options.batch, options.size
    transform = ImageTransform(auto_augment="trivialaugment")
    device = GpuDevice(0, source_code(transform, "float16", 4))
    augmenter = Augmenter(transform, "float16", 4, device)
    sizes = np.full((count, 2), size, np.float32)
    # Blocks of eight equal pixels: in photographs, too, neighbours are similar. Histograms of noise would be faster.
    pixels = np.random.default_rng(0).integers(0, 256, (count, -(-size // 8), -(-size // 8), 3), np.uint8)
    images = pixels.repeat(8, axis=1).repeat(8, axis=2)[:, :size, :size]
    inputs = ImageInputs(None, None, mirror=np.arange(count, dtype=np.int32) % 2, size=sizes)
    for name, (operation, magnitude) in OPERATIONS.items():
        these = numbers(np.full(count, operation), np.full(count, float(magnitude)), size, size)
        arrays = []
        for values in (images, *changes(transform, inputs, Derived(), [these])):
            arrays.append(device.empty(values.shape, "uint8"))
            arrays[-1][:] = values
        for array in arrays:
            array.wait_to_read()
        first, *addresses = [device.address(array) for array in arrays]
        windows = np.array([(first + i * images[0].nbytes, size, size) for i in range(count)], WINDOW)

        def batch(windows: np.ndarray = windows, addresses: list[int] = addresses) -> None:
            augmenter((size, size), windows, *addresses)

        batch()
        yield {"name": f"all images: {name}", **traced(batch)}


def traced_loader(config: LoaderConfig, source: Source) -> dict[str, Any]:
    """The GPU's work for one batch of a loader.

    The loader makes no batches ahead here: those would be ready before the trace begins, or unfinished when it ends.
    """
    loader = DaliLoader(replace(config, prefetch=1), (0, 1), source)
    with loader:
        loader.run()  # compiles and allocates
        return traced(loader.run)


def traced(batch: Callable[[], Any]) -> dict[str, Any]:
    """The GPU's mean work for one call of `batch`, which must return only when its work is complete; and the names of
    the five slowest kernels. Empty without CUPTI."""
    try:
        with KernelTrace() as trace:
            for _ in range(BATCHES):
                batch()
    except UserError as error:
        print(error)
        return {}
    times: Counter[str] = Counter()
    for launch in trace.kernels:
        times[launch.name] += launch.end - launch.start
    ours = [launch for launch in trace.kernels if launch.name in OURS]
    return {
        "launches": len(trace.kernels) / BATCHES,
        "gpu_ms": sum(times.values()) / 1e6 / BATCHES,
        "our_launches": len(ours) / BATCHES,
        "our_ms": sum(launch.end - launch.start for launch in ours) / 1e6 / BATCHES,
        "longest_ms": {name: time / 1e6 / BATCHES for name, time in times.most_common(5)},
    }


if __name__ == "__main__":
    run(main)
