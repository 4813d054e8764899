// LayerNorm over the channels of each pixel (rows of a matrix), forward and backward. A warp works on a row; sums are fp32, in
// a fixed order.
#include "common.cuh"

constexpr int WARPS = 8;  // warps of a block; each warp processes a row
constexpr int THREADS = 256;  // threads of a block of layer_norm_sums

__device__ inline float warp_sum(float v) {
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);
    return v;
}

// Mean and 1 / sqrt(variance + eps) of a row: the variance is computed from the distances to the mean, which loses no
// digits.
template <class T> __device__ inline float2 row_statistics(const T *row, uint32 channels, float eps, int lane) {
    float sum = 0, squares = 0;
    for (uint32 c = lane; c < channels; c += WARP) sum += to_float(row[c]);
    const float mean = warp_sum(sum) / channels;
    for (uint32 c = lane; c < channels; c += WARP) {
        const float d = to_float(row[c]) - mean;
        squares += d * d;
    }
    return {mean, rsqrtf(warp_sum(squares) / channels + eps)};
}

// y = (x - mean) / deviation * gamma + beta. Mean and deviation, sqrt(variance + eps), are written if their pointers
// are not null.
// Shapes: x, y (rows, channels); gamma, beta (channels) fp32; means fp32 and deviations (rows). gridDim.x * WARPS >=
// rows.
template <class T>
__global__ void __launch_bounds__(WARPS *WARP) layer_norm(const T *x, const float *gamma, const float *beta, T *y, float *means,
                                                          T *deviations, float eps, uint32 rows, uint32 channels) {
    const uint32 row = blockIdx.x * WARPS + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const T *from = x + size_t(row) * channels;
    const float2 of = row_statistics(from, channels, eps, lane);
    for (uint32 c = lane; c < channels; c += WARP)
        y[size_t(row) * channels + c] = from_float<T>((to_float(from[c]) - of.x) * of.y * gamma[c] + beta[c]);
    if (lane == 0) {
        if (means) means[row] = of.x;
        if (deviations) deviations[row] = from_float<T>(1 / of.y);
    }
}

// Computes dx, and the statistics of each row for `layer_norm_sums`.
// Shapes: dy, x, dx (rows, channels); gamma (channels) fp32; statistics (rows) pairs of fp32. gridDim.x * WARPS >=
// rows.
template <class T>
__global__ void __launch_bounds__(WARPS *WARP) layer_norm_backward(const T *dy, const T *x, const float *gamma, T *dx,
                                                                   float2 *statistics, float eps, uint32 rows,
                                                                   uint32 channels) {
    const uint32 row = blockIdx.x * WARPS + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const size_t first = size_t(row) * channels;
    const float2 of = row_statistics(x + first, channels, eps, lane);
    float sum = 0, with_normal = 0;
    for (uint32 c = lane; c < channels; c += WARP) {
        const float g = to_float(dy[first + c]) * gamma[c];
        sum += g;
        with_normal += g * (to_float(x[first + c]) - of.x) * of.y;
    }
    sum = warp_sum(sum) / channels;
    with_normal = warp_sum(with_normal) / channels;
    for (uint32 c = lane; c < channels; c += WARP) {
        const float normal = (to_float(x[first + c]) - of.x) * of.y;
        dx[first + c] = from_float<T>((to_float(dy[first + c]) * gamma[c] - sum - normal * with_normal) * of.y);
    }
    if (lane == 0) statistics[row] = of;
}

// dgamma and dbeta: the sums over all rows of dy * (x - mean) / deviation, and of dy. A block works on one channel.
// Shapes: dy, x (rows, channels); statistics (rows) pairs of fp32; dgamma, dbeta (channels) fp32. gridDim.x = channels.
template <class T>
__global__ void __launch_bounds__(THREADS) layer_norm_sums(const T *dy, const T *x, const float2 *statistics, float *dgamma,
                                                           float *dbeta, uint32 rows, uint32 channels) {
    const uint32 channel = blockIdx.x;
    float with_normal = 0, sum = 0;
    for (uint32 row = threadIdx.x; row < rows; row += THREADS) {
        const size_t at = size_t(row) * channels + channel;
        const float2 of = statistics[row];
        const float g = to_float(dy[at]);
        with_normal += g * (to_float(x[at]) - of.x) * of.y;
        sum += g;
    }
    const auto add = [](float a, float b) { return a + b; };
    with_normal = block_reduce(with_normal, 0, add);
    sum = block_reduce(sum, 0, add);
    if (threadIdx.x == 0) {
        dgamma[channel] = with_normal;
        dbeta[channel] = sum;
    }
}
