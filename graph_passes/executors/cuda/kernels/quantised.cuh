// INT8: what the kernels of quantised operators share. `graph_passes/operators/quantised.py` says what they compute, to the
// bit; every operation below is one of its operations, rounded to nearest even and never contracted (no fma).
#pragma once
#include "common.cuh"

using int8 = signed char;

constexpr int LARGEST = 127;

// To the nearest integer, to the even one of two, and from -127 to 127.
__device__ inline int saturated(float v) { return max(-LARGEST, min(LARGEST, __float2int_rn(v))); }

template <class T> __device__ inline T result(float v) { return from_float<T>(v); }
template <> __device__ inline int8 result<int8>(float v) { return int8(saturated(v)); }

// The epilogue: an accumulator, of which the bias is a part, in the unit of the output. `addend_share`: addend_scale / scale.
template <bool ADD, bool RELU>
__device__ inline float requantised(int accumulator, float multiplier, int addend, float addend_share) {
    float v = __fmul_rn(__int2float_rn(accumulator), multiplier);
    if (ADD) v = __fadd_rn(v, __fmul_rn(__int2float_rn(addend), addend_share));
    if (RELU) v = v < 0 ? 0 : v;
    return v;
}

// The byte `k` of 4 or 16, as a number.
__device__ inline int byte_of(uint32 word, int k) { return int8(word >> 8 * k); }

// Of a convolution: images of H x W pixels with C channels, OH x OW pixels with K channels of output.
struct Convolution {
    uint32 rows;  // N * OH * OW
    int height, width, channels, out_height, out_width, filters;
    int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilate_h, dilate_w;
};

// Where the window of a row of the output begins, and its image; all in pixels, may lie in the padding.
struct Place {
    int image, top, left;

    __device__ Place(const Convolution &c, uint32 row)
        : image(row / c.out_width / c.out_height), top(int(row / c.out_width % c.out_height) * c.stride_h - c.pad_h),
          left(int(row % c.out_width) * c.stride_w - c.pad_w) {}
};
