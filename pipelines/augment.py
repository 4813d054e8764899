"""Augmentation on a GPU: a few launches of our own kernels (augment.cu) augment a whole decoded batch.

DALI has one operator for each operation, and each operator launches its own kernels: a policy's fifteen operations took
about sixty launches, and RandAugment took twice that. Here one launch resizes all windows of a batch, whatever their
sizes. Then each round is one launch that applies to every image of the batch the operation drawn for that image. The
last round also erases, normalises and writes the batch; without rounds, the resize launch does that. So plain crops and
flips take one launch. TrivialAugment takes three launches, of which one measures the images that need statistics.
RandAugment takes five.

On the CPU, graph.py passes the numbers that describe the operations (operations.py) to DALI's operators instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipelines import policies
from pipelines.operations import FAMILIES, Numbers
from pipelines.transform import ImageTransform

SOURCE = Path(__file__).with_name("augment.cu")
# A round applies one of these to an image: an operation's family, or one of the augmentations that follow the policy.
FAMILY_NUMBER = {
    name: number
    for number, name in enumerate(("identity", *dict.fromkeys(FAMILIES.values()), "colours", "blur_x", "blur_y"))
}
MEASURED = {"contrast", "auto_contrast", "equalize"}  # families of operations that need statistics of the whole image
# Layouts of the structs Window, Change and Finish in augment.cu.
WINDOW = np.dtype([("address", np.uint64), ("height", np.int32), ("width", np.int32)])
CHANGE = np.dtype([
    ("family", np.int32), ("place", np.float32, (2, 3)), ("colour", np.float32, (3, 4)), ("centre", np.float32),
    ("factor", np.float32), ("threshold", np.int32), ("mask", np.int32), ("lift", np.int32), ("sigma", np.float32),
])  # fmt: skip
FINISH = np.dtype([
    ("mirror", np.int32), ("cubic", np.int32), ("hole", np.float32, 2), ("solarise", np.int32), ("erased", np.int32, 4),
])  # fmt: skip
STATISTICS_BYTES = 4 + 256  # bytes of the statistics of one channel of one image
BLOCK, MEASURING_BLOCK = 256, 1024  # threads of a block
RESIZED_ROWS = 8  # output rows per block: ROWS in augment.cu


def measured_rounds(transform: ImageTransform) -> list[bool]:
    """One entry per round: whether some images may need statistics before the round. Empty if no round follows the
    resize.
    """
    is_measured = transform.auto_augment != "none" and not MEASURED.isdisjoint(policies.families(transform))
    rounds = [is_measured] * policies.num_operations(transform)
    if transform.changes_colours:
        rounds.append(transform.contrast > 0)
    rounds += 2 * [False] * (transform.blur > 0)
    return rounds


def num_arrays(transform: ImageTransform) -> int:
    """The number of arrays that `changes` returns."""
    return 2 if measured_rounds(transform) else 1


def changes(
    transform: ImageTransform, inputs: Any, values: Any, operations: Iterable[Numbers]
) -> tuple[np.ndarray, ...]:
    """The augmentation of each of N images in the layout that the kernels read, as bytes.

    Returns (N,) of FINISH and, if there are rounds, (N, rounds) of CHANGE. `inputs` and `values` are the ImageInputs
    and Derived of graph.py.
    """
    count = len(inputs.size)
    rounds = [_operation(each) for each in operations]
    if transform.changes_colours:
        colours = np.zeros(count, CHANGE)
        colours["family"] = np.where(values.coloured, FAMILY_NUMBER["colours"], 0)
        colours["colour"], colours["centre"] = values.matrix, values.centre
        rounds.append(colours)
    if transform.blur:
        for name in ("blur_x", "blur_y"):
            blur = np.zeros(count, CHANGE)
            blur["family"] = np.where(values.blurred, FAMILY_NUMBER[name], 0)
            blur["sigma"] = inputs.sigma
            rounds.append(blur)
    finish = np.zeros(count, FINISH)
    finish["mirror"], finish["cubic"] = inputs.mirror, values.cubic
    if transform.cutout:
        finish["hole"] = inputs.hole
    if transform.solarise:
        finish["solarise"] = values.solarised
    if transform.random_erasing:
        top, left = values.erased_from.T
        height, width = values.erased_size.T
        if transform.auto_augment == "none":  # the rectangle was drawn for the unflipped image, as on the CPU
            left = np.where(inputs.mirror, inputs.size[:, 1] - width - left, left)
        corners = np.stack([top, left, top + height, left + width], axis=1)
        finish["erased"] = np.where(values.erased[:, None], corners, 0)
    arrays = [finish, np.stack(rounds, axis=1)] if rounds else [finish]
    return tuple(array.view(np.uint8).reshape(count, -1) for array in arrays)


def _operation(these: Numbers) -> np.ndarray:
    """One policy operation on N images, as (N,) of CHANGE."""
    change = np.zeros(len(these.factor), CHANGE)
    for name in dict.fromkeys(FAMILIES.values()):
        change["family"] += FAMILY_NUMBER[name] * getattr(these, name)
    for name in ("place", "colour", "factor", "threshold", "mask", "lift"):
        change[name] = getattr(these, name)
    return change


class Device(Protocol):
    """The device that runs the kernels: GpuDevice of gpu.py."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Allocate an array on the device."""

    def address(self, array: Any) -> int:
        """The device address at which an array begins."""

    def upload(self, array: Any, values: np.ndarray) -> None:
        """Copy `values` into a device array of equal size in bytes; ordered with the launches."""

    def launch(self, kernel: str, grid: tuple[int, int], block: int, *arguments: int | np.int32) -> None:
        """Queue a kernel; kernels run in the order of the calls. An `int` argument is an address."""

    def synchronize(self) -> None:
        """Wait until all queued kernels have finished."""


class Augmenter:
    """Makes batches of decoded windows: (N, H, W, channels), resized and normalised, in the dtype of the batch."""

    def __init__(self, transform: ImageTransform, dtype: str, channels: int, device: Device) -> None:
        self._measured = measured_rounds(transform)
        self._dtype, self._channels, self._device = dtype, channels, device

    def __call__(self, size: tuple[int, int], windows: np.ndarray, finishes: int, changes: int = 0) -> Any:
        """Make the batch of `size` (H, W) from N decoded windows; the batch is complete when this method returns.

        `windows` is (N,) of WINDOW, with uint8 pixels. `finishes` and `changes` are the device addresses of the arrays
        that the function `changes` returned for these windows.
        """
        count, (height, width) = len(windows), size
        device, rounds, shape = self._device, len(self._measured), (np.int32(height), np.int32(width))
        batch = device.empty((count, *size, self._channels), self._dtype)
        placed = device.empty((windows.nbytes,), "uint8")
        device.upload(placed, windows)
        statistics = device.empty((count * 3 * STATISTICS_BYTES,), "uint8") if any(self._measured) else None
        # Two buffers that alternate: they hold the resized images, then the output of each round except the last.
        between = [device.empty((count, *size, 3), "uint8") for _ in range(min(rounds, 2))]
        measurements = device.address(statistics) if statistics is not None else 0
        images = device.address(between[0] if between else batch)
        device.launch("resize_images" if between else "resize_and_finish", (-(-height // RESIZED_ROWS), count), BLOCK,
                      device.address(placed), finishes, images, *shape)
        blocks = -(-height * width // BLOCK)
        for number, is_measured in enumerate(self._measured):
            which = np.int32(number), np.int32(rounds)
            if is_measured:
                device.launch("measure_images", (3, count), MEASURING_BLOCK, images, changes, measurements,
                              np.int32(height * width), *which)
            read = images, changes, measurements
            if number < rounds - 1:
                images = device.address(between[(number + 1) % 2])
                device.launch("change_images", (blocks, count), BLOCK, *read, images, *shape, *which)
            else:
                device.launch("finish_images", (blocks, count), BLOCK, *read, finishes, device.address(batch), *shape,
                              *which)
        device.synchronize()
        return batch


def source_code(transform: ImageTransform, dtype: str, channels: int) -> str:
    """augment.cu, preceded by definitions of the constants that augment.cu needs."""

    def floats(name: str, values: Iterable[float]) -> str:
        return f"__constant__ float {name}[] = {{{', '.join(f'{value:.9e}f' for value in values)}}};"

    head = [
        "#define HALF" if dtype == "float16" else "",
        f"constexpr int CHANNELS = {channels}, BLOCK = {BLOCK};",
        f"enum Family {{ {', '.join(name.upper() for name in FAMILY_NUMBER)} }};",
        floats("MEAN", transform.mean),
        floats("PER_STD", (1 / std for std in transform.std)),
        floats("MEAN_COLOUR", transform.mean_colour),
        f"constexpr float FILL = {policies.fill(transform):.1f}f;",
        f"constexpr float CUTOUT = {transform.cutout:.9e}f;",
        f"constexpr bool SOLARISES = {str(bool(transform.solarise)).lower()};",
        f"constexpr bool ERASES = {str(bool(transform.random_erasing)).lower()};",
    ]
    return "\n".join([*head, SOURCE.read_text()])
