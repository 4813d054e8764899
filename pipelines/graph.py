"""The DALI graph, for training and validation, on CPU and GPU; it can also stop after a stage, for measurements.

    encoded image -> decode (training: only a random window) -> resize -> crop, flip, normalise, pad channels -> NHWC

The window is cut from the decoded pixels instead if the images come decoded (decoded.py) or if the window may reach
beyond the image (`crop_padding`). Cutout follows the window. All other augmentations follow the resize, when the images
of a batch have one size: those of plug-ins (by_plugins.py), the policy (policies.py, operations.py), colours, blur,
erasing. On a GPU, the training graph ends with the windows. Our own kernels (augment.py) then resize and augment the
windows from the random numbers that the CPU graph would use. The graph still resizes large windows, because these would
fill the memory while they wait. It also resizes all windows if plug-ins have augmentations.

The loader draws all random numbers from (seed, epoch, batch) and feeds them in; no operator keeps a state. So any batch
of any epoch can be computed directly: resuming needs two numbers, a broken image can be removed without disturbing the
others, and the CPU and GPU graphs see the same windows. For this reason the window is computed here.
`decoders.image_random_crop` decodes in the same way, but draws windows from a generator of its own. Values that do not
depend on the image are computed outside the graph, for a whole batch at once: a DALI operator on the numbers of 512
images takes 0.5 ms.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import nvidia.dali.math as dali_math
from nvidia import dali

from common.quiet import without_lines
from pipelines import augment, by_plugins, policies
from pipelines.operations import Numbers, applied, colour_numbers, mean_grey, numbers, on_those, solarised
from pipelines.transform import MAX_PIXELS, MOST_OPERATIONS, ImageTransform

# DALI makes its operators when it is imported, so type checkers do not know them.
fn: Any = dali.fn
types: Any = dali.types

INTERPOLATIONS = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
# Number of windows, and of rectangles to erase, that are drawn for each training image; the first that fits is taken.
# The number is torchvision's.
NUM_CANDIDATES = 10
BLUR_SIGMA = (0.1, 2.0)  # pixels (SimCLR, arXiv:2002.05709, appendix A)
# torchvision's defaults: the erased fraction of an image's area, and the rectangle's height / width.
ERASED_AREA, ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)
DEFAULT_HW_DECODER_LOAD = 0.65  # DALI's own default
# The GPU's decoders preallocate memory for images of this width and height, in pixels. Larger images are decoded too,
# but cost a pause (none of 900 ImageNet images is larger). Without preallocation, memory is allocated and freed in
# every batch, which stops all work of the GPU: a concurrent training step took 29.8 instead of 26.6 ms (ResNet-50,
# batch 256, one H200).
PREALLOCATED_PIXELS = 2500
# nvImageCodec repeats that its optional libraries for JPEG 2000 and TIFF are not installed; the CPU decodes these
# formats then.
_MISSING_CODECS = re.compile(rb"nvjpeg2k|nvjpeg2000|nvtiff", re.IGNORECASE)
LONGEST_SIDE = 64.0  # largest length of the longer side, in lengths of the shorter side; photographs have at most 10
STAGES = ("read", "decode", "resize", "full")


@dataclass(frozen=True)
class GraphConfig:
    """The settings of a graph."""

    training: bool
    transform: ImageTransform
    image_size: int  # validation: pixels, height and width of the output
    dtype: str  # "float32" or "float16"
    channels: int  # 3, or 4 with zeros in the last channel
    device: str  # "cpu" or "gpu"
    feeds: str = "bytes"  # the form of the input images: encoded "bytes", "paths" of their files, or decoded "pixels"
    cpu_decoder: bool = False  # device "gpu": decode on the CPU, which is faster for thumbnails
    hw_decoder_load: float | None = None  # part of the images for the GPU's JPEG engine
    stage: str = "full"  # last stage of the graph, one of STAGES
    max_pixels: int = MAX_PIXELS  # larger images fail before they are decoded
    large_images: bool = False  # device "gpu", training: resize in the graph, because the windows are too large to keep

    @property
    def is_finished_by_kernels(self) -> bool:
        """Whether the graph ends before the flip, and augment.py does the remaining steps."""
        return self.training and self.device == "gpu" and self.stage == "full"

    @property
    def is_resized_by_kernels(self) -> bool:
        """Whether the graph ends with the windows; otherwise it resizes, and augment.py keeps the size."""
        return self.is_finished_by_kernels and not (self.large_images or self.transform.augment)


class ImageInputs(NamedTuple):
    """The graph's inputs for one batch of N images: lists of N, or NumPy arrays whose first axis is N."""

    image: Any  # uint8: the encoded image, its path, or its pixels (height, width, 3)
    label: Any  # (N,) float32
    # Fields for training only:
    area: Any = None  # (N, NUM_CANDIDATES) float32, the window's fraction of the image's area
    log_ratio: Any = None  # (N, NUM_CANDIDATES) float32, logarithm of the window's width / height in pixels
    position: Any = None  # (N, 2) float32 in [0, 1), the window's x and y as fractions of the free room
    mirror: Any = 0  # (N,) int32, 1 to flip from left to right
    shift: Any = None  # (N, 2) int32, for crop_padding: left and top of the window in the image, in pixels
    hole: Any = None  # (N, 2) float32, for cutout: left and top of the hole, as fractions of the window
    brightness: Any = None  # (N,) float32, factor for the pixels
    colour: Any = None  # (N, 3) float32, contrast factor, saturation factor, hue rotation in degrees
    chance: Any = None  # (N, 4) float32 in [0, 1), which decide on grey, blur, solarise and the interpolation
    sigma: Any = None  # (N,) float32, standard deviation of the blur in pixels
    policy: Any = None  # (N, MOST_OPERATIONS, 4) float32, policies.Draws.uniform
    policy_noise: Any = None  # (N, MOST_OPERATIONS) float32, policies.Draws.normal, for timm's RandAugment
    erasing: Any = None  # (N, 2, NUM_CANDIDATES) float32 in [0, 1), for random erasing: area, and width / height
    erasing_place: Any = None  # (N, 3) float32 in [0, 1): whether to erase, and the rectangle's x and y
    for_plugins: Any = None  # (N, augmentations of plug-ins, by_plugins.NUM_RANDOM) float32 in [0, 1)
    size: Any = None  # (N, 2) float32, height and width of the output in pixels, equal for all images of a batch


class Derived(NamedTuple):
    """Values computed from a batch's random numbers and its size: arrays whose first axis is N, or None if unused."""

    corner: Any = None  # (N, 2) float32, start of the resized region, y and x from 0 to 1; x = 1 mirrors the image
    opposite: Any = None  # (N, 2) float32, end of the resized region
    erased: Any = None  # (N,) bool
    erased_from: Any = None  # (N, 2) float32, the erased rectangle in pixels: top and left
    erased_size: Any = None  # (N, 2) float32, height and width
    coloured: Any = None  # (N,) bool, whether `matrix` and `centre` change the image
    matrix: Any = None  # (N, 3, 4) float32, maps a colour (R, G, B, 1) to the new colour
    centre: Any = None  # (N,) float32, the fraction of the image's mean grey that is added
    blurred: Any = None  # (N,) bool
    solarised: Any = None  # (N,) bool
    cubic: Any = False  # (N,) bool, whether the resize is bicubic
    interpolation: Any = None  # (N,) int32, DALI's number for the interpolation, if it is random


def derived(transform: ImageTransform, inputs: ImageInputs) -> tuple[Derived, list[Numbers]]:
    """Compute the derived values of a batch, and the Numbers of each operation of the policy, in order."""
    height, width = map(int, inputs.size[0])
    values: dict[str, np.ndarray] = {}
    operations: list[Numbers] = []
    if transform.auto_augment != "none":
        draws = policies.Draws(inputs.policy, inputs.policy_noise)
        operations += (numbers(*each, height, width) for each in policies.chosen(transform, draws, height, width))
        values["corner"] = np.stack([0 * inputs.mirror, inputs.mirror], axis=1).astype(np.float32)
        values["opposite"] = 1 - values["corner"]
    if transform.random_erasing:
        names = ("erased", "erased_from", "erased_size")
        values |= zip(names, _rectangle(transform, inputs, height, width), strict=True)
    if transform.changes_colours:
        contrast, saturation, hue = inputs.colour.T
        is_grey = inputs.chance[:, 0] < transform.grey
        matrix, centre = colour_numbers(inputs.brightness, contrast, saturation, hue, is_grey)
        values |= {"matrix": matrix, "centre": centre}
        values["coloured"] = np.abs(matrix - np.eye(3, 4)).max((1, 2)) > 1e-6
    if transform.blur:
        values["blurred"] = inputs.chance[:, 1] < transform.blur
    if transform.solarise:
        values["solarised"] = inputs.chance[:, 2] < transform.solarise
    kind = interpolation(transform)
    if kind == "random":
        values["cubic"] = inputs.chance[:, 3] >= 0.5
        bilinear, bicubic = (np.int32(int(each)) for each in INTERPOLATIONS.values())
        values["interpolation"] = np.where(values["cubic"], bicubic, bilinear)
    else:
        values["cubic"] = np.full(len(inputs.size), kind == "bicubic")
    return Derived(**values), operations


def interpolation(transform: ImageTransform) -> str:
    """How training images are resized: "bilinear", "bicubic" or "random"."""
    kind = transform.train_interpolation
    return transform.interpolation if kind == "same" else kind


def _rectangle(
    transform: ImageTransform, inputs: ImageInputs, height: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whether to erase, and the rectangle's corner and size: torchvision's RandomErasing (Zhong et al.,
    arXiv:1708.04896)."""
    area = (ERASED_AREA[0] + (ERASED_AREA[1] - ERASED_AREA[0]) * inputs.erasing[:, 0]) * (height * width)
    log_ratio = [math.log(ratio) for ratio in ERASED_RATIO]
    ratio = np.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * inputs.erasing[:, 1])
    sizes = np.round(np.stack([np.sqrt(area * ratio), np.sqrt(area / ratio)], axis=2))  # sizes: (N, NUM_CANDIDATES, 2)
    fits = (sizes < (height, width)).all(2)
    size = sizes[np.arange(len(sizes)), fits.argmax(1)]  # the first candidate that fits
    whether, x, y = inputs.erasing_place.T
    start = np.floor(np.stack([y, x], axis=1) * ((height, width) - size + 1))
    is_erased = fits.any(1) & (whether < transform.random_erasing)
    return is_erased, start.astype(np.float32), size.astype(np.float32)


def random_inputs(rng: np.random.Generator, count: int, transform: ImageTransform) -> dict[str, np.ndarray]:
    """Draw the random members of ImageInputs that this transform reads, for `count` images, keyed by their names.

    A seed's result depends on the order of the draws, so the draws of a new augmentation must come last.
    """

    def uniform(*shape: int) -> np.ndarray:
        return rng.random((count, *shape), np.float32)

    def between(low: float, high: float, values: np.ndarray) -> np.ndarray:
        return np.float32(low) + np.float32(high - low) * values

    def around(middle: Any, distance: Any, values: np.ndarray) -> np.ndarray:
        return np.asarray(middle, np.float32) + np.asarray(distance, np.float32) * (2 * values - 1)

    area, log_ratio = rng.random((2, count, NUM_CANDIDATES), np.float32)
    narrowest, widest = map(math.log, transform.random_ratio)
    position = uniform(2)
    padding, colours = transform.crop_padding, transform.changes_colours
    ranges = (transform.contrast, transform.saturation, 360 * transform.hue)
    chance = colours or transform.blur or transform.solarise or transform.train_interpolation == "random"
    policy = transform.auto_augment
    # (name, whether this transform reads it, function that draws its values)
    draws: list[tuple[str, Any, Callable[[], np.ndarray]]] = [
        ("area", not padding, lambda: between(*transform.random_area, area)),
        ("log_ratio", not padding, lambda: between(narrowest, widest, log_ratio)),
        ("position", not padding, lambda: position),
        ("shift", padding, lambda: (position * (2 * padding + 1)).astype(np.int32) - np.int32(padding)),
        ("mirror", True, lambda: rng.integers(0, 2, count, np.int32) * np.int32(transform.mirror)),
        ("hole", transform.cutout, lambda: uniform(2) - np.float32(transform.cutout / 2)),
        ("brightness", colours, lambda: around(1, transform.brightness, uniform())),
        ("colour", colours, lambda: around((1, 1, 0), ranges, uniform(3))),
        ("chance", chance, lambda: uniform(4)),
        ("sigma", transform.blur, lambda: between(*BLUR_SIGMA, uniform())),
        ("policy", policy != "none", lambda: uniform(MOST_OPERATIONS, 4)),
        ("policy_noise", policy == "randaugment-timm",
         lambda: rng.standard_normal((count, MOST_OPERATIONS), np.float32)),
        ("erasing", transform.random_erasing, lambda: uniform(2, NUM_CANDIDATES)),
        ("erasing_place", transform.random_erasing, lambda: uniform(3)),
        ("for_plugins", transform.augment, lambda: uniform(len(transform.augment), by_plugins.NUM_RANDOM)),
    ]
    is_read = {name: bool(read) for name, read, _ in draws}
    while not is_read[draws[-1][0]]:  # draws after the last one that is read are not needed
        draws.pop()
    drawn = {name: draw() for name, _, draw in draws}
    return {name: values for name, values in drawn.items() if is_read[name]}


def build_pipeline(
    config: GraphConfig,
    source: Callable[[], ImageInputs],
    batch_size: int,
    num_threads: int,
    device_id: int = 0,
    prefetch: int = 2,
) -> Any:
    """A built DALI pipeline whose `run()` returns (images, labels); `source` is called once for each batch.

    The arrays that `source` returns are not copied, so `source` must not change them later. Images have shape (N,
    height, width, channels), labels (N,) float32. A stage before "full" returns uint8 images of individual sizes. The
    full graph does so, too, if kernels resize the images (`is_resized_by_kernels`). If kernels finish the images
    (`is_finished_by_kernels`), the arrays of `augment.changes` follow the labels.
    """
    transform = config.transform
    fields, derived_fields, num_operations = _fed(config)
    finishes = config.is_finished_by_kernels
    num_inputs = len(fields) + len(derived_fields) + num_operations * len(Numbers._fields)
    num_inputs += augment.num_arrays(transform) if finishes else 0
    # DALI reads the arrays' memory but holds no reference to the arrays, so this queue does. The pipeline owns the
    # queue through `feed`, and joins its threads before it releases it.
    under_way: deque[tuple[Any, ...]] = deque(maxlen=prefetch + 2)

    def feed() -> tuple[Any, ...]:
        inputs = source()
        fed = tuple(getattr(inputs, name) for name in fields)
        if config.training:
            values, operations = derived(transform, inputs)
            fed += tuple(getattr(values, name) for name in derived_fields)
            if finishes:
                fed += augment.changes(transform, inputs, values, operations)
            else:
                fed += tuple(itertools.chain.from_iterable(operations[:num_operations]))
        under_way.append(fed)
        return fed

    @dali.pipeline_def(
        batch_size=batch_size,
        num_threads=num_threads,
        device_id=device_id if config.device == "gpu" else None,  # type: ignore[arg-type]  # None is "no GPU"
        prefetch_queue_depth=prefetch,
    )
    def graph() -> tuple[Any, ...]:
        nodes = iter(fn.external_source(feed, num_outputs=num_inputs, batch=True, no_copy=True))
        inputs = ImageInputs(**{name: next(nodes) for name in fields})
        values = Derived(**{name: next(nodes) for name in derived_fields})
        operations = [Numbers(*(next(nodes) for _ in Numbers._fields)) for _ in range(num_operations)]
        if config.feeds == "paths":
            inputs = inputs._replace(image=fn.io.file.read(inputs.image))
        beside = [inputs.label, *nodes]  # the remaining nodes are the kernels' arrays
        if config.device == "gpu":
            beside = [node.gpu() for node in beside]
        return _image(config, inputs, values, operations), *beside

    pipeline = graph()
    with (without_lines(_MISSING_CODECS) if config.device == "gpu" else contextlib.nullcontext(),
          warnings.catch_warnings()):
        warnings.filterwarnings("ignore", message=".*is not used")  # a plug-in need not use its random numbers
        pipeline.build()
    return pipeline


def _fed(config: GraphConfig) -> tuple[list[str], list[str], int]:
    """The inputs of the graph: fields of ImageInputs, fields of Derived, and the number of operations.

    Every input costs DALI time in every batch. So values that only kernels read, values of a stage beyond the graph's
    last, and values that this transform does not use are not fed.
    """
    transform = config.transform
    fields = ["image", "label"]
    if not config.training or config.stage == "read":
        return fields, [], 0
    fields += ["shift"] if transform.crop_padding else ["area", "log_ratio", "position"]
    if config.stage == "decode":
        return fields, [], 0
    fields += ["hole"] if transform.cutout and not config.is_finished_by_kernels else []
    if config.is_resized_by_kernels:
        return fields, [], 0
    fields += ["size", *["for_plugins"] * (config.stage == "full" and bool(transform.augment))]
    derived_fields = ["interpolation"] if transform.train_interpolation == "random" else []
    if config.is_finished_by_kernels or config.stage == "resize":
        return fields, derived_fields, 0
    num_operations = policies.num_operations(transform)
    fields += ["sigma"] if transform.blur else []
    if num_operations:
        derived_fields += ["corner", "opposite"]
    else:
        fields.append("mirror")
    if transform.random_erasing:
        derived_fields += ["erased", "erased_from", "erased_size"]
    if transform.changes_colours:
        derived_fields += ["coloured", "matrix", *(["centre"] if transform.contrast else [])]
    derived_fields += ["blurred"] * bool(transform.blur) + ["solarised"] * bool(transform.solarise)
    return fields, derived_fields, num_operations


def _image(config: GraphConfig, inputs: ImageInputs, values: Derived, operations: list[Numbers]) -> Any:
    if config.stage == "read":
        return fn.copy(inputs.image)  # without a copy, nothing would read the bytes of a mapped file
    image = _window(config, inputs)
    if config.stage == "decode":
        return image
    transform = config.transform
    if config.training and transform.cutout and not config.is_finished_by_kernels:
        # Cutout (DeVries and Taylor, arXiv:1708.04552): the hole's centre is anywhere in the image, so part of the hole
        # may lie outside. In training on a GPU our kernels do cutout: DALI's operator frees pinned memory before its
        # copy to the GPU has finished, and batches were wrong while other processes used the GPU (DALI 2.4).
        hole = {"anchor": inputs.hole, "shape": 2 * [transform.cutout], "axis_names": "WH", "normalized": True}
        image = fn.erase(image, **hole, fill_value=transform.mean_colour)
    if config.is_resized_by_kernels:
        return image
    # Both resizes antialias when they shrink: training and prediction must see equal pictures.
    mirror = inputs.mirror
    if config.training:
        kind = INTERPOLATIONS.get(interpolation(transform)) or fn.cast(values.interpolation, dtype=types.INTERP_TYPE)
        flip = {}
        if operations:
            # torchvision flips before the policy, whose operations have a direction. Flipping in the resize is free.
            flip = {"roi_start": values.corner, "roi_end": values.opposite, "roi_relative": True}
            mirror = 0
        image = fn.resize(image, size=inputs.size, interp_type=kind, **flip)
    else:
        kind = INTERPOLATIONS[transform.interpolation]
        image = fn.resize(image, resize_shorter=shorter_side(config), interp_type=kind)
    if config.stage == "resize":
        return image
    if config.training:
        image = by_plugins.changed(transform.augment, image, inputs.for_plugins)
    if config.is_finished_by_kernels:
        return image
    for each in operations:
        image = applied(image, each, policies.families(transform), policies.fill(transform), inputs.size)
    if config.training:
        image = _changed(transform, image, inputs, values)
    return fn.crop_mirror_normalize(
        image,
        **({} if config.training else {"crop": (config.image_size, config.image_size)}),
        mirror=mirror,
        mean=transform.mean,
        std=transform.std,
        dtype=types.FLOAT16 if config.dtype == "float16" else types.FLOAT,
        output_layout="HWC",
        pad_output=config.channels == 4,
    )


def _changed(transform: ImageTransform, image: Any, inputs: ImageInputs, values: Derived) -> Any:
    """Apply the augmentations that follow the policy, on the CPU, to images of the network's input size."""

    def colour(image: Any, matrix: Any) -> Any:
        return fn.coord_transform(image, MT=matrix, dtype=types.UINT8)

    def colour_and_contrast(image: Any, matrix: Any, centre: Any) -> Any:
        moved = fn.coord_transform(image, MT=matrix, dtype=types.FLOAT) + centre * mean_grey(image)
        return fn.cast(moved, dtype=types.UINT8)

    def blur(image: Any, sigma: Any) -> Any:
        return fn.gaussian_blur(image, sigma=sigma)

    def erase(image: Any, start: Any, size: Any) -> Any:
        return fn.erase(image, anchor=start, shape=size, axis_names="HW", fill_value=transform.mean_colour)

    if transform.contrast:
        image = on_those(values.coloured, colour_and_contrast, image, values.matrix, values.centre)
    elif transform.changes_colours:
        image = on_those(values.coloured, colour, image, values.matrix)
    if transform.blur:
        image = on_those(values.blurred, blur, image, inputs.sigma)
    if transform.solarise:
        image = on_those(values.solarised, solarised, image)
    if transform.random_erasing:
        image = on_those(values.erased, erase, image, values.erased_from, values.erased_size)
    return image


def _window(config: GraphConfig, inputs: ImageInputs) -> Any:
    """The decoded window of each image, on the graph's device."""
    padding = config.training and config.transform.crop_padding > 0
    if config.feeds == "pixels":
        # Thumbnails are copied whole and cut on the graph's device: one copy to the GPU, and less work for the CPU.
        image = fn.reinterpret(inputs.image, layout="HWC")
        image = image.gpu() if config.device == "gpu" else image
        if config.training and not padding:
            shape = inputs.image.shape(dtype=types.FLOAT)
            image = fn.slice(image, *_random_window(shape[0], shape[1], inputs), axis_names="WH")
    else:
        image = _decoded(config, inputs, whole=padding or not config.training)
    if padding:  # He et al., arXiv:1512.03385, section 4.2
        window = {"start": inputs.shift, "rel_shape": [1.0, 1.0], "axis_names": "WH"}
        image = fn.slice(image, **window, out_of_bounds_policy="pad", fill_values=config.transform.mean_colour)
    return image


def _decoded(config: GraphConfig, inputs: ImageInputs, whole: bool) -> Any:
    """Decode the whole image or a random window of it, onto the graph's device."""
    # The header is read even if the window is the whole image, so that an input that is not an image, or is too large,
    # fails here. The check is needed because the decoder of DALI 2.4 reads freed memory when it refuses several images
    # of one batch.
    shape = fn.peek_image_shape(inputs.image, dtype=types.FLOAT)
    is_too_large = shape[0] * shape[1] > float(config.max_pixels)
    # shape[3] does not exist, so reading it raises an error: DALI has no other way to raise one
    height, width = shape[3 * is_too_large], shape[1]
    start, size = _whole(height, width, config) if whole else _random_window(height, width, inputs)
    image = fn.decoders.image_slice(
        inputs.image,
        start,
        size,
        device="mixed" if config.device == "gpu" and not config.cpu_decoder else "cpu",
        hw_decoder_load=DEFAULT_HW_DECODER_LOAD if config.hw_decoder_load is None else config.hw_decoder_load,
        preallocate_width_hint=PREALLOCATED_PIXELS,
        preallocate_height_hint=PREALLOCATED_PIXELS,
        output_type=types.RGB,
    )
    return image.gpu() if config.device == "gpu" and config.cpu_decoder else image


def _whole(height: Any, width: Any, config: GraphConfig) -> tuple[Any, Any]:
    """Start and size of the window that holds the whole image, as fractions (x, y); in validation, the window of a very
    long image holds only its middle."""
    most = longest_side(config)
    if not most:
        zero = 0.0 * fn.stack(width, height)
        return zero, zero + 1.0
    size = dali_math.min(1.0, most * fn.stack(height / width, width / height))
    return 0.5 - 0.5 * size, size


def longest_side(config: GraphConfig) -> float:
    """The largest longer / shorter side at which a validation image is resized whole; 0 if the graph does not resize.

    A longer image loses its ends before the resize: the resized image would have millions of pixels, of which only the
    middle is used. The limit also keeps the resized image within `max_pixels`.
    """
    if config.training or config.stage in ("read", "decode"):
        return 0.0
    return max(2.0, min(LONGEST_SIDE, config.max_pixels / shorter_side(config) ** 2))


def shorter_side(config: GraphConfig) -> int:
    """The length of an image's shorter side after the resize of validation, in pixels."""
    return max(config.image_size, round(config.image_size / config.transform.val_crop_fraction))


def middle(image: np.ndarray, most: float) -> np.ndarray:
    """Cut the window that `_whole` chooses from a decoded image (height, width, 3)."""
    if max(image.shape[:2]) <= most * min(image.shape[:2]):
        return image
    height, width = image.shape[:2]
    size = np.minimum(1.0, most * np.array([width / height, height / width]))
    corners = 0.5 - 0.5 * size, 0.5 + 0.5 * size
    (top, left), (bottom, right) = (np.floor(corner * (height, width) + 0.5).astype(int) for corner in corners)
    return np.ascontiguousarray(image[top:bottom, left:right])


def _random_window(height: Any, width: Any, inputs: ImageInputs) -> tuple[Any, Any]:
    """Start and size of the window to decode, both (x, y), as fractions of the image.

    Each candidate has a random area and a random aspect ratio. The first candidate that fits into the image is taken
    (Szegedy et al., Going Deeper with Convolutions, 2014, section 6). If none fits, the last candidate is cut at the
    border. The window always has at least one pixel.
    """
    aspect = dali_math.exp(inputs.log_ratio) * (height / width)  # in fractions of the image, not in pixels
    w = dali_math.sqrt(inputs.area * aspect)
    h = dali_math.sqrt(inputs.area / aspect)
    # The index of the first candidate that fits: candidates that do not fit are moved behind by adding NUM_CANDIDATES.
    index = types.Constant(np.arange(NUM_CANDIDATES, dtype=np.float32), device="cpu")
    too_big = fn.cast((w > 1) | (h > 1), dtype=types.FLOAT)
    first = fn.reductions.min(index + NUM_CANDIDATES * too_big)
    chosen = fn.cast(index == dali_math.min(first, NUM_CANDIDATES - 1.0), dtype=types.FLOAT)
    size = fn.stack(fn.reductions.sum(w * chosen), fn.reductions.sum(h * chosen))
    # slightly more than a pixel, because DALI rounds both ends of the window, and these must differ
    pixel = 1.01 / fn.stack(width, height)
    size = dali_math.min(dali_math.max(size, pixel), 1.0)
    return inputs.position * (1.0 - size), size
