// Pooling in NHWC: max and average over windows, and the average over the whole image. A thread works on 8 neighbouring
// channels.
#include "common.cuh"
#include "window.cuh"

// The windows that cover an element of the input: they start at most `kernel - 1` before it. `top` and `left` are the
// element's position in the padded image.
struct Covering {
    int top, left, first_h, last_h, first_w, last_w;

    __device__ Covering(const Window &w, int row, int column)
        : top(row + w.pad_h), left(column + w.pad_w),
          first_h(max(0, (top - w.kernel_h + w.stride_h) / w.stride_h)), last_h(min(w.out_height - 1, top / w.stride_h)),
          first_w(max(0, (left - w.kernel_w + w.stride_w) / w.stride_w)), last_w(min(w.out_width - 1, left / w.stride_w)) {}
};

// y = maximum over the window. `winner` = its position in the window (row * kernel_w + column), for the backward pass. Among
// equal values the first one wins, as in MXNet. Padding never wins.
// Shapes: x (N, H, W, C), y (N, OH, OW, C); winner (N, OH, OW, C) bytes. vectors = N * OH * OW * C / 8, pitch = C / 8.
template <class T>
__global__ void max_pool(const Packed<T> *x, Packed<T> *y, uint8 *winner, Window w, uint32 vectors, int pitch) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    const uint32 group = at % pitch, column = at / pitch % w.out_width, row = at / pitch / w.out_width % w.out_height;
    const uint32 image = at / pitch / w.out_width / w.out_height;
    float best[VEC];
    uint32 place[VEC];
    bool first = true;
    for (int i = 0; i < w.kernel_h; ++i) {
        const int h = int(row) * w.stride_h - w.pad_h + i;
        if (h < 0 || h >= w.height) continue;
        for (int j = 0; j < w.kernel_w; ++j) {
            const int c = int(column) * w.stride_w - w.pad_w + j;
            if (c < 0 || c >= w.width) continue;
            float v[VEC];
            unpack(x[((image * w.height + h) * w.width + c) * pitch + group], v);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                if (first || v[k] > best[k] || v[k] != v[k]) {  // NaN wins, so that it propagates
                    best[k] = v[k];
                    place[k] = i * w.kernel_w + j;
                }
            }
            first = false;
        }
    }
    y[at] = pack<T>(best);
    uint2 places = {0, 0};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        places.x |= place[k] << 8 * k;
        places.y |= place[k + 4] << 8 * k;
    }
    if (winner) reinterpret_cast<uint2 *>(winner)[at] = places;
}

// dx = sum of dy (or dy + dy2) over the windows that this element won. Each thread gathers its sums, so the kernel
// needs neither atomics nor a cleared dx.
// Shapes: dy, dy2 (N, OH, OW, C), winner (N, OH, OW, C) bytes; dx (N, H, W, C). vectors = rows * C / 8, pitch = C / 8.
template <class T, bool TWO>
__global__ void max_pool_backward(const Packed<T> *dy, const Packed<T> *dy2, const uint8 *winner, Packed<T> *dx, Window w,
                                  uint32 vectors, int pitch) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    const uint32 group = at % pitch, column = at / pitch % w.width, row = at / pitch / w.width % w.height;
    const uint32 image = at / pitch / w.width / w.height;
    const Covering by(w, row, column);
    float sum[VEC] = {};
    for (int i = by.first_h; i <= by.last_h; ++i) {
        for (int j = by.first_w; j <= by.last_w; ++j) {
            const uint32 source = ((image * w.out_height + i) * w.out_width + j) * pitch + group;
            const uint32 place = (by.top - i * w.stride_h) * w.kernel_w + by.left - j * w.stride_w;
            const uint2 places = reinterpret_cast<const uint2 *>(winner)[source];
            float g[VEC], g2[VEC];
            unpack(dy[source], g);
            if (TWO) unpack(dy2[source], g2);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const uint32 won = (k < 4 ? places.x : places.y) >> 8 * (k % 4) & 0xff;
                if (won == place) sum[k] += TWO ? g[k] + g2[k] : g[k];
            }
        }
    }
    dx[at] = pack<T>(sum);
}

// The divisor of an output's sum: the pixels of its window within the image; with `padding` also the pixels in the
// padding.
__device__ inline int window_pixels(const Window &w, int row, int column, bool padding) {
    const int top = row * w.stride_h - w.pad_h, left = column * w.stride_w - w.pad_w;
    const int above = padding ? top : max(top, 0), before = padding ? left : max(left, 0);
    const int bottom = min(top + w.kernel_h, w.height + (padding ? w.pad_h : 0));
    const int right = min(left + w.kernel_w, w.width + (padding ? w.pad_w : 0));
    return (bottom - above) * (right - before);
}

// y = average over the window. PADDING: the padding's pixels, which are 0, count.
// Shapes: x (N, H, W, C), y (N, OH, OW, C). vectors = N * OH * OW * C / 8, pitch = C / 8.
template <class T, bool PADDING>
__global__ void average_pool(const Packed<T> *x, Packed<T> *y, Window w, uint32 vectors, int pitch) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;  // index of the output
    if (at >= vectors) return;
    const uint32 group = at % pitch, column = at / pitch % w.out_width, row = at / pitch / w.out_width % w.out_height;
    const uint32 image = at / pitch / w.out_width / w.out_height;
    const int top = int(row) * w.stride_h - w.pad_h, left = int(column) * w.stride_w - w.pad_w;
    float sum[VEC] = {};
    for (int h = max(top, 0); h < min(top + w.kernel_h, w.height); ++h) {
        for (int c = max(left, 0); c < min(left + w.kernel_w, w.width); ++c) {
            float v[VEC];
            unpack(x[((image * w.height + h) * w.width + c) * pitch + group], v);
#pragma unroll
            for (int k = 0; k < VEC; ++k) sum[k] += v[k];
        }
    }
    const int pixels = window_pixels(w, row, column, PADDING);
#pragma unroll
    for (int k = 0; k < VEC; ++k) sum[k] /= pixels;
    y[at] = pack<T>(sum);
}

// dx = sum of dy / (pixels of the window), over the windows that contain this element.
// Shapes: dy (N, OH, OW, C), dx (N, H, W, C). vectors = rows * C / 8, pitch = C / 8.
template <class T, bool PADDING>
__global__ void average_pool_backward(const Packed<T> *dy, Packed<T> *dx, Window w, uint32 vectors, int pitch) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;  // index of the input
    if (at >= vectors) return;
    const uint32 group = at % pitch, column = at / pitch % w.width, row = at / pitch / w.width % w.height;
    const uint32 image = at / pitch / w.width / w.height;
    const Covering by(w, row, column);
    float sum[VEC] = {};
    for (int i = by.first_h; i <= by.last_h; ++i) {
        for (int j = by.first_w; j <= by.last_w; ++j) {
            float g[VEC];
            unpack(dy[((image * w.out_height + i) * w.out_width + j) * pitch + group], g);
            const int pixels = window_pixels(w, i, j, PADDING);
#pragma unroll
            for (int k = 0; k < VEC; ++k) sum[k] += g[k] / pixels;
        }
    }
    dx[at] = pack<T>(sum);
}

// y = average of x over the pixels of each image; IN_FLIGHT pixels are in flight.
// Shapes: x (N, H, W, C), y (N, C). pixels = H*W, vectors = N * C / 8, pitch = C / 8.
template <class T>
__global__ void global_average_pool(const Packed<T> *x, Packed<T> *y, uint32 vectors, int pixels, int pitch) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;  // index of the output vector, below N * pitch
    if (at >= vectors) return;
    constexpr int IN_FLIGHT = 7;
    const Packed<T> *image = x + size_t(at / pitch) * pixels * pitch + at % pitch;
    float sum[VEC] = {};
    for (int first = 0; first < pixels; first += IN_FLIGHT) {
        Packed<T> packed[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i)
            if (first + i < pixels) packed[i] = image[(first + i) * pitch];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            if (first + i >= pixels) continue;
            float v[VEC];
            unpack(packed[i], v);
#pragma unroll
            for (int k = 0; k < VEC; ++k) sum[k] += v[k];
        }
    }
    const float share = 1.f / pixels;
#pragma unroll
    for (int k = 0; k < VEC; ++k) sum[k] *= share;
    y[at] = pack<T>(sum);
}

// dx = dy / pixels, for every pixel of the image.
// Shapes: dy (N, C), dx (N, H, W, C). pixels = H*W, vectors = rows * C / 8, pitch = C / 8.
template <class T>
__global__ void global_average_pool_backward(const Packed<T> *dy, Packed<T> *dx, uint32 vectors, int pixels, int pitch) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;  // index of the output vector, below N * pixels * pitch
    if (at >= vectors) return;
    float v[VEC];
    unpack(dy[at / (pitch * pixels) * pitch + at % pitch], v);
    const float share = 1.f / pixels;  // one division: eight divisions took longer than the memory accesses
#pragma unroll
    for (int k = 0; k < VEC; ++k) v[k] *= share;
    dx[at] = pack<T>(v);
}
