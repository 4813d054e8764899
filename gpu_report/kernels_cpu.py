"""Kernels on the CPU, in fp32, through MXNet as in the mxnet executor: a small part of the kernels for a GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np

from common.mxnet_compat import mx
from gpu_report.deepbench import Convolution, Gemm
from train.devices import Placement


def open_machine(placement: Placement) -> CpuMachine:
    return CpuMachine()


class CpuMachine:
    """Implements `kernels.Machine` on the CPU."""

    precisions = ("fp32",)
    copy_bytes = 256 << 20  # larger than any cache

    def close(self) -> None:
        """Does nothing: this machine holds no memory between timings."""

    @contextlib.contextmanager
    def copy(self) -> Iterator[Callable[[], float]]:
        source = np.ones(self.copy_bytes, np.uint8)
        target = np.zeros_like(source)
        yield lambda: milliseconds(lambda: np.copyto(target, source))

    @contextlib.contextmanager
    def gemm(self, size: Gemm, precision: str) -> Iterator[Callable[[], float]]:
        # Row-major C' = B' A' is column-major C = A B.
        a = _random((size.m, size.k) if size.transpose_a else (size.k, size.m))
        b = _random((size.k, size.n) if size.transpose_b else (size.n, size.k))

        def product() -> None:
            mx.nd.dot(b, a, transpose_a=size.transpose_b, transpose_b=size.transpose_a).wait_to_read()

        yield lambda: milliseconds(product)

    @contextlib.contextmanager
    def convolution(self, size: Convolution, direction: str, precision: str) -> Iterator[Callable[[], float]]:
        data = _random((size.n, size.c, size.height, size.width))
        weight = _random((size.k, size.c, size.filter_height, size.filter_width))
        gradient = _random((size.n, size.k, size.out_height, size.out_width))
        wanted = weight if direction == "weight gradient" else data

        def forward() -> mx.nd.NDArray:
            return mx.nd.Convolution(data, weight, no_bias=True, num_filter=size.k,
                                     kernel=(size.filter_height, size.filter_width),
                                     stride=(size.stride_height, size.stride_width),
                                     pad=(size.pad_height, size.pad_width))

        def backward() -> float:
            """Time the backward pass, which computes the gradients of the arrays that have a gradient attached."""
            with mx.autograd.record():
                result = forward()
            result.wait_to_read()

            def gradients() -> None:
                result.backward(gradient)
                wanted.grad.wait_to_read()

            return milliseconds(gradients)

        if direction == "forward":
            yield lambda: milliseconds(lambda: forward().wait_to_read())
        else:
            wanted.attach_grad()
            yield backward


def _random(shape: tuple[int, ...]) -> mx.nd.NDArray:
    return mx.nd.random.uniform(-1, 1, shape)


def milliseconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)
