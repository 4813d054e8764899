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

// The lowest byte of each.
__device__ inline uint32 lowest_bytes(const uint32 (&words)[4]) {
    return __byte_perm(__byte_perm(words[0], words[1], 0x0040), __byte_perm(words[2], words[3], 0x0040), 0x5410);
}

// The same results as int8, four at once, where each instruction counts. Those that convert between int8 and floats run at an
// eighth of the rate of a sum; here sums do it. What is added to 1.5 * 2^23 is rounded to the nearest integer, to the even one
// of two, and lies in the lowest byte of the float, of which 2^23 + byte is made likewise.
//
// With ReLU all is computed in units of 128, in which no bit differs (what underflows there is far below 1/2): then saturation
// from 0 to 1 is a part of the last instruction, and only 128 is left to become 127.
template <bool RELU> struct Bytes {
    static constexpr float UNIT = RELU ? 128 : 1;
    static constexpr float ROUNDING = 1.5f * (1 << 23) / UNIT;  // its last bit is 1 / UNIT
    static constexpr float HOLDER = (1 << 23) / UNIT;           // and so is this one's

    // A multiplier as `of` takes it.
    __device__ static float scale(float multiplier) { return __fmul_rn(multiplier, 1 / UNIT); }

    // The addend of the byte `k` of `word`, of which each is `more` than the addend, in UNIT.
    __device__ static float addend_of(uint32 word, int k, int more) {
        // A constant would be moved to a register for each byte: that 0 is added to it is not seen by the compiler.
        const uint32 holder = __float_as_uint(HOLDER) + (threadIdx.x >> 20);
        const float held = __uint_as_float(__byte_perm(word, holder, 0x7650 + k));
        return __fadd_rn(held, -(HOLDER + more / UNIT));
    }

    // `addends`: int8, or with SHIFTED bytes that are LARGEST more.
    template <bool ADD, bool SHIFTED = false>
    __device__ static uint32 of(const int (&accumulator)[4], const float (&scale)[4], uint32 addends, float addend_share) {
        const uint32 word = SHIFTED ? addends : addends ^ 0x80808080;
        uint32 rounded[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float v = __fmul_rn(__int2float_rn(accumulator[k]), scale[k]);
            if (ADD) v = __fadd_rn(v, __fmul_rn(addend_of(word, k, SHIFTED ? LARGEST : 128), addend_share));
            v = RELU ? __saturatef(v) : fminf(fmaxf(v, -LARGEST), LARGEST);
            rounded[k] = __float_as_uint(__fadd_rn(v, ROUNDING));
        }
        const uint32 bytes = lowest_bytes(rounded);
        return RELU ? bytes - (bytes >> 7 & 0x01010101) : bytes;
    }
};

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
