// Images (N, H, W, C) with one number for each image and channel (N, C): products, sums, and their gradients, as in
// squeeze-and-excitation. A thread works on 8 neighbouring channels.
#include "common.cuh"

constexpr int THREADS = 256;  // threads of a block of pixel_sums

// y = x * s, or with ADD x + s. y may alias x.
// Shapes: x, y (N, pixels, C), s (N, C). vectors = N * pixels * C / 8, pitch = C / 8.
template <class T, bool ADD>
__global__ void broadcast(const Packed<T> *x, const Packed<T> *s, Packed<T> *y, uint32 vectors, uint32 pixels, uint32 pitch) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    float v[VEC], of_image[VEC];
    unpack(x[at], v);
    unpack(s[at / pitch / pixels * pitch + at % pitch], of_image);
#pragma unroll
    for (int k = 0; k < VEC; ++k) v[k] = ADD ? v[k] + of_image[k] : v[k] * of_image[k];
    y[at] = pack<T>(v);
}

// ds = the sum over an image's pixels of dy * x, or of dy if x is null. The order of the sum is fixed, so results are
// reproducible to the bit. A block works on 8 channels of an image.
// Shapes: dy, x (N, pixels, C), ds (N, C). gridDim.x = N * pitch, pitch = C / 8.
template <class T>
__global__ void __launch_bounds__(THREADS) pixel_sums(const Packed<T> *dy, const Packed<T> *x, Packed<T> *ds, uint32 pixels,
                                                      uint32 pitch) {
    const uint32 image = blockIdx.x / pitch, group = blockIdx.x % pitch;
    float sum[VEC] = {};
    for (uint32 pixel = threadIdx.x; pixel < pixels; pixel += THREADS) {
        const uint32 at = (image * pixels + pixel) * pitch + group;
        float g[VEC], v[VEC];
        unpack(dy[at], g);
        if (x) unpack(x[at], v);
#pragma unroll
        for (int k = 0; k < VEC; ++k) sum[k] += x ? g[k] * v[k] : g[k];
    }
#pragma unroll
    for (int k = 0; k < VEC; ++k) sum[k] = block_reduce(sum[k], 0, [](float a, float b) { return a + b; });
    if (threadIdx.x == 0) ds[blockIdx.x] = pack<T>(sum);
}
