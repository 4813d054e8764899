// BatchNorm, with the addition of a residual and ReLU fused in, forward and backward.
//
// A tensor is (rows, channels) with rows = N*H*W, channels a multiple of 8, NHWC, seen as vectors of 8 channels. A block
// works on a tile of 64 channels; blocks with the same blockIdx.x share a tile and split its rows. Forward is one read for the statistics, then one read
// and one write; backward is the same count for each of its inputs.
//
// Where a residual is added, ReLU leaves one bit per element (was the output > 0?): 1/16 of the bytes that reading the
// output again would cost. Without a residual the backward pass computes the sign again from x, which it reads anyway.
// Formulas: Ioffe and Szegedy, arXiv:1502.03167; running variance from the biased one, as MXNet's BatchNorm does.
#include "common.cuh"

constexpr int TILE = 8;                      // threads along the channels: 64 channels, one 128-byte line of a 16-bit type
constexpr int REDUCE_ROWS = 64;              // rows a reducing block reads at once (blockDim.y)
constexpr int REDUCE_THREADS = TILE * REDUCE_ROWS;
constexpr int APPLY_ROWS = 32;               // the same for the elementwise kernels
constexpr int APPLY_THREADS = TILE * APPLY_ROWS;
constexpr int LOADS = 4;                     // independent 16-byte loads that a thread has in flight

// --- two sums per channel over all rows ---

// Adds up `sums` (2 x 8 channels a thread) over the block and over all blocks of the tile, always in the same order, so
// equal inputs give equal bits. The last block to arrive finishes and calls `finish(channel, first sum, second sum)`.
// `partials` holds 2 * gridDim.y * channels floats; `tickets` one counter a tile, 0 before the launch and after it.
template <class Finish>
__device__ void reduce_over_rows(float (&sums)[2][VEC], float *partials, uint32 *tickets, int channels, Finish finish) {
    __shared__ float shared[2 * VEC * REDUCE_THREADS / 2];  // 2 * 8 values of half the threads
    __shared__ bool last;
    const int thread = threadIdx.y * TILE + threadIdx.x;
    for (int half = REDUCE_ROWS / 2; half; half /= 2) {
        const int slot = thread - half * TILE;
        if (threadIdx.y >= half && threadIdx.y < 2 * half)
            for (int k = 0; k < 2 * VEC; ++k) shared[k * (REDUCE_THREADS / 2) + slot] = sums[k / VEC][k % VEC];
        __syncthreads();
        if (threadIdx.y < half)
            for (int k = 0; k < 2 * VEC; ++k) sums[k / VEC][k % VEC] += shared[k * (REDUCE_THREADS / 2) + thread];
        __syncthreads();
    }

    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC;
    float *own = partials + size_t(blockIdx.y) * 2 * channels;
    if (threadIdx.y == 0 && channel < channels) {
        store_floats(own + channel, sums[0]);
        store_floats(own + channels + channel, sums[1]);
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

    // 128 values (2 sums x 64 channels), REDUCE_THREADS / 128 threads for each.
    constexpr int VALUES = 2 * TILE * VEC, PARTS = REDUCE_THREADS / VALUES;
    const int value = thread % VALUES, part = thread / VALUES;
    const int c = blockIdx.x * TILE * VEC + value % (VALUES / 2);
    float total = 0;
    if (c < channels) {
        const float *column = partials + (value / (VALUES / 2)) * channels + c;
#pragma unroll 16
        for (int split = part; split < gridDim.y; split += PARTS) total += __ldcg(column + size_t(split) * 2 * channels);
    }
    shared[thread] = total;
    __syncthreads();
    if (thread < VALUES / 2 && c < channels) {
        float first = 0, second = 0;
        for (int p = 0; p < PARTS; ++p) {
            first += shared[p * VALUES + thread];
            second += shared[p * VALUES + VALUES / 2 + thread];
        }
        finish(c, first, second);
    }
}

// sums[0][c] = sum of x, sums[1][c] = sum of x * x: what cuDNN's genstats gives too.
template <class T>
__global__ void __launch_bounds__(REDUCE_THREADS, 2)
batch_norm_statistics(const Packed<T> *x, float *sums, float *partials, uint32 *tickets, uint32 rows, int channels) {
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC;
    const uint32 stride = gridDim.y * REDUCE_ROWS, pitch = channels / VEC;
    float acc[2][VEC] = {};
    if (channel < channels) {
        for (uint32 row = blockIdx.y * REDUCE_ROWS + threadIdx.y; row < rows; row += LOADS * stride) {
            Packed<T> packed[LOADS];
#pragma unroll
            for (int u = 0; u < LOADS; ++u)
                if (row + u * stride < rows) packed[u] = x[(row + u * stride) * pitch + channel / VEC];
#pragma unroll
            for (int u = 0; u < LOADS; ++u) {
                if (row + u * stride >= rows) continue;
                float v[VEC];
                unpack(packed[u], v);
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    acc[0][k] += v[k];
                    acc[1][k] += v[k] * v[k];
                }
            }
        }
    }
    reduce_over_rows(acc, partials, tickets, channels, [=](int c, float sum, float sum_of_squares) {
        sums[c] = sum;
        sums[channels + c] = sum_of_squares;
    });
}

// The sums that a batch with exactly the running statistics would have: inference then runs batch_norm_apply as it is.
__global__ void sums_from_running(const float *running_mean, const float *running_var, float *sums, uint32 rows, int channels) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    sums[c] = running_mean[c] * rows;
    sums[channels + c] = (running_var[c] + running_mean[c] * running_mean[c]) * rows;
}

// --- forward: normalise, add, ReLU ---

// y = relu(gamma * (x - mean) / sqrt(var + eps) + beta + residual), mean and variance from the sums of this batch.
// Also leaves mean and 1 / sqrt(var + eps) in `saved` (2, channels) for the backward pass, the ReLU bits in `mask`
// (rows * channels / 8 bytes), and moves the running statistics: running = momentum * running + (1 - momentum) * new.
// Null pointers for these leave them out (inference).
// Rows are walked from the end: the tail that the producer of x just wrote is still in the L2 cache.
template <class T, bool ADD, bool RELU>
__global__ void __launch_bounds__(APPLY_THREADS, 4)
batch_norm_apply(const Packed<T> *x, const Packed<T> *residual, const float *sums, const float *gamma,
                 const float *beta, Packed<T> *y, uint8 *mask, float *saved, float *running_mean, float *running_var,
                 float eps, float momentum, uint32 rows, int channels) {
    constexpr int DEPTH = ADD ? LOADS / 2 : LOADS;
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC;
    if (channel >= channels) return;
    float scale[VEC], shift[VEC];
    {
        float sum[VEC], sum_of_squares[VEC], g[VEC], b[VEC], mean[VEC], invstd[VEC];
        load_floats(sums + channel, sum);
        load_floats(sums + channels + channel, sum_of_squares);
        load_floats(gamma + channel, g);
        load_floats(beta + channel, b);
        const bool keeper = blockIdx.y == 0 && threadIdx.y == 0;  // one thread per channel writes what is kept
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            mean[k] = sum[k] / rows;
            const float var = fmaxf(sum_of_squares[k] / rows - mean[k] * mean[k], 0.f);
            invstd[k] = rsqrtf(var + eps);
            scale[k] = g[k] * invstd[k];
            shift[k] = b[k] - mean[k] * scale[k];
            if (keeper && running_mean) {
                running_mean[channel + k] = momentum * running_mean[channel + k] + (1 - momentum) * mean[k];
                running_var[channel + k] = momentum * running_var[channel + k] + (1 - momentum) * var;
            }
        }
        if (keeper && saved) {
            store_floats(saved + channel, mean);
            store_floats(saved + channels + channel, invstd);
        }
    }
    const uint32 stride = gridDim.y * APPLY_ROWS, pitch = channels / VEC;
    for (uint32 i = blockIdx.y * APPLY_ROWS + threadIdx.y; i < rows; i += DEPTH * stride) {
        Packed<T> packed[DEPTH], packed_residual[DEPTH];
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            if (i + u * stride >= rows) continue;
            const uint32 at = (rows - 1 - (i + u * stride)) * pitch + channel / VEC;
            packed[u] = x[at];
            if (ADD) packed_residual[u] = residual[at];
        }
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            if (i + u * stride >= rows) continue;
            const uint32 at = (rows - 1 - (i + u * stride)) * pitch + channel / VEC;
            float v[VEC], r[VEC];
            unpack(packed[u], v);
            if (ADD) unpack(packed_residual[u], r);
            uint32 bits = 0;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                v[k] = v[k] * scale[k] + shift[k];
                if (ADD) v[k] += r[k];
                if (RELU) {
                    bits |= uint32(v[k] > 0) << k;
                    v[k] = v[k] > 0 || v[k] != v[k] ? v[k] : 0;  // NaN stays visible
                }
            }
            y[at] = pack<T>(v);
            if (RELU && mask) mask[at] = uint8(bits);
        }
    }
}

// --- backward ---

enum Relu { NO_RELU, RECOMPUTED, BITS };  // how the backward pass knows where ReLU let the gradient through

// What a thread knows of its 8 channels. For RECOMPUTED, output = x * scale + shift, in the bits of batch_norm_apply.
struct Channels {
    float mean[VEC], invstd[VEC], gamma[VEC], scale[VEC], shift[VEC];

    __device__ Channels(const float *saved, const float *gammas, const float *betas, int channel, int channels) {
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

// dbeta = sum of dz, dgamma = sum of dz * (x - mean) * invstd, where dz is dy, or dy + dy2, where ReLU let it through.
// With WRITE, dz is stored: it is the residual's gradient, and batch_norm_backward_apply then reads it instead of dy.
template <class T, Relu RELU, bool TWO, bool WRITE>
__global__ void __launch_bounds__(REDUCE_THREADS, 2)
batch_norm_backward_reduce(const Packed<T> *x, const Packed<T> *dy, const Packed<T> *dy2, const uint8 *mask,
                           Packed<T> *dz, const float *saved, const float *gamma, const float *beta, float *dgamma,
                           float *dbeta, float *partials, uint32 *tickets, uint32 rows, int channels) {
    constexpr int DEPTH = LOADS / 2;
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC;
    const uint32 stride = gridDim.y * REDUCE_ROWS, pitch = channels / VEC;
    float acc[2][VEC] = {};
    if (channel < channels) {
        const Channels of(saved, gamma, RELU == RECOMPUTED ? beta : nullptr, channel, channels);
        for (uint32 row = blockIdx.y * REDUCE_ROWS + threadIdx.y; row < rows; row += DEPTH * stride) {
            Packed<T> px[DEPTH], pdy[DEPTH], pdy2[DEPTH];
            uint32 bits[DEPTH];
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                if (row + u * stride >= rows) continue;
                const uint32 at = (row + u * stride) * pitch + channel / VEC;
                px[u] = x[at];
                pdy[u] = dy[at];
                if (TWO) pdy2[u] = dy2[at];
                if (RELU == BITS) bits[u] = mask[at];
            }
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                if (row + u * stride >= rows) continue;
                const uint32 at = (row + u * stride) * pitch + channel / VEC;
                float v[VEC], g[VEC], g2[VEC];
                unpack(px[u], v);
                unpack(pdy[u], g);
                if (TWO) unpack(pdy2[u], g2);
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    if (TWO) g[k] += g2[k];
                    if (RELU == BITS && !(bits[u] >> k & 1)) g[k] = 0;
                    if (RELU == RECOMPUTED && !(v[k] * of.scale[k] + of.shift[k] > 0)) g[k] = 0;
                    acc[0][k] += g[k];
                    acc[1][k] += g[k] * (v[k] - of.mean[k]);
                }
                if (WRITE) dz[at] = pack<T>(g);
            }
        }
    }
    reduce_over_rows(acc, partials, tickets, channels, [=](int c, float sum, float sum_times_x) {
        dbeta[c] = sum;
        dgamma[c] = sum_times_x * saved[channels + c];
    });
}

// dx = gamma * invstd * (dz - dbeta / rows - (x - mean) * invstd * dgamma / rows), dz being dy where ReLU let it through
// (RECOMPUTED), or dy itself. Rows from the end, as in batch_norm_apply.
template <class T, Relu RELU>
__global__ void __launch_bounds__(APPLY_THREADS, 4)
batch_norm_backward_apply(const Packed<T> *x, const Packed<T> *dy, Packed<T> *dx, const float *saved, const float *gamma,
                          const float *beta, const float *dgamma, const float *dbeta, uint32 rows, int channels) {
    constexpr int DEPTH = LOADS / 2;
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC;
    if (channel >= channels) return;
    const Channels of(saved, gamma, RELU == RECOMPUTED ? beta : nullptr, channel, channels);
    float b[VEC], c[VEC];  // dx = scale * dz + b * x + c
    {
        float dg[VEC], db[VEC];
        load_floats(dgamma + channel, dg);
        load_floats(dbeta + channel, db);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            b[k] = -of.scale[k] * of.invstd[k] * dg[k] / rows;
            c[k] = -of.scale[k] * db[k] / rows - b[k] * of.mean[k];
        }
    }
    const uint32 stride = gridDim.y * APPLY_ROWS, pitch = channels / VEC;
    for (uint32 i = blockIdx.y * APPLY_ROWS + threadIdx.y; i < rows; i += DEPTH * stride) {
        Packed<T> px[DEPTH], pdy[DEPTH];
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            if (i + u * stride >= rows) continue;
            const uint32 at = (rows - 1 - (i + u * stride)) * pitch + channel / VEC;
            px[u] = x[at];
            pdy[u] = dy[at];
        }
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            if (i + u * stride >= rows) continue;
            const uint32 at = (rows - 1 - (i + u * stride)) * pitch + channel / VEC;
            float v[VEC], g[VEC];
            unpack(px[u], v);
            unpack(pdy[u], g);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                if (RELU == RECOMPUTED && !(v[k] * of.scale[k] + of.shift[k] > 0)) g[k] = 0;
                v[k] = of.scale[k] * g[k] + b[k] * v[k] + c[k];
            }
            dx[at] = pack<T>(v);
        }
    }
}
