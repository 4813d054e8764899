// Layer scale: multiplies each channel of images by its own factor. Also the gradients of images and factors.
#include "batch_norm.cuh"

// y = x * gamma. y may alias x.
// Shapes: x, y (rows, C); gamma (C) fp32. vectors = rows * C / 8, pitch = C / 8.
template <class T>
__global__ void scale_channels(const Packed<T> *x, const float *gamma, Packed<T> *y, uint32 vectors, uint32 pitch) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    float v[VEC], factor[VEC];
    unpack(x[at], v);
    load_floats(gamma + at % pitch * VEC, factor);
#pragma unroll
    for (int k = 0; k < VEC; ++k) v[k] *= factor[k];
    y[at] = pack<T>(v);
}

// dx = dy * gamma, and dgamma = the sum over all rows of dy * x, in a fixed order. dx may alias dy.
// Shapes: dy, x, dx (rows, C); gamma, dgamma (C), partials (gridDim.y, C) fp32; tickets (gridDim.x).
template <class T>
__global__ void __launch_bounds__(REDUCE_THREADS, 1)
scale_channels_backward(const Packed<T> *dy, const Packed<T> *x, const float *gamma, Packed<T> *dx, float *dgamma,
                        float *partials, uint32 *tickets, uint32 rows, int channels) {
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC;
    const uint32 stride = gridDim.y * REDUCE_ROWS, pitch = channels / VEC;
    float sum[1][VEC] = {};
    if (channel < channels) {
        float factor[VEC];
        load_floats(gamma + channel, factor);
        for (uint32 row = blockIdx.y * REDUCE_ROWS + threadIdx.y; row < rows; row += stride) {
            const uint32 at = row * pitch + channel / VEC;
            float g[VEC], v[VEC];
            unpack(dy[at], g);
            unpack(x[at], v);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                sum[0][k] += g[k] * v[k];
                g[k] *= factor[k];
            }
            dx[at] = pack<T>(g);
        }
    }
    reduce_over_rows(sum, partials, tickets, channels, [=](int c, const float (&of)[1]) { dgamma[c] = of[0]; });
}
