// Shared by the BatchNorm kernels: work distribution, sums over rows, and the arithmetic per channel.
//
// A tensor is (rows, C) with rows = N*H*W and `channels` = C a multiple of 8, NHWC, seen as vectors of 8 channels. A
// block works on a tile of 64 channels. Blocks with the same blockIdx.x share a tile and split its rows. Formulas:
// Ioffe and Szegedy, arXiv:1502.03167. The running variance is updated with the biased variance, as in MXNet's
// BatchNorm.
#pragma once
#include "common.cuh"

constexpr int TILE = 8;                      // threads along the channels: 64 channels, one 128-byte line of a 16-bit type
// Rows that a reducing block reads at once (blockDim.y). With one block of 768 threads per SM, a thread has 85
// registers. With two blocks of 512 threads, a thread has 64 registers and spills; this was 10 to 20 % slower on an
// H200.
constexpr int REDUCE_ROWS = 96;
constexpr int REDUCE_THREADS = TILE * REDUCE_ROWS;
constexpr int APPLY_ROWS = 32;               // rows that a block of the elementwise kernels reads at once
constexpr int APPLY_THREADS = TILE * APPLY_ROWS;
// Rows in flight per thread in kernels that move one or two tensors. In kernels that move three or more tensors, one
// row at a time is 4 to 12 % faster on an H200.
constexpr int LOADS = 4;

// --- sums per channel over all rows ---

// The epilogue of a kernel in which gridDim.y blocks share the rows and gridDim.x the columns, COLUMNS each. `of_part`,
// in shared memory, has N sums of each column over each of PARTS parts of the block's rows. Each block adds up its
// parts and writes its N sums to `partials`. The last block to arrive adds up the sums of all blocks and calls
// `finish(column, sums)` for each column. The order of additions is fixed, so equal inputs give equal bits. No later
// work hides the reads of the last block. So the first THREADS threads of the block share these reads, as vectors, and
// each thread has IN_FLIGHT reads in flight; `sync` is the barrier of these threads.
// Shapes: of_part (max(PARTS, SPLITS), N, COLUMNS), partials (gridDim.y, N, columns) fp32; tickets (gridDim.x), 0
// before the launch and after it.
template <int THREADS, int PARTS, int N, int COLUMNS, int IN_FLIGHT = 9, class Finish, class Sync = BlockBarrier>
__device__ inline void reduce_parts(float *of_part, float *partials, uint32 *tickets, int columns, Finish finish,
                                    Sync sync = {}) {
    constexpr int VALUES = N * COLUMNS, QUADS = VALUES / 4;
    constexpr int SPLITS = THREADS / QUADS;  // threads that share four values; an H200 has up to 132 blocks
    static_assert(THREADS >= QUADS && THREADS >= COLUMNS && COLUMNS % 4 == 0);
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, first = blockIdx.x * COLUMNS, blocks = gridDim.y;
    sync();
#pragma unroll
    for (int i = 0; i < (VALUES + THREADS - 1) / THREADS; ++i) {
        const int value = i * THREADS + thread;
        if (value < VALUES && first + value % COLUMNS < columns) {
            float total = 0;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) total += of_part[part * VALUES + value];
            partials[(size_t(blockIdx.y) * N + value / COLUMNS) * columns + first + value % COLUMNS] = total;
            __threadfence();
        }
    }
    sync();
    bool is_last = false;
    if (thread == 0) {
        is_last = atomicAdd(&tickets[blockIdx.x], 1) == blocks - 1;
        if (is_last) tickets[blockIdx.x] = 0;
    }
    if (!sync.any(is_last)) return;
    __threadfence();

    const int split = thread / QUADS, value = thread % QUADS * 4, column = first + value % COLUMNS;
    if (split < SPLITS) {
        const float4 *const from = reinterpret_cast<const float4 *>(partials + value / COLUMNS * columns + column);
        const uint32 pitch = N * columns / 4;
        float4 total = make_float4(0, 0, 0, 0);
        for (int next = split; next < blocks; next += IN_FLIGHT * SPLITS) {
            float4 of_block[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const int block = next + i * SPLITS;
                of_block[i] = make_float4(0, 0, 0, 0);
                if (block < blocks && column < columns) of_block[i] = __ldcg(from + block * pitch);
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                total.x += of_block[i].x;
                total.y += of_block[i].y;
                total.z += of_block[i].z;
                total.w += of_block[i].w;
            }
        }
        reinterpret_cast<float4 *>(of_part)[thread] = total;
    }
    sync();
    if (thread < COLUMNS && first + thread < columns) {
        float totals[N] = {};
#pragma unroll
        for (int part = 0; part < SPLITS; ++part)
#pragma unroll
            for (int j = 0; j < N; ++j) totals[j] += of_part[part * VALUES + j * COLUMNS + thread];
        finish(first + thread, totals);
    }
}

// Like `reduce_parts`, but from registers: each thread of a TILE x REDUCE_ROWS block has N sums of 8 channels.
template <int N, class Finish>
__device__ void reduce_over_rows(float (&sums)[N][VEC], float *partials, uint32 *tickets, int channels, Finish finish) {
    constexpr int CHANNELS = TILE * VEC, WARPS = REDUCE_THREADS / WARP, SPLITS = REDUCE_THREADS / (N * CHANNELS / 4);
    __shared__ __align__(16) float of_warp[(WARPS > SPLITS ? WARPS : SPLITS) * N * CHANNELS];
    const int thread = threadIdx.y * TILE + threadIdx.x;
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
        for (int k = 0; k < VEC; ++k)
#pragma unroll
            for (int distance = TILE; distance < WARP; distance *= 2)  // over the 4 rows of a warp
                sums[j][k] += __shfl_xor_sync(0xffffffff, sums[j][k], distance);
        float *const to = of_warp + (thread / WARP * N + j) * CHANNELS + threadIdx.x * VEC;
        if (thread % WARP < TILE) store_floats(to, sums[j]);
    }
    reduce_parts<REDUCE_THREADS, WARPS, N, CHANNELS>(of_warp, partials, tickets, channels, finish);
}

// --- stochastic depth (per sample) ---

// With DROP, a BatchNorm's output is multiplied by its image's factor, 0 or 1 / (1 - p), before the residual is added
// (operators/dropout.py). `factors` has the factors of all these BatchNorms; the factors of this BatchNorm begin at
// `first_factor`. An image has `pixels` rows.
__device__ inline float drop_factor(uint32 row, const float *factors, uint32 first_factor, uint32 pixels) {
    return factors[first_factor + row / pixels];
}

// --- a second gradient of the same tensor ---

// The second gradient that is added: none, a gradient of all pixels, or a compact gradient of the pixels of a `Grid`.
enum SecondGradient { NONE, WHOLE, COMPACT };

// Divides numbers below 2^31 by multiplication: Granlund and Montgomery, "Division by invariant integers using
// multiplication", PLDI 1994.
struct FastDivisor {
    uint32 value, factor, shift;

    __device__ uint32 quotient(uint32 n) const { return __umulhi(2 * n, factor) >> shift; }
};

constexpr uint32 NOWHERE = 0xffffffff;

// The pixels of `height` x `width` images whose row and column are multiples of `down` and `right`. A compact gradient,
// which is 0 at all other pixels, stores only these pixels: `out_height` x `out_width` per image.
struct Grid {
    FastDivisor height, width, down, right;
    uint32 out_height, out_width;

    // The row of the compact gradient that corresponds to this row of the whole tensor, or NOWHERE.
    __device__ uint32 row_of(uint32 row) const {
        const uint32 line = width.quotient(row), x = row - line * width.value;
        const uint32 image = height.quotient(line), y = line - image * height.value;
        const uint32 out_y = down.quotient(y), out_x = right.quotient(x);
        const bool there = out_y * down.value == y && out_x * right.value == x;
        return there ? (image * out_height + out_y) * out_width + out_x : NOWHERE;
    }
};

// A thread's 8 channels of one row of the second gradient. `at` is the index of this vector in a gradient of all rows.
template <SecondGradient SECOND, class T>
__device__ inline Packed<T> second_of(const Packed<T> *second, uint32 at, uint32 row, uint32 pitch, int channel,
                                      const Grid &grid) {
    if (SECOND == WHOLE) return second[at];
    const uint32 its_row = grid.row_of(row);
    return its_row == NOWHERE ? Packed<T>{} : second[its_row * pitch + channel / VEC];
}

// --- arithmetic per channel ---

// `sums`: the sums of a batch over its rows, from which mean and variance follow.
//   2 rows, left by cuDNN's genstats:                 sum of x, sum of x^2
//   3 rows (`about_mean`), left by our own kernels:   sum of x - mean, which is 0; sum of (x - mean)^2; mean
// As the mean of squares minus the square of the mean, the variance loses precision by a factor of (mean / deviation)^2
// in fp32. Computed about the mean, or about a value near the mean, it loses none (Chan, Golub and LeVeque, 'Algorithms
// for computing the sample variance', The American Statistician 37, 1983).

// Scale and shift of a thread's 8 channels in the forward pass, from this batch's sums: y = x * scale + shift. One thread per
// channel also writes mean and 1 / sqrt(var + eps) to `saved` (2, C), and updates the running statistics: running = momentum
// * running + (1 - momentum) * new. Null pointers skip these writes (inference).
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
        // Multiply by the reciprocal: a division of each sum would take 13 instructions and delay the loads that
        // follow.
        const float share = 1.f / rows, share_of_mean = about_mean ? 1 : share, about_zero = about_mean ? 0 : 1;
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            mean[k] *= share_of_mean;
            // The fma is explicit because the compiler could contract the expression in two ways: kernels with equal sums
            // must give equal bits.
            var[k] = fmaxf(fmaf(-about_zero * mean[k], mean[k], var[k] * share), 0.f);
        }
        // Load and store whole vectors: float by float, each load would wait for the previous store.
        if (keeper && running_mean) {
            float to_mean[VEC], to_var[VEC];
            load_floats(running_mean + channel, to_mean);
            load_floats(running_var + channel, to_var);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                to_mean[k] = fmaf(momentum, to_mean[k], (1 - momentum) * mean[k]);
                to_var[k] = fmaf(momentum, to_var[k], (1 - momentum) * var[k]);
            }
            store_floats(running_mean + channel, to_mean);
            store_floats(running_var + channel, to_var);
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
};

// Arguments of `Forward` for a BatchNorm that is fused into a convolution's kernel.
struct FusedNorm {
    const float *sums;
    bool about_mean;
    const float *gamma, *beta;
    float *saved, *running_mean, *running_var;
    float eps, momentum;

    // With `keeps`, the first block along the rows writes `saved` and the running statistics.
    __device__ Forward forward(uint32 rows, int channel, int channels, bool keeps = true) const {
        return Forward(sums, about_mean, gamma, beta, keeps ? saved : nullptr, keeps ? running_mean : nullptr, running_var, eps,
                       momentum, rows, channel, channels);
    }
};

// `Forward` of a block's channels, in shared memory. The first row of threads computes it while the loads of all
// threads are in flight. If every row of threads computed it, an SM with four blocks would need a microsecond.
struct SharedForward {
    float scale[TILE * VEC], shift[TILE * VEC];

    __device__ void keep(const Forward &of) {
        store_floats(scale + threadIdx.x * VEC, of.scale);
        store_floats(shift + threadIdx.x * VEC, of.shift);
    }
    __device__ void load_own(float (&own_scale)[VEC], float (&own_shift)[VEC]) const {
        load_floats(scale + threadIdx.x * VEC, own_scale);
        load_floats(shift + threadIdx.x * VEC, own_shift);
    }
};

// Scale and shift in the backward pass, from the saved statistics: x * scale + shift has the same bits as in the
// forward pass. Without betas, shift is undefined.
struct Backward {
    float mean[VEC], invstd[VEC], gamma[VEC], scale[VEC], shift[VEC];

    Backward() = default;
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

    // Stores what threads need later for this vector of channels, at these addresses in shared memory.
    __device__ void store(float *means, float *scales, float *shifts) const {
        store_floats(means, mean);
        store_floats(scales, scale);
        store_floats(shifts, shift);
    }
};

// `finish` of `reduce_parts` for a BatchNorm's backward sums: writes the sums of dz and of dz * (x - mean) as
// gradients.
struct ParameterGradients {
    const float *saved;
    float *dgamma, *dbeta;
    int channels;

    __device__ void operator()(int channel, const float (&sums)[2]) const {
        dgamma[channel] = sums[1] * saved[channels + channel];
        dbeta[channel] = sums[0];
    }
};

// dx = scale * dz + b * x + c, which equals gamma * invstd * (dz - dbeta / rows - (x - mean) * invstd * dgamma / rows).
struct InputGradient {
    float b[VEC], c[VEC];

    InputGradient() = default;
    __device__ InputGradient(const Backward &of, const float *dgamma, const float *dbeta, uint32 rows, int channel) {
        float dg[VEC], db[VEC];
        load_floats(dgamma + channel, dg);
        load_floats(dbeta + channel, db);
        // A division is used here: multiplying by 1 / rows makes stem_weights spill twice as much in its loop (0.319
        // ms, up from 0.263).
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            b[k] = -of.scale[k] * of.invstd[k] * dg[k] / rows;
            c[k] = -of.scale[k] * db[k] / rows - b[k] * of.mean[k];
        }
    }
    // dx of one value. The sum in brackets must be evaluated first: for a mean far from zero its two terms are large
    // and nearly cancel.
    __device__ float of(int k, float scale, float dz, float x) const { return scale * dz + (b[k] * x + c[k]); }
};
