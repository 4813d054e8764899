// Small elementwise kernels: conversion and mixing of the network's input, sums and conversions of gradients, folding of
// BatchNorm.
#include "common.cuh"

// y (pixels, to_channels) = x (pixels, from_channels), converted; additional channels are 0. RGB images become
// 4-channel images, which cuDNN's tensor-core kernels can load. With one channel per pixel, the kernel converts an
// array of elements. One thread per pixel.
// Shapes: x (rows, from_channels), y (rows, to_channels); pixels = rows = N*H*W.
template <class From, class T>
__global__ void convert_input(const From *x, T *y, int64_t pixels, int from_channels, int to_channels) {
    const int64_t pixel = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (pixel >= pixels) return;
    for (int c = 0; c < to_channels; ++c)
        y[pixel * to_channels + c] = from_float<T>(c < from_channels ? to_float(x[pixel * from_channels + c]) : 0);
}

// Mixup (Zhang et al., arXiv:1710.09412), in place: image i of n becomes lambda * image[i] + (1 - lambda) * image[n - 1
// - i]. One thread mixes 4 elements of a pair of images; `size` is the number of elements of an image.
// Shapes: images (N, H*W*C), with size = H*W*C; gridDim.x is a multiple of ceil(N / 2).
template <class T>
__global__ void mix_images(T *images, int64_t size, int num_images, float lambda) {
    struct alignas(4 * sizeof(T)) Four { T value[4]; };
    const uint32 blocks = gridDim.x / ((num_images + 1) / 2), pair = blockIdx.x / blocks;
    const int64_t at = 4 * (int64_t(blockIdx.x % blocks) * blockDim.x + threadIdx.x);
    if (at >= size) return;
    Four *first = reinterpret_cast<Four *>(images + pair * size + at);
    Four *last = reinterpret_cast<Four *>(images + (num_images - 1 - pair) * size + at);
    Four a = *first, b = *last;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const float x = to_float(a.value[k]), y = to_float(b.value[k]);
        a.value[k] = from_float<T>(lambda * x + (1 - lambda) * y);
        b.value[k] = from_float<T>(lambda * y + (1 - lambda) * x);
    }
    *first = a;
    *last = b;
}

// CutMix (Yun et al., arXiv:1905.04899): exchanges the box of image i of n with the box of image n - 1 - i, in place.
// One thread exchanges one pixel of a pair of images. With an odd n, the middle image is unchanged.
// Shapes: images (N, H, W, CHANNELS), the box in pixels; gridDim.x is a multiple of ceil(N / 2).
template <class T, int CHANNELS>
__global__ void exchange_boxes(T *images, int num_images, int height, int width, int top, int left, int bottom,
                               int right) {
    struct alignas(CHANNELS == 4 ? 4 * sizeof(T) : sizeof(T)) Pixel { T value[CHANNELS]; };
    const uint32 blocks = gridDim.x / ((num_images + 1) / 2), pair = blockIdx.x / blocks;
    const uint32 partner = num_images - 1 - pair, box_width = right - left;
    const uint32 at = blockIdx.x % blocks * blockDim.x + threadIdx.x;
    if (pair == partner || at >= (bottom - top) * box_width) return;
    Pixel *box = reinterpret_cast<Pixel *>(images) + size_t(top + at / box_width) * width + left + at % box_width;
    const size_t size = size_t(height) * width;
    const Pixel own = box[pair * size];
    box[pair * size] = box[partner * size];
    box[partner * size] = own;
}

// y = x in fp32: gradients for an all-reduce in fp32.
// Shapes: x and, in fp32, y (8 * vectors).
template <class T>
__global__ void widen(const Packed<T> *x, float *y, uint32 vectors) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    float a[VEC];
    unpack(x[at], a);
    store_floats(y + size_t(at) * VEC, a);
}

// z = x + y
// Shapes: x, y, z (8 * vectors).
template <class T>
__global__ void add(const Packed<T> *x, const Packed<T> *y, Packed<T> *z, uint32 vectors) {
    combine(x, y, z, vectors, [](float a, float b) { return a + b; });
}

// Exchanges x and y.
// Shapes: x, y (4 * vectors) fp32.
__global__ void exchange(float4 *x, float4 *y, uint32 vectors) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    const float4 a = x[at];
    x[at] = y[at];
    y[at] = a;
}

// y = x + bias (+ addend), then ReLU if RELU: the epilogue of a convolution in inference that cuDNN does not fuse. `pitch` is
// the number of vectors of a pixel. y may alias x.
// Shapes: x, addend, y (rows, C); bias (C) fp32. vectors = rows * C / 8, pitch = C / 8.
template <class T, bool ADD, bool RELU>
__global__ void bias_add_relu(const Packed<T> *x, const float *bias, const Packed<T> *addend, Packed<T> *y,
                              uint32 vectors, uint32 pitch) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    const float *b = bias + at % pitch * VEC;
    float v[VEC], a[VEC] = {};
    unpack(x[at], v);
    if (ADD) unpack(addend[at], a);
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
        v[k] += b[k] + a[k];
        if (RELU) v[k] = v[k] < 0 ? 0 : v[k];  // propagates NaN
    }
    y[at] = pack<T>(v);
}

// Folds a BatchNorm into the preceding convolution, for inference. The convolution may have its own bias; else `own_bias` is
// null. One block per filter of `size` weights.
// Shapes: weight (K, size) fp32, folded (K, size), with size = C * height * width of the filter; own_bias, gamma, beta, mean,
// var, bias (K) fp32.
template <class T>
__global__ void fold_batch_norm(const float *weight, const float *own_bias, const float *gamma, const float *beta,
                                const float *mean, const float *var, T *folded, float *bias, float eps, uint32 size) {
    const uint32 filter = blockIdx.x;
    const float scale = gamma[filter] / sqrtf(var[filter] + eps);
    for (uint32 at = threadIdx.x; at < size; at += blockDim.x)
        folded[filter * size + at] = from_float<T>(weight[filter * size + at] * scale);
    if (threadIdx.x == 0) bias[filter] = beta[filter] + ((own_bias ? own_bias[filter] : 0) - mean[filter]) * scale;
}

// to = from, 4 vectors of 16 bytes per thread: measures the highest memory rate, for the ceiling in the profile.
// Shapes: from, to (4 * gridDim.x * blockDim.x) vectors of 16 bytes.
__global__ void copy(const uint4 *from, uint4 *to) {
    const size_t at = size_t(blockIdx.x) * blockDim.x * 4 + threadIdx.x;
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = from[at + i * blockDim.x];
#pragma unroll
    for (int i = 0; i < 4; ++i) to[at + i * blockDim.x] = v[i];
}
