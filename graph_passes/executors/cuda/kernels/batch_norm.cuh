// What the BatchNorm kernels share: how work is laid out, sums over rows, and the arithmetic per channel.
//
// A tensor is (rows, C) with rows = N*H*W, `channels` = C a multiple of 8, NHWC, seen as vectors of 8 channels. A block
// works on a tile of 64 channels; blocks with the same blockIdx.x share a tile and split its rows.
// Formulas: Ioffe and Szegedy, arXiv:1502.03167; running variance from the biased one, as MXNet's BatchNorm does.
#pragma once
#include "common.cuh"

constexpr int TILE = 8;                      // threads along the channels: 64 channels, one 128-byte line of a 16-bit type
// Rows a reducing block reads at once (blockDim.y). One block of 768 threads a multiprocessor leaves 85 registers a
// thread; two of 512 have 64, which spill, and were 10 to 20 % slower on an H200.
constexpr int REDUCE_ROWS = 96;
constexpr int REDUCE_THREADS = TILE * REDUCE_ROWS;
constexpr int APPLY_ROWS = 32;               // the same for the elementwise kernels
constexpr int APPLY_THREADS = TILE * APPLY_ROWS;
// Rows that a thread has in flight where one or two tensors are moved. Where three or more are, one row at a time is 4 to
// 12 % faster on an H200.
constexpr int LOADS = 4;

// --- sums per channel over all rows ---

// Adds up `sums` (N of them, 8 channels a thread) over the block and over all blocks of the tile, always in the same order, so
// equal inputs give equal bits. The last block to arrive finishes and calls `finish(channel, the N sums)`.
// `partials` is (gridDim.y, these N, C) in fp32; `tickets` one counter a tile, 0 before the launch and after it.
template <int N, class Finish>
__device__ void reduce_over_rows(float (&sums)[N][VEC], float *partials, uint32 *tickets, int channels, Finish finish) {
    constexpr int CHANNELS = TILE * VEC;
    constexpr int VALUES = N * CHANNELS;
    constexpr int PARTS = REDUCE_THREADS / VALUES;      // threads for each of them
    constexpr int WARPS = REDUCE_THREADS / WARP;
    static_assert(REDUCE_THREADS % VALUES == 0);
    __shared__ float shared[WARPS * VALUES];
    __shared__ bool last;
    const int thread = threadIdx.y * TILE + threadIdx.x;

    // Over the 4 rows of a warp, then over the warps.
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            float v = sums[j][k];
#pragma unroll
            for (int distance = TILE; distance < WARP; distance *= 2) v += __shfl_xor_sync(0xffffffff, v, distance);
            if (thread % WARP < TILE) shared[thread / WARP * VALUES + j * CHANNELS + threadIdx.x * VEC + k] = v;
        }
    }
    __syncthreads();
    const int value = thread % VALUES, part = thread / VALUES;
    const int c = blockIdx.x * CHANNELS + value % CHANNELS;
    const size_t column = size_t(value / CHANNELS) * channels + c;
    if (part == 0 && c < channels) {
        float total = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) total += shared[warp * VALUES + value];
        partials[size_t(blockIdx.y) * N * channels + column] = total;
        __threadfence();
    }
    __syncthreads();
    if (thread == 0) {
        last = atomicAdd(&tickets[blockIdx.x], 1) == gridDim.y - 1;
        if (last) tickets[blockIdx.x] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();

    float total = 0;
    if (c < channels)
#pragma unroll 16
        for (int split = part; split < gridDim.y; split += PARTS)
            total += __ldcg(partials + size_t(split) * N * channels + column);
    shared[thread] = total;
    __syncthreads();
    if (thread < CHANNELS && c < channels) {
        float totals[N] = {};
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int j = 0; j < N; ++j) totals[j] += shared[p * VALUES + j * CHANNELS + thread];
        finish(c, totals);
    }
}

// --- images that are dropped ---

// Where DROP, a BatchNorm's output is multiplied by the factor of its image, 0 or 1 / (1 - p), before the residual is added
// (operators/dropout.py). `factors` are those of all such BatchNorms, `first_factor` the place of the first image's in this
// one's; an image has `pixels` rows.
__device__ inline float factor_of(uint32 row, const float *factors, uint32 first_factor, uint32 pixels) {
    return factors[first_factor + row / pixels];
}

// --- arithmetic per channel ---

// The sums of a batch over its rows, of which mean and variance are made. Two rows: the sums of x and of x * x, as cuDNN's
// genstats leaves them. With `about_mean` three, as our own kernels leave them: those of x - mean, which is 0, and of its
// square, then the mean. The variance as a difference of means of squares loses (mean / deviation)^2 of fp32's digits, and
// about the mean, or a value not far from it, there is nothing to lose (Chan, Golub and LeVeque, 'Algorithms for computing
// the sample variance', The American Statistician 37, 1983).

// Scale and shift of a thread's 8 channels in the forward pass: y = x * scale + shift, from the sums of this batch. One
// thread a channel also writes what is kept: mean and 1 / sqrt(var + eps) in `saved` (2, C), and the running
// statistics, running = momentum * running + (1 - momentum) * new. Null pointers leave them out (inference).
struct Forward {
    float scale[VEC], shift[VEC];

    __device__ Forward(const float *sums, bool about_mean, const float *gamma, const float *beta, float *saved,
                       float *running_mean, float *running_var, float eps, float momentum, uint32 rows, int channel,
                       int channels) {
        float mean[VEC], var[VEC], g[VEC], b[VEC], invstd[VEC];
        load_floats(sums + (about_mean ? 2 * channels : 0) + channel, mean);
        load_floats(sums + channels + channel, var);
        load_floats(gamma + channel, g);
        load_floats(beta + channel, b);
        const bool keeper = blockIdx.y == 0 && threadIdx.y == 0;
        // A division for each sum would be 13 instructions, and hold up the loads behind it.
        const float share = 1.f / rows, share_of_mean = about_mean ? 1 : share, about_zero = about_mean ? 0 : 1;
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            mean[k] *= share_of_mean;
            // Spelled out, as there are two ways to contract it: kernels with equal sums have equal bits.
            var[k] = fmaxf(fmaf(-about_zero * mean[k], mean[k], var[k] * share), 0.f);
        }
        if (keeper && running_mean) {
            blend(running_mean + channel, mean, momentum);
            blend(running_var + channel, var, momentum);
        }
#pragma unroll
        for (int k = 0; k < VEC; ++k) invstd[k] = rsqrtf(var[k] + eps);
        if (keeper && saved) {
            store_floats(saved + channel, mean);
            store_floats(saved + channels + channel, invstd);
        }
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            scale[k] = g[k] * invstd[k];
            shift[k] = b[k] - mean[k] * scale[k];
        }
    }

    // In vectors: float by float each load waits for the store before it, and the launch for all of them.
    __device__ static void blend(float *running, const float (&of_batch)[VEC], float momentum) {
        float v[VEC];
        load_floats(running, v);
#pragma unroll
        for (int k = 0; k < VEC; ++k) v[k] = fmaf(momentum, v[k], (1 - momentum) * of_batch[k]);
        store_floats(running, v);
    }
};

// Scale and shift in the backward pass, from what was saved: x * scale + shift has the bits that it had in the forward pass.
// Without betas there is no shift.
struct Backward {
    float mean[VEC], invstd[VEC], gamma[VEC], scale[VEC], shift[VEC];

    __device__ Backward(const float *saved, const float *gammas, const float *betas, int channel, int channels) {
        load_floats(saved + channel, mean);
        load_floats(saved + channels + channel, invstd);
        load_floats(gammas + channel, gamma);
        if (betas) load_floats(betas + channel, shift);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            scale[k] = gamma[k] * invstd[k];
            shift[k] -= mean[k] * scale[k];
        }
    }
};

// dx = scale * dz + b * x + c, which is gamma * invstd * (dz - dbeta / rows - (x - mean) * invstd * dgamma / rows).
struct InputGradient {
    float b[VEC], c[VEC];

    __device__ InputGradient(const Backward &of, const float *dgamma, const float *dbeta, uint32 rows, int channel) {
        float dg[VEC], db[VEC];
        load_floats(dgamma + channel, dg);
        load_floats(dbeta + channel, db);
        const float share = 1.f / rows;
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            b[k] = -of.scale[k] * of.invstd[k] * dg[k] * share;
            c[k] = fmaf(-b[k], of.mean[k], -of.scale[k] * db[k] * share);
        }
    }
};
