"""Kernel sizes of DeepBench. Each group of DeepBench is represented by its first, middle and last sizes, because all
sizes would take an hour.

Source: github.com/baidu-research/DeepBench, code/kernels/gemm_problems.h and conv_problems.h, training and server
inference sets, at commits 0201198 and 1a81dcb.
"""

from __future__ import annotations

from typing import NamedTuple


class Gemm(NamedTuple):
    """C (m x n) = A (m x k) times B (k x n), column-major as in BLAS. A and B may each be stored transposed."""

    m: int
    n: int
    k: int
    transpose_a: bool = False
    transpose_b: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        letters = "".join("NT"[each] for each in (self.transpose_a, self.transpose_b))
        return f"{self.m} x {self.n} x {self.k} {letters}"


class Convolution(NamedTuple):
    """A convolution of `n` images with `k` filters; the fields are in the order of conv_problems.h."""

    width: int
    height: int
    c: int
    n: int
    k: int
    filter_width: int
    filter_height: int
    pad_width: int
    pad_height: int
    stride_width: int
    stride_height: int

    @property
    def out_height(self) -> int:
        return (self.height + 2 * self.pad_height - self.filter_height) // self.stride_height + 1

    @property
    def out_width(self) -> int:
        return (self.width + 2 * self.pad_width - self.filter_width) // self.stride_width + 1

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass. Each of the two gradients needs the same number."""
        return 2 * self.n * self.out_height * self.out_width * self.k * self.c * self.filter_height * self.filter_width

    def __str__(self) -> str:
        return (f"{self.n} x {self.height} x {self.width} x {self.c}, {self.k} of {self.filter_height} x "
                f"{self.filter_width}, stride {self.stride_height}")


GEMMS = (
    # speech: recurrent layers, their gradients, the output layer
    Gemm(1760, 16, 1760), Gemm(1760, 128, 1760), Gemm(1760, 7000, 1760), Gemm(1760, 7133, 1760, False, True),
    Gemm(2560, 64, 2560), Gemm(2560, 7000, 2560, True, False),
    Gemm(4096, 16, 4096), Gemm(4096, 128, 4096), Gemm(4096, 7000, 4096), Gemm(4096, 7133, 4096, False, True),
    Gemm(5124, 9124, 2560, True, False), Gemm(35, 8457, 2560),
    Gemm(7680, 64, 2560), Gemm(3072, 128, 1024, True, False), Gemm(7680, 5481, 2560, False, True),
    Gemm(8448, 24000, 2816), Gemm(6144, 48000, 2048), Gemm(512, 24000, 2816), Gemm(1024, 16, 512),
    # language model, speaker identification
    Gemm(1024, 16, 500000), Gemm(1024, 700, 512),
    # inference on servers
    Gemm(7680, 1, 2560), Gemm(8448, 4, 2816), Gemm(6144, 1500, 2048), Gemm(3072, 3000, 1024),
)
CONVOLUTIONS = (
    Convolution(700, 161, 1, 32, 32, 20, 5, 0, 0, 2, 2),  # speech
    Convolution(341, 79, 32, 32, 32, 10, 5, 0, 0, 2, 2),
    Convolution(54, 54, 64, 8, 64, 3, 3, 1, 1, 1, 1),  # faces
    Convolution(224, 224, 3, 16, 64, 3, 3, 1, 1, 1, 1),  # VGG
    Convolution(112, 112, 64, 16, 128, 3, 3, 1, 1, 1, 1),
    Convolution(28, 28, 256, 16, 512, 3, 3, 1, 1, 1, 1),
    Convolution(28, 28, 192, 16, 32, 5, 5, 2, 2, 1, 1),  # GoogLeNet
    Convolution(7, 7, 512, 16, 512, 3, 3, 1, 1, 1, 1),  # ResNet-50
    Convolution(14, 14, 256, 16, 256, 3, 3, 1, 1, 1, 1),
    Convolution(56, 56, 64, 16, 256, 1, 1, 0, 0, 1, 1),
    Convolution(28, 28, 512, 16, 1024, 1, 1, 0, 0, 2, 2),
    Convolution(350, 80, 64, 16, 64, 3, 3, 1, 1, 1, 1),  # speaker identification
)
# Sizes that a CPU computes in a tenth of a second or less.
SMALL_GEMMS = (Gemm(1760, 16, 1760), Gemm(1760, 128, 1760), Gemm(2560, 64, 2560), Gemm(3072, 128, 1024, True, False),
               Gemm(1024, 16, 512), Gemm(1024, 700, 512))
SMALL_CONVOLUTIONS = tuple(size for size in CONVOLUTIONS if size.flops < 3e9)
