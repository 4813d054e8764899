// INT8: shared by the kernels of quantised operators. `graph_passes/operators/quantised.py` defines the results to the
// bit. Every operation below corresponds to an operation in that file, rounded to nearest even and never contracted (no
// fma).
#pragma once
#include "common.cuh"

using int8 = signed char;

constexpr int LARGEST = 127;

// Rounds to the nearest integer, ties to even, and clamps to -127 ... 127.
__device__ inline int saturated(float v) { return max(-LARGEST, min(LARGEST, __float2int_rn(v))); }

template <class T> __device__ inline T result(float v) { return from_float<T>(v); }
template <> __device__ inline int8 result<int8>(float v) { return int8(saturated(v)); }

// The epilogue: converts an accumulator, which includes the bias, to the unit of the output. `addend_share` is addend_scale /
// scale.
template <bool ADD, bool RELU>
__device__ inline float requantised(int accumulator, float multiplier, int addend, float addend_share) {
    float v = __fmul_rn(__int2float_rn(accumulator), multiplier);
    if (ADD) v = __fadd_rn(v, __fmul_rn(__int2float_rn(addend), addend_share));
    if (RELU) v = v < 0 ? 0 : v;
    return v;
}

// Byte `k` of a word, as a signed number.
__device__ inline int byte_of(uint32 word, int k) { return int8(word >> 8 * k); }

// Packs the lowest byte of each word.
__device__ inline uint32 lowest_bytes(const uint32 (&words)[4]) {
    return __byte_perm(__byte_perm(words[0], words[1], 0x0040), __byte_perm(words[2], words[3], 0x0040), 0x5410);
}

// The results of `requantised` as int8, four at once, for kernels in which each instruction counts. Instructions that convert
// between int8 and float run at an eighth of the rate of an addition, so additions do the conversions. Adding 1.5 * 2^23
// rounds a float to the nearest integer, ties to even, and leaves it in the float's lowest byte. In the other direction, a
// byte becomes the float 2^23 + byte.
//
// With ReLU, all values are in units of 128. This changes no bit, because values that underflow are far below 1/2. Then
// the last instruction also saturates to 0 ... 1, and only 128 remains to be changed to 127.
template <bool RELU> struct Bytes {
    static constexpr float UNIT = RELU ? 128 : 1;
    static constexpr float ROUNDING = 1.5f * (1 << 23) / UNIT;  // its last bit is 1 / UNIT
    static constexpr float HOLDER = (1 << 23) / UNIT;           // its last bit is 1 / UNIT, too

    // A multiplier in the unit that `of` expects.
    __device__ static float scale(float multiplier) { return __fmul_rn(multiplier, 1 / UNIT); }

    // The addend in byte `k` of `word`, in UNIT. The bytes have an offset of `more`.
    __device__ static float addend_of(uint32 word, int k, int more) {
        // The compiler would move a constant to a register for each byte. It cannot see that the term added here is 0.
        const uint32 holder = __float_as_uint(HOLDER) + (threadIdx.x >> 20);
        const float held = __uint_as_float(__byte_perm(word, holder, 0x7650 + k));
        return __fadd_rn(held, -(HOLDER + more / UNIT));
    }

    // `addends` are int8; with SHIFTED, bytes with an offset of LARGEST.
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

// Sizes of a convolution: the input has H x W pixels with C channels, the output OH x OW pixels with K channels.
struct Convolution {
    uint32 rows;  // N * OH * OW
    int height, width, channels, out_height, out_width, filters;
    int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilate_h, dilate_w;
};

// Image and first pixel of the window of an output row. The pixel may lie in the padding.
struct Place {
    int image, top, left;

    __device__ Place(const Convolution &c, uint32 row)
        : image(row / c.out_width / c.out_height), top(int(row / c.out_width % c.out_height) * c.stride_h - c.pad_h),
          left(int(row % c.out_width) * c.stride_w - c.pad_w) {}
};
