"""Depthwise convolutions against float64 NumPy, on a GPU and on the emulated one: random values, odd sizes, all dtypes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_arrays import DTYPES, PRECISION
from test_convnet_kernels import check_operator, normal, tools  # noqa: F401

from graph_passes.executors.cuda.kernels.depthwise import CHANNELS, COLUMNS, KERNELS, STRIDES, Depthwise
from graph_passes.executors.cuda.toolchain import Toolchain

# Images, height, width, channels; padding. Sizes that strips and pieces do not divide, windows that lie beside the
# images, channels that leave threads over, and more channels than a block has.
SIZES = {"odd": ((3, 13, 11, 24), "same"), "wide": ((2, 9, 37, 40), "same"), "small": ((5, 3, 2, 8), "same"),
         "unpadded": ((2, 15, 10, 16), "none"), "padded more": ((2, 8, 7, 8), "most"),
         "high": ((1, 61, 8, 16), "same"), "many channels": ((1, 7, 7, 328), "same")}


def attributes(kernel: int, stride: int, padding: str, channels: int) -> dict[str, Any]:
    rows, columns = {"same": (kernel // 2,) * 2, "none": (0, 0), "most": (kernel - 1, 1)}[padding]
    return {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "pad": (rows, columns), "num_filter": channels,
            "num_group": channels, "layout": "NHWC"}


def check(tools: Toolchain, dtype: str, kernel: int, stride: int, size: str, rng: np.random.Generator) -> None:  # noqa: F811
    """All four operators."""
    (images, height, width, channels), padding = SIZES[size]
    attrs = attributes(kernel, stride, padding, channels)
    x, w = (images, height, width, channels), (channels, kernel, kernel, 1)
    out = tuple((length + 2 * pad - kernel) // stride + 1
                for length, pad in zip((height, width), attrs["pad"], strict=True))
    dy, pixels = (images, *out, channels), images * out[0] * out[1]
    taps = kernel * kernel
    check_operator(tools, dtype, "DepthwiseForward", {**attrs, "no_bias": True}, [x, w], rng, normal, terms=taps)
    check_operator(tools, dtype, "DepthwiseForward", {**attrs, "no_bias": False}, [x, w, (channels,)], rng, normal,
                   terms=taps)
    # The sums are those of y as it is stored, about one of its values: a rounding of each squared distance to that. In
    # fp32, the error of that value, a few roundings of sqrt(taps), shifts all distances of up to 3 sqrt(taps).
    check_operator(tools, dtype, "DepthwiseStatistics", {**attrs, "no_bias": True}, [x, w], rng, normal,
                   terms=taps * pixels * max(6, PRECISION[dtype] * 2.0**22))
    check_operator(tools, dtype, "DepthwiseDgrad", {**attrs, "no_bias": True, "data_shape": x}, [dy, w], rng, normal,
                   terms=taps)
    check_operator(tools, dtype, "DepthwiseWgrad", {**attrs, "no_bias": True}, [dy, x], rng, normal, terms=pixels)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("dtype", ["float16"])
def test_depthwise(tools: Toolchain, dtype: str, stride: int, kernel: int, rng: np.random.Generator) -> None:  # noqa: F811
    check(tools, dtype, kernel, stride, "odd", rng)


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_depthwise_of_all_sizes(tools: Toolchain, dtype: str, stride: int, kernel: int, size: str,  # noqa: F811
                                rng: np.random.Generator) -> None:
    if size == "unpadded" or SIZES[size][0][1] + 2 * (kernel // 2) >= kernel:
        check(tools, dtype, kernel, stride, size, rng)


def test_every_pixel_has_one_thread(rng: np.random.Generator) -> None:
    """Strips and pieces cover the result of each group of channels without gaps or overlaps."""
    for _ in range(300):
        kernel, stride = int(rng.choice(KERNELS)), int(rng.choice(STRIDES))
        images, height, width = (int(size) for size in rng.integers(1, 60, 3))
        channels = 8 * int(rng.integers(1, 200))
        dilation = 1 if stride == 2 else int(rng.choice(STRIDES))
        offset = tuple(int(each) for each in rng.integers(1 - kernel, 1, 2))
        division = Depthwise(kernel, (images, height, width, channels),
                             (images, height, width, channels), offset, stride, dilation)
        walk = division.walk
        assert walk.rows % dilation == 0 and walk.strips * walk.rows >= height - walk.first_row
        assert (walk.strips - 1) * walk.rows < height - walk.first_row
        assert walk.pieces * COLUMNS[kernel] >= width - walk.first_column
        blocks, parts, _ = division.grid()
        assert blocks * (128 // walk.groups) >= walk.items and walk.groups <= 64
        assert parts * walk.groups * CHANNELS[kernel] >= channels
        assert (parts - 1) * walk.groups * CHANNELS[kernel] < channels
        first = offset[0] + walk.first_row * stride
        assert dilation == 1 or first == 1 - kernel
