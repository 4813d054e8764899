// The gradient at the input of BatchNorm + ReLU + 3x3 max pooling with stride 2. Shared by the kernel that writes this
// gradient and by the kernels that consume it immediately. See batch_norm_relu_max_pool.cu.
#pragma once
#include "batch_norm.cuh"

constexpr int KERNEL = 3, STRIDE = 2, PAD = 1;
constexpr uint8 NOBODY = 255;

struct Image { int height, width, out_height, out_width; };

// Image, row and column of an output pixel.
struct Place {
    int image, row, column;

    __device__ Place(uint32 pixel, int height, int width)
        : image(pixel / width / height), row(pixel / width % height), column(pixel % width) {}
};

__device__ inline uint32 winner_of(uint2 places, int k) { return (k < 4 ? places.x : places.y) >> 8 * (k % 4) & 0xff; }

// dx as in batch_norm_backward_apply, for a thread's 8 channels.
template <class T> struct PoolGradient {
    float scale[VEC], b[VEC], c[VEC];

    __device__ PoolGradient(const float *saved, const float *gamma, const float *dgamma, const float *dbeta, uint32 rows,
                            int channel, int channels) {
        const Backward of(saved, gamma, nullptr, channel, channels);
        const InputGradient to(of, dgamma, dbeta, rows, channel);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            scale[k] = of.scale[k];
            b[k] = to.b[k];
            c[k] = to.c[k];
        }
    }

    // dx of the 2x2 input pixels that start at row 2 * square_row and column 2 * square_column. All four lie in the
    // same four windows, so each window is read once for four pixels. Calls `store(row, column, inside, dx)` for each
    // pixel, with row and column 0 or 1. A pixel has `pitch` vectors; this thread processes the vector with index
    // `vector`.
    template <class Store>
    __device__ void square(const Packed<T> *x, const Packed<T> *dz, const uint2 *winner, int image, int square_row,
                           int square_column, Image size, int pitch, int vector, Store store) const {
        uint2 places[2][2];
        Packed<T> packed_dz[2][2], packed[2][2];
        bool inside[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int window_row = square_row + i, window_column = square_column + j;
                places[i][j] = {~0u, ~0u};
                if (window_row < size.out_height && window_column < size.out_width) {
                    const uint32 window = (image * size.out_height + window_row) * size.out_width + window_column;
                    places[i][j] = winner[window * pitch + vector];
                    packed_dz[i][j] = dz[window * pitch + vector];
                }
                const int row = 2 * square_row + i, column = 2 * square_column + j;
                inside[i][j] = row < size.height && column < size.width;
                if (inside[i][j]) packed[i][j] = x[((image * size.height + row) * size.width + column) * pitch + vector];
            }
        }
        apply(packed, packed_dz, places);
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int s = 0; s < 2; ++s) store(r, s, inside[r][s], packed[r][s]);
    }

    // Replaces x of the 2x2 pixels by dx, from their four windows.
    __device__ void apply(Packed<T> (&x)[2][2], const Packed<T> (&dz)[2][2], const uint2 (&places)[2][2]) const {
#pragma unroll
        for (int k = 0; k < VEC; k += 2) {
            float v[2][2][2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float g[2][2];
                uint32 winner[2][2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        g[i][j] = to_float(dz[i][j].element[k + e]);
                        winner[i][j] = winner_of(places[i][j], k + e);
                    }
#pragma unroll
                for (int r = 0; r < 2; ++r)
#pragma unroll
                    for (int s = 0; s < 2; ++s) {
                        v[r][s][e] = b[k + e] * to_float(x[r][s].element[k + e]) + c[k + e];
#pragma unroll
                        // if two windows overlap, the second window covers only the second pixel
                        for (int i = 0; i <= r; ++i)
#pragma unroll
                            for (int j = 0; j <= s; ++j)
                                if (winner[i][j] == (r + PAD - STRIDE * i) * KERNEL + s + PAD - STRIDE * j)
                                    v[r][s][e] += scale[k + e] * g[i][j];
                    }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int s = 0; s < 2; ++s) from_floats(v[r][s][0], v[r][s][1], x[r][s].element + k);
        }
    }
};
