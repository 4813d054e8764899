// Two BatchNorms whose sum goes through ReLU: the end of a block with a projection shortcut, forward and backward. Fused, the
// shortcut's normalised tensor is never written, and the gradient that both BatchNorms share is read once.
//
// y = relu(norm(x) + norm_2(x_2)). ReLU's mask has one bit per element, as in batch_norm.cu. With DROP, norm(x) and its
// gradient are multiplied by the image's stochastic-depth factor.
#include "batch_norm.cuh"

// Processes the rows from the last to the first, as batch_norm_apply does. Each norm saves the values that `Forward`
// saves.
// Shapes: x, x_2, y (rows, C); mask (rows, C / 8) bytes; sums (2 or 3, C), saved (2, C), gamma, beta, running_mean,
// running_var (C) fp32, likewise the operands with _2; factors fp32.
template <class T, bool DROP>
__global__ void __launch_bounds__(APPLY_THREADS, 4)
batch_norm_pair_apply(const Packed<T> *x, const Packed<T> *x_2, const float *sums, const float *sums_2,
                      bool about_mean, bool about_mean_2, const float *gamma, const float *gamma_2, const float *beta,
                      const float *beta_2, Packed<T> *y, uint8 *mask, float *saved, float *saved_2, float *running_mean,
                      float *running_mean_2, float *running_var, float *running_var_2, float eps, float momentum,
                      uint32 rows, int channels, const float *factors, uint32 first_factor, uint32 pixels) {
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC;
    if (channel >= channels) return;
    float scale[VEC], scale_2[VEC], shift[VEC], shift_2[VEC];  // without DROP, `shift` is the sum of both shifts
    {
        const Forward of(sums, about_mean, gamma, beta, saved, running_mean, running_var, eps, momentum, rows, channel,
                         channels);
        const Forward of_2(sums_2, about_mean_2, gamma_2, beta_2, saved_2, running_mean_2, running_var_2, eps, momentum,
                           rows, channel, channels);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            scale[k] = of.scale[k];
            scale_2[k] = of_2.scale[k];
            shift[k] = DROP ? of.shift[k] : of.shift[k] + of_2.shift[k];
            if (DROP) shift_2[k] = of_2.shift[k];
        }
    }
    const uint32 pitch = channels / VEC;
    for (uint32 i = blockIdx.y * APPLY_ROWS + threadIdx.y; i < rows; i += gridDim.y * APPLY_ROWS) {
        const uint32 at = (rows - 1 - i) * pitch + channel / VEC;
        float v[VEC], v_2[VEC];
        unpack(x[at], v);
        unpack(x_2[at], v_2);
        const float factor = DROP ? drop_factor(rows - 1 - i, factors, first_factor, pixels) : 1;
        uint32 bits = 0;
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            if (DROP) v[k] = (v[k] * scale[k] + shift[k]) * factor + (v_2[k] * scale_2[k] + shift_2[k]);
            else v[k] = v[k] * scale[k] + (v_2[k] * scale_2[k] + shift[k]);
            bits |= uint32(v[k] > 0) << k;
            v[k] = v[k] > 0 || v[k] != v[k] ? v[k] : 0;  // propagates NaN
        }
        y[at] = pack<T>(v);
        mask[at] = uint8(bits);
    }
}

// The sums of both norms, as in batch_norm_backward_reduce. Without DROP, the dbeta of both norms are equal. dz is dy
// (or dy + dy2), masked by ReLU; it is stored for batch_norm_pair_backward_apply.
// Shapes: x, x_2, dy, dz (rows, C); dy2 (rows, C) or (rows of the grid, C); mask (rows, C / 8) bytes; saved (2, C),
// dgamma, dbeta (C) fp32, likewise the operands with _2; partials (gridDim.y, 3 + DROP, C), factors fp32; tickets
// (gridDim.x).
template <class T, SecondGradient SECOND, bool DROP>
__global__ void __launch_bounds__(REDUCE_THREADS, 1)
batch_norm_pair_backward_reduce(const Packed<T> *x, const Packed<T> *x_2, const Packed<T> *dy, const Packed<T> *dy2,
                                const uint8 *mask, Packed<T> *dz, const float *saved, const float *saved_2,
                                float *dgamma, float *dgamma_2, float *dbeta, float *dbeta_2, float *partials,
                                uint32 *tickets, uint32 rows, int channels, const float *factors, uint32 first_factor,
                                uint32 pixels, Grid grid) {
    constexpr bool TWO = SECOND != NONE;
    constexpr int SUMS = 3 + DROP;
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC, pitch = channels / VEC;
    float acc[SUMS][VEC] = {};
    if (channel < channels) {
        float mean[VEC], mean_2[VEC];
        load_floats(saved + channel, mean);
        load_floats(saved_2 + channel, mean_2);
        for (uint32 row = blockIdx.y * REDUCE_ROWS + threadIdx.y; row < rows; row += gridDim.y * REDUCE_ROWS) {
            const uint32 at = row * pitch + channel / VEC, bits = mask[at];
            float v[VEC], v_2[VEC], g[VEC], g2[VEC];
            unpack(x[at], v);
            unpack(x_2[at], v_2);
            unpack(dy[at], g);
            if (TWO) unpack(second_of<SECOND>(dy2, at, row, pitch, channel, grid), g2);
            const float factor = DROP ? drop_factor(row, factors, first_factor, pixels) : 1;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                if (TWO) g[k] += g2[k];
                if (!(bits >> k & 1)) g[k] = 0;
                const float own = DROP ? g[k] * factor : g[k];
                acc[0][k] += g[k];
                acc[1][k] += own * (v[k] - mean[k]);
                acc[2][k] += g[k] * (v_2[k] - mean_2[k]);
                if (DROP) acc[SUMS - 1][k] += own;
            }
            dz[at] = pack<T>(g);
        }
    }
    reduce_over_rows(acc, partials, tickets, channels, [=](int c, const float (&of)[SUMS]) {
        const float invstd = saved[channels + c], invstd_2 = saved_2[channels + c];
        dbeta[c] = of[DROP ? SUMS - 1 : 0];
        dbeta_2[c] = of[0];
        dgamma[c] = of[1] * invstd;
        dgamma_2[c] = of[2] * invstd_2;
    });
}

// dx and dx_2 by `InputGradient`. Rows are processed from the last to the first. Without DROP, both norms use `dbeta`.
// Shapes: x, x_2, dz, dx, dx_2 (rows, C); saved, saved_2 (2, C), gamma, gamma_2, dgamma, dgamma_2, dbeta, dbeta_2 (C),
// factors fp32.
template <class T, bool DROP>
__global__ void __launch_bounds__(APPLY_THREADS, 2)
batch_norm_pair_backward_apply(const Packed<T> *x, const Packed<T> *x_2, const Packed<T> *dz, Packed<T> *dx,
                               Packed<T> *dx_2, const float *saved, const float *saved_2, const float *gamma,
                               const float *gamma_2, const float *dgamma, const float *dgamma_2, const float *dbeta,
                               uint32 rows, int channels, const float *dbeta_2, const float *factors,
                               uint32 first_factor, uint32 pixels) {
    constexpr int DEPTH = LOADS / 2;
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC;
    if (channel >= channels) return;
    const Backward of(saved, gamma, nullptr, channel, channels), of_2(saved_2, gamma_2, nullptr, channel, channels);
    const InputGradient to(of, dgamma, dbeta, rows, channel), to_2(of_2, dgamma_2, DROP ? dbeta_2 : dbeta, rows, channel);
    const uint32 stride = gridDim.y * APPLY_ROWS, pitch = channels / VEC;
    for (uint32 i = blockIdx.y * APPLY_ROWS + threadIdx.y; i < rows; i += DEPTH * stride) {
        Packed<T> px[DEPTH], px_2[DEPTH], pdz[DEPTH];
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            if (i + u * stride >= rows) continue;
            const uint32 at = (rows - 1 - (i + u * stride)) * pitch + channel / VEC;
            px[u] = x[at];
            px_2[u] = x_2[at];
            pdz[u] = dz[at];
        }
#pragma unroll
        for (int u = 0; u < DEPTH; ++u) {
            if (i + u * stride >= rows) continue;
            const uint32 at = (rows - 1 - (i + u * stride)) * pitch + channel / VEC;
            float v[VEC], v_2[VEC], g[VEC];
            unpack(px[u], v);
            unpack(px_2[u], v_2);
            unpack(pdz[u], g);
            const float factor = DROP ? drop_factor(rows - 1 - (i + u * stride), factors, first_factor, pixels) : 1;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                v[k] = to.of(k, of.scale[k], DROP ? g[k] * factor : g[k], v[k]);
                v_2[k] = to_2.of(k, of_2.scale[k], g[k], v_2[k]);
            }
            dx[at] = pack<T>(v);
            dx_2[at] = pack<T>(v_2);
        }
    }
}
