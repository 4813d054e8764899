// 1x1 convolutions on tensor cores: what dgrad_reduce.cu and norm_backward.cu share.
//
//     out[row, c] = sum over k of a[row, k] * w[k, c]          rows = N*H*W, k < K, c < C, `columns` = C
//
// The layers that these kernels are for are bound by memory, so they are about bytes in flight, not about peak TFLOP/s: a
// block keeps its share of the weights in shared memory and walks over tiles of rows, while the next ones are copied there.
#pragma once
#include "batch_norm.cuh"
#include "warpgroup.cuh"

template <class T> __device__ inline uint4 words(const Packed<T> &v) { return *reinterpret_cast<const uint4 *>(&v); }

template <class T> __device__ inline Packed<T> packed(const uint4 &v) { return *reinterpret_cast<const Packed<T> *>(&v); }

// A thread's 8 columns of one row, out of its products of four 8-column matrices. `high`: of the row 8 further down.
__device__ inline void columns_of(const float (*products)[4], bool high, float (&v)[VEC]) {
#pragma unroll
    for (int k = 0; k < VEC; ++k) v[k] = products[k / 2][(high ? 2 : 0) + k % 2];
}

// Weights (K, C), `COLUMNS` of them from column `first` on, as rows of k for `multiply_rows`, and in such an order that the 8
// columns of one row of the product that a thread has are neighbours: of 32 columns, those that thread t of a quad calls
// 2t, 2t + 1 of product j are 8t + 2j, 8t + 2j + 1.
template <class T, int K, int COLUMNS>
__device__ inline void load_weights(uint4 (&weights)[K / 64][COLUMNS * 8], const T *w, int first, int columns) {
    for (int i = threadIdx.x; i < K / VEC * COLUMNS; i += blockDim.x) {
        const int c = i % COLUMNS, vector = i / COLUMNS, n = first + c / 32 * 32 + c % 8 / 2 * 8 + c % 32 / 8 * 2 + c % 2;
        Packed<T> v{};
        if (n < columns)
#pragma unroll
            for (int j = 0; j < VEC; ++j) v.element[j] = w[size_t(vector * VEC + j) * columns + n];
        weights[vector / 8][swizzled(c, vector % 8)] = words(v);
    }
}

// Adds up N sums per column over a block's warps, each with OWN times 32 of its COLUMNS columns, from `column` on, in one of
// PARTS parts of its rows, and over all blocks of the same columns, as `reduce_parts`, whose `of_part` is `shared`.
template <int THREADS, int PARTS, int COLUMNS, int OWN, int N, class Finish>
__device__ void reduce_columns(float (&sums)[OWN][N][VEC], int part, int column, float *shared, float *partials,
                               uint32 *tickets, int columns, Finish finish) {
    const int lane = threadIdx.x % WARP;
    __syncthreads();  // the weights were here
#pragma unroll
    for (int q = 0; q < OWN; ++q)
#pragma unroll
        for (int j = 0; j < N; ++j) {
#pragma unroll
            for (int k = 0; k < VEC; ++k)
#pragma unroll
                for (int distance = 4; distance < WARP; distance *= 2)
                    sums[q][j][k] += __shfl_xor_sync(0xffffffff, sums[q][j][k], distance);
            float *const to = shared + (part * N + j) * COLUMNS + column + q * 32 + lane * VEC;
            if (lane < 4) store_floats(to, sums[q][j]);
        }
    reduce_parts<THREADS, PARTS, N, COLUMNS>(shared, partials, tickets, columns, finish);
}
