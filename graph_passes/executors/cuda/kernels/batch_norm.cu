// BatchNorm forward and backward, fused with the addition of a residual and ReLU.
//
// The forward pass reads x once for the statistics, then reads x again and writes y. The backward pass also reads each
// of its inputs twice.
//
// With a residual, the forward pass stores ReLU's mask, one bit per element (was the output > 0?). Reading the mask
// takes 1/16 of the bytes of reading the output again. Without a residual the backward pass recomputes the mask from x,
// which it reads anyway.
#include "batch_norm.cuh"

// Computes the batch's sums about the mean. They are first accumulated about the first value of each channel, which is
// not far from the mean.
// Shapes: x (rows, C); sums (3, C), partials (gridDim.y, 2, C) fp32; tickets (gridDim.x).
template <class T>
__global__ void __launch_bounds__(REDUCE_THREADS, 1)
batch_norm_statistics(const Packed<T> *x, float *sums, float *partials, uint32 *tickets, uint32 rows, int channels) {
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC;
    const uint32 stride = gridDim.y * REDUCE_ROWS, pitch = channels / VEC;
    float acc[2][VEC] = {};
    if (channel < channels) {
        const uint32 begin = blockIdx.y * REDUCE_ROWS + threadIdx.y;
        float first[VEC];
        for (uint32 row = begin; row < rows; row += LOADS * stride) {
            Packed<T> packed[LOADS];
#pragma unroll
            for (int u = 0; u < LOADS; ++u)
                if (row + u * stride < rows) packed[u] = x[(row + u * stride) * pitch + channel / VEC];
            if (row == begin) unpack(x[channel / VEC], first);
#pragma unroll
            for (int u = 0; u < LOADS; ++u) {
                if (row + u * stride >= rows) continue;
                float v[VEC];
                unpack(packed[u], v);
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    v[k] -= first[k];
                    acc[0][k] += v[k];
                    acc[1][k] += v[k] * v[k];
                }
            }
        }
    }
    reduce_over_rows(acc, partials, tickets, channels, [=](int c, const float (&of)[2]) {
        const float from_first = of[0] / rows;
        sums[c] = 0;
        sums[channels + c] = of[1] - of[0] * from_first;
        sums[2 * channels + c] = to_float(x[c / VEC].element[c % VEC]) + from_first;
    });
}

// Writes the sums of a batch whose statistics equal the running statistics, so that inference can use batch_norm_apply
// unchanged.
// Shapes: running_mean, running_var (C), sums (3, C), all fp32.
__global__ void sums_from_running(const float *running_mean, const float *running_var, float *sums, uint32 rows, int channels) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= channels) return;
    sums[c] = 0;
    sums[channels + c] = running_var[c] * rows;
    sums[2 * channels + c] = running_mean[c];
}

// --- forward: normalise, add, ReLU ---

// y = relu(gamma * (x - mean) / sqrt(var + eps) + beta + residual), with mean and variance from this batch's sums. With
// DROP, everything except the residual is multiplied by the image's stochastic-depth factor. Also stores ReLU's bits in
// `mask` (unless null), and what `Forward` saves. Processes the rows from the last to the first: the producer of x has
// just written the last rows, so they are still in the L2 cache.
// Shapes: x, residual, y (rows, C); mask (rows, C / 8) bytes; sums (2 or 3, C), saved (2, C), gamma, beta,
// running_mean, running_var (C), factors fp32.
template <class T, bool ADD, bool RELU, bool DROP>
__global__ void __launch_bounds__(APPLY_THREADS, 4)
batch_norm_apply(const Packed<T> *x, const Packed<T> *residual, const float *sums, bool about_mean, const float *gamma,
                 const float *beta, Packed<T> *y, uint8 *mask, float *saved, float *running_mean, float *running_var,
                 float eps, float momentum, uint32 rows, int channels, const float *factors, uint32 first_factor,
                 uint32 pixels) {
    constexpr int DEPTH = ADD ? 1 : LOADS;
    __shared__ __align__(16) SharedForward forward;
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC;
    const uint32 stride = gridDim.y * APPLY_ROWS, pitch = channels / VEC;
    uint32 i = channel < channels ? blockIdx.y * APPLY_ROWS + threadIdx.y : rows;
    float scale[VEC], shift[VEC];
    bool first = true;
    do {
        Packed<T> packed[DEPTH], packed_residual[DEPTH];
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            if (i + u * stride >= rows) continue;
            const uint32 at = (rows - 1 - (i + u * stride)) * pitch + channel / VEC;
            packed[u] = x[at];
            if (ADD) packed_residual[u] = residual[at];
        }
        if (first) {
            if (threadIdx.y == 0 && channel < channels)
                forward.keep(Forward(sums, about_mean, gamma, beta, saved, running_mean, running_var, eps, momentum, rows,
                                     channel, channels));
            __syncthreads();
            forward.load_own(scale, shift);
            first = false;
        }
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            if (i + u * stride >= rows) continue;
            const uint32 at = (rows - 1 - (i + u * stride)) * pitch + channel / VEC;
            float v[VEC], r[VEC];
            unpack(packed[u], v);
            if (ADD) unpack(packed_residual[u], r);
            const float factor = DROP ? drop_factor(rows - 1 - (i + u * stride), factors, first_factor, pixels) : 1;
            uint32 bits = 0;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                v[k] = v[k] * scale[k] + shift[k];
                if (DROP) v[k] *= factor;
                if (ADD) v[k] += r[k];
                if (RELU) {
                    bits |= uint32(v[k] > 0) << k;
                    v[k] = v[k] > 0 || v[k] != v[k] ? v[k] : 0;  // propagates NaN
                }
            }
            y[at] = pack<T>(v);
            if (RELU && mask) mask[at] = uint8(bits);
        }
        i += DEPTH * stride;
    } while (i < rows);
}

// --- backward ---

enum Relu { NO_RELU, RECOMPUTED, BITS };  // the source of ReLU's mask in the backward pass

// dbeta = sum of dz, dgamma = sum of dz * (x - mean) * invstd. dz is dy (or dy + dy2), masked by ReLU. WRITE stores dz,
// which is the residual's gradient; batch_norm_backward_apply then reads dz instead of dy. With DROP, the sums are over
// dz times the image's stochastic-depth factor.
// Shapes: x, dy, dz (rows, C); dy2 (rows, C) or (rows of the grid, C); mask (rows, C / 8) bytes; saved (2, C), gamma,
// beta, dgamma, dbeta (C), partials (gridDim.y, 2, C), factors fp32; tickets (gridDim.x).
template <class T, Relu RELU, SecondGradient SECOND, bool WRITE, bool DROP>
__global__ void __launch_bounds__(REDUCE_THREADS, 1)
batch_norm_backward_reduce(const Packed<T> *x, const Packed<T> *dy, const Packed<T> *dy2, const uint8 *mask,
                           Packed<T> *dz, const float *saved, const float *gamma, const float *beta, float *dgamma,
                           float *dbeta, float *partials, uint32 *tickets, uint32 rows, int channels,
                           const float *factors, uint32 first_factor, uint32 pixels, Grid grid) {
    constexpr bool TWO = SECOND != NONE;
    constexpr int DEPTH = TWO || WRITE ? 1 : LOADS / 2;
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC;
    const uint32 stride = gridDim.y * REDUCE_ROWS, pitch = channels / VEC;
    float acc[2][VEC] = {};
    if (channel < channels) {
        const uint32 first = blockIdx.y * REDUCE_ROWS + threadIdx.y;
        Backward of;
        for (uint32 row = first; row < rows; row += DEPTH * stride) {
            Packed<T> px[DEPTH], pdy[DEPTH], pdy2[DEPTH];
            uint32 bits[DEPTH];
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                if (row + u * stride >= rows) continue;
                const uint32 at = (row + u * stride) * pitch + channel / VEC;
                px[u] = x[at];
                pdy[u] = dy[at];
                if (TWO) pdy2[u] = second_of<SECOND>(dy2, at, row + u * stride, pitch, channel, grid);
                if (RELU == BITS) bits[u] = mask[at];
            }
            // Overlaps with the loads of the first rows.
            if (row == first) of = Backward(saved, gamma, RELU == RECOMPUTED ? beta : nullptr, channel, channels);
#pragma unroll
            for (int u = 0; u < DEPTH; ++u) {
                if (row + u * stride >= rows) continue;
                const uint32 at = (row + u * stride) * pitch + channel / VEC;
                float v[VEC], g[VEC], g2[VEC];
                unpack(px[u], v);
                unpack(pdy[u], g);
                if (TWO) unpack(pdy2[u], g2);
                const float factor = DROP ? drop_factor(row + u * stride, factors, first_factor, pixels) : 1;
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    if (TWO) g[k] += g2[k];
                    if (RELU == BITS && !(bits[u] >> k & 1)) g[k] = 0;
                    if (RELU == RECOMPUTED && !(v[k] * of.scale[k] + of.shift[k] > 0)) g[k] = 0;
                    const float own = DROP ? g[k] * factor : g[k];
                    acc[0][k] += own;
                    acc[1][k] += own * (v[k] - of.mean[k]);
                }
                if (WRITE) dz[at] = pack<T>(g);
            }
        }
    }
    reduce_over_rows(acc, partials, tickets, channels, [=](int c, const float (&of)[2]) {
        dgamma[c] = of[1] * saved[channels + c];
        dbeta[c] = of[0];
    });
}

// Computes dx by `InputGradient`. dz is dy, masked by ReLU if RECOMPUTED, and multiplied by the image's
// stochastic-depth factor if DROP. ADD adds the other gradient of x before dx is rounded. Rows are processed from the
// last to the first, as in batch_norm_apply. dx may alias dy or the addend.
// Shapes: x, dy, addend, dx (rows, C); saved (2, C), gamma, beta, dgamma, dbeta (C), factors fp32.
template <class T, Relu RELU, bool ADD, bool DROP>
__global__ void __launch_bounds__(APPLY_THREADS, 4)
batch_norm_backward_apply(const Packed<T> *x, const Packed<T> *dy, const Packed<T> *addend, Packed<T> *dx,
                          const float *saved, const float *gamma, const float *beta, const float *dgamma,
                          const float *dbeta, uint32 rows, int channels, const float *factors, uint32 first_factor,
                          uint32 pixels) {
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC;
    if (channel >= channels) return;
    const uint32 first = blockIdx.y * APPLY_ROWS + threadIdx.y, pitch = channels / VEC;
    Backward of;
    InputGradient to;
    for (uint32 i = first; i < rows; i += gridDim.y * APPLY_ROWS) {
        const uint32 at = (rows - 1 - i) * pitch + channel / VEC;
        const Packed<T> px = x[at], pdy = dy[at], packed_addend = ADD ? addend[at] : Packed<T>{};
        if (i == first) {  // overlaps with the loads of this row
            of = Backward(saved, gamma, RELU == RECOMPUTED ? beta : nullptr, channel, channels);
            to = InputGradient(of, dgamma, dbeta, rows, channel);
        }
        float v[VEC], g[VEC], a[VEC];
        unpack(px, v);
        unpack(pdy, g);
        if (ADD) unpack(packed_addend, a);
        const float factor = DROP ? drop_factor(rows - 1 - i, factors, first_factor, pixels) : 1;
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            if (RELU == RECOMPUTED && !(v[k] * of.scale[k] + of.shift[k] > 0)) g[k] = 0;
            if (DROP) g[k] *= factor;
            v[k] = to.of(k, of.scale[k], g[k], v[k]);
            if (ADD) v[k] += a[k];
        }
        dx[at] = pack<T>(v);
    }
}
