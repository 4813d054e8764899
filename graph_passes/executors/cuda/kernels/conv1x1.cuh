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
__device__ inline void columns_of(const float (&products)[4][4], bool high, float (&v)[VEC]) {
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

// The end of a kernel that has left N sums per column of each of the block's PARTS in `shared`, (PARTS, N, BLOCK_COLUMNS): adds
// them up over the parts, and over all blocks of the same columns, in the same order every time; as `reduce_over_rows`.
// `partials` holds N * gridDim.y * columns; `last` is a place in shared memory.
template <int PARTS, int N, int BLOCK_COLUMNS, class Finish>
__device__ inline void reduce_parts(float *shared, float *partials, uint32 *tickets, int columns, bool &last, Finish finish) {
    __syncthreads();
    const int first = blockIdx.x * BLOCK_COLUMNS;
    for (int i = threadIdx.x; i < N * BLOCK_COLUMNS; i += blockDim.x) {
        const int n = first + i % BLOCK_COLUMNS;
        if (n >= columns) continue;
        float total = 0;
#pragma unroll
        for (int m = 0; m < PARTS; ++m) total += shared[m * N * BLOCK_COLUMNS + i];
        partials[(size_t(blockIdx.y) * N + i / BLOCK_COLUMNS) * columns + n] = total;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(&tickets[blockIdx.x], 1) == gridDim.y - 1;
        if (last) tickets[blockIdx.x] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = threadIdx.x; i < N * BLOCK_COLUMNS; i += blockDim.x) {
        const int n = first + i % BLOCK_COLUMNS;
        float total = 0;
        if (n < columns)
#pragma unroll 16
            for (int split = 0; split < gridDim.y; ++split)
                total += __ldcg(partials + (size_t(split) * N + i / BLOCK_COLUMNS) * columns + n);
        shared[i] = total;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BLOCK_COLUMNS; i += blockDim.x)
        if (first + i < columns) {
            float totals[N];
#pragma unroll
            for (int j = 0; j < N; ++j) totals[j] = shared[j * BLOCK_COLUMNS + i];
            finish(first + i, totals);
        }
}

// Adds up N sums per column over a block's WARPS_M x WARPS_N warps, each with 32 columns, and over all blocks of the same
// columns, as `reduce_parts`. `shared` holds N * WARPS_M * (columns of the block) floats. `warp_m` and `warp_n` are this warp's
// place; further warps of the block only help.
template <int WARPS_M, int WARPS_N, int N, class Finish>
__device__ void reduce_columns(const float (&sums)[N][VEC], int warp_m, int warp_n, float *shared, float *partials,
                               uint32 *tickets, int columns, Finish finish) {
    constexpr int COLUMNS = 32, BLOCK_COLUMNS = WARPS_N * COLUMNS;
    __shared__ bool last;
    const int lane = threadIdx.x % WARP;
    __syncthreads();  // the weights were here
    if (threadIdx.x < WARPS_M * WARPS_N * WARP)
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                float v = sums[j][k];
#pragma unroll
                for (int distance = 4; distance < WARP; distance *= 2) v += __shfl_xor_sync(0xffffffff, v, distance);
                if (lane < 4) shared[(warp_m * N + j) * BLOCK_COLUMNS + warp_n * COLUMNS + lane * VEC + k] = v;
            }
    reduce_parts<WARPS_M, N, BLOCK_COLUMNS>(shared, partials, tickets, columns, last, finish);
}
