// 1x1 convolutions on tensor cores: what dgrad_reduce.cu and norm_backward.cu share, and the products of the former.
//
//     out[row, n] = sum over k of a[row, k] * w[k, n]          rows = N*H*W
//
// The layers that these kernels are for are bound by memory, so they are about bytes in flight, not about peak TFLOP/s: a
// block keeps its share of the weights in shared memory and walks over its rows.
//
// Which element of a and w meets which is free, as long as both agree. So the indices are dealt such that the 8 values of k
// that a thread holds of one row are one 16-byte load, and the 8 columns of one row that it ends up with are one store:
// `mma.sync` m16n8k16 wants of thread t of a quad k = 2t, 2t+1, 2t+8, 2t+9; it gets k = 8t .. 8t+3 of a block of 32, then
// 8t+4 .. 8t+7. Of four 8-column products, the thread's columns 2t, 2t+1 are called 8t + 2j, 8t + 2j + 1, j the product.
// PTX ISA, "Matrix Fragments for mma.m16n8k16".
#pragma once
#include "batch_norm.cuh"

__device__ inline void multiply_add(float (&c)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1, half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void multiply_add(float (&c)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1, bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// products += a * w for 32 values of k: `low` and `high` are a's vectors of rows r and r + 8, `w` as `load_weights` left it.
template <class T> __device__ inline void multiply_add(float (&products)[4], uint4 low, uint4 high, uint4 w) {
    multiply_add(products, low.x, high.x, low.y, high.y, w.x, w.y, T{});
    multiply_add(products, low.z, high.z, low.w, high.w, w.z, w.w, T{});
}

template <class T> __device__ inline uint4 words(const Packed<T> &v) { return *reinterpret_cast<const uint4 *>(&v); }

template <class T> __device__ inline Packed<T> packed(const uint4 &v) { return *reinterpret_cast<const Packed<T> *>(&v); }

// A thread's 8 columns of one row, out of its products of four 8-column matrices. `high`: of the row 8 further down.
template <int N> __device__ inline void columns_of(const float (&products)[N][4], int first, bool high, float (&v)[VEC]) {
#pragma unroll
    for (int k = 0; k < VEC; ++k) v[k] = products[first + k / 2][(high ? 2 : 0) + k % 2];
}

// Weights (k, n), `COLUMNS` of them from column `first` on, in the order in which the threads of a warp want them: the
// thread's vector for step s and column tile j is weights[(s * COLUMNS / 8 + j) * WARP + lane].
template <class T, int K, int COLUMNS>
__device__ void load_weights(uint4 *weights, const T *w, int first, int columns) {
    for (int i = threadIdx.x; i < K / 8 * COLUMNS; i += blockDim.x) {
        const int lane = i % WARP, tile = i / WARP % (COLUMNS / 8), step = i / WARP / (COLUMNS / 8);
        const int column = lane / 4;  // of the product
        const int n = first + tile / 4 * 32 + column / 2 * 8 + tile % 4 * 2 + column % 2;
        const int k = step * 32 + lane % 4 * 8;
        Packed<T> v{};
        if (n < columns)
#pragma unroll
            for (int j = 0; j < VEC; ++j) v.element[j] = w[size_t(k + j) * columns + n];
        weights[i] = words(v);
    }
}

// Adds up N sums per column over a block's WARPS_M x WARPS_N warps, each with its VECTORS * 32 columns, and over all blocks of
// the same columns, in the same order every time; as `reduce_over_rows`. `shared` holds N * WARPS_M * (columns of the block)
// floats, `partials` N * gridDim.y * columns. `warp_m` and `warp_n` are this warp's place; further warps of the block only help.
template <int WARPS_M, int WARPS_N, int N, int VECTORS, class Finish>
__device__ void reduce_columns(const float (&sums)[N][VECTORS][VEC], int warp_m, int warp_n, float *shared, float *partials,
                               uint32 *tickets, int columns, Finish finish) {
    constexpr int COLUMNS = VECTORS * 32, BLOCK_COLUMNS = WARPS_N * COLUMNS;
    __shared__ bool last;
    const int lane = threadIdx.x % WARP;
    __syncthreads();  // the weights were here
    if (threadIdx.x < WARPS_M * WARPS_N * WARP)
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
            for (int q = 0; q < VECTORS; ++q)
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    float v = sums[j][q][k];
#pragma unroll
                    for (int distance = 4; distance < WARP; distance *= 2) v += __shfl_xor_sync(0xffffffff, v, distance);
                    if (lane < 4) shared[(warp_m * N + j) * BLOCK_COLUMNS + warp_n * COLUMNS + q * 32 + lane * VEC + k] = v;
                }
    __syncthreads();
    const int first = blockIdx.x * BLOCK_COLUMNS;
    for (int i = threadIdx.x; i < N * BLOCK_COLUMNS; i += blockDim.x) {
        const int n = first + i % BLOCK_COLUMNS;
        if (n >= columns) continue;
        float total = 0;
#pragma unroll
        for (int m = 0; m < WARPS_M; ++m) total += shared[m * N * BLOCK_COLUMNS + i];
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
