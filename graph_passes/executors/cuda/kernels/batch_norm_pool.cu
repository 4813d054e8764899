// BatchNorm, ReLU and the 3x3 max pooling with stride 2 behind it in one (ResNet's stem): the normalised tensor, the largest
// of the network, is never written, nor is its gradient.
//
// `winner` is the place of the maximum in its window (row * 3 + column), or NOBODY where no value is above 0: ReLU then
// lets no gradient through. `x_winner` is x there, so that the sums of the backward pass need not look for it.
#include "batch_norm.cuh"

constexpr int KERNEL = 3, STRIDE = 2, PAD = 1;
constexpr uint8 NOBODY = 255;

struct Image { int height, width, out_height, out_width; };

// Where an output pixel's window lies.
struct Place {
    int image, row, column;

    __device__ Place(uint32 pixel, int height, int width)
        : image(pixel / width / height), row(pixel / width % height), column(pixel % width) {}
};

// y = max over the window of relu(x * scale + shift), over `outputs` pixels of the pooled image.
template <class T>
__global__ void __launch_bounds__(APPLY_THREADS, 4)
batch_norm_relu_max_pool(const Packed<T> *x, const float *sums, const float *gamma, const float *beta, Packed<T> *y,
                         uint2 *winner, Packed<T> *x_winner, float *saved, float *running_mean, float *running_var, float eps, float momentum,
                         Image size, uint32 rows, uint32 outputs, int channels) {
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC, pitch = channels / VEC;
    if (channel >= channels) return;
    const Forward of(sums, gamma, beta, saved, running_mean, running_var, eps, momentum, rows, channel, channels);
    for (uint32 pixel = blockIdx.y * APPLY_ROWS + threadIdx.y; pixel < outputs; pixel += gridDim.y * APPLY_ROWS) {
        const Place at(pixel, size.out_height, size.out_width);
        float best[VEC] = {};
        T x_best[VEC] = {};
        uint32 place[VEC];
#pragma unroll
        for (int k = 0; k < VEC; ++k) place[k] = NOBODY;
#pragma unroll
        for (int i = 0; i < KERNEL; ++i) {
            const int row = at.row * STRIDE - PAD + i;
            if (row < 0 || row >= size.height) continue;
#pragma unroll
            for (int j = 0; j < KERNEL; ++j) {
                const int column = at.column * STRIDE - PAD + j;
                if (column < 0 || column >= size.width) continue;
                const Packed<T> here = x[((at.image * size.height + row) * size.width + column) * pitch + channel / VEC];
                float v[VEC];
                unpack(here, v);
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    v[k] = v[k] * of.scale[k] + of.shift[k];
                    if (v[k] > best[k] || v[k] != v[k]) {  // NaN wins, so that it stays visible
                        best[k] = v[k];
                        x_best[k] = here.element[k];
                        place[k] = i * KERNEL + j;
                    }
                }
            }
        }
        y[pixel * pitch + channel / VEC] = pack<T>(best);
        Packed<T> packed;
#pragma unroll
        for (int k = 0; k < VEC; ++k) packed.element[k] = x_best[k];
        x_winner[pixel * pitch + channel / VEC] = packed;
        uint2 places = {0, 0};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            places.x |= place[k] << 8 * k;
            places.y |= place[k + 4] << 8 * k;
        }
        winner[pixel * pitch + channel / VEC] = places;
    }
}

__device__ inline uint32 winner_of(uint2 places, int k) { return (k < 4 ? places.x : places.y) >> 8 * (k % 4) & 0xff; }

// The gradient of an output pixel: dy, or dy + dy2.
template <class T, bool TWO>
__device__ inline void output_gradient(const Packed<T> *dy, const Packed<T> *dy2, uint32 at, float (&g)[VEC]) {
    unpack(dy[at], g);
    if (TWO) {
        float other[VEC];
        unpack(dy2[at], other);
#pragma unroll
        for (int k = 0; k < VEC; ++k) g[k] += other[k];
    }
}

// dbeta and dgamma as in batch_norm_backward_reduce, summed over output pixels: each gradient goes to one winner.
template <class T, bool TWO>
__global__ void __launch_bounds__(REDUCE_THREADS, 1)
batch_norm_relu_max_pool_backward_reduce(const Packed<T> *x_winner, const Packed<T> *dy, const Packed<T> *dy2,
                                         const uint2 *winner, const float *saved, float *dgamma, float *dbeta,
                                         float *partials, uint32 *tickets, uint32 outputs, int channels) {
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC, pitch = channels / VEC;
    float acc[2][VEC] = {};
    if (channel < channels) {
        float mean[VEC];
        load_floats(saved + channel, mean);
#pragma unroll 2
        for (uint32 pixel = blockIdx.y * REDUCE_ROWS + threadIdx.y; pixel < outputs; pixel += gridDim.y * REDUCE_ROWS) {
            const uint32 at = pixel * pitch + channel / VEC;
            const uint2 places = winner[at];
            float g[VEC], v[VEC];
            output_gradient<T, TWO>(dy, dy2, at, g);
            unpack(x_winner[at], v);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                if (winner_of(places, k) == NOBODY) g[k] = 0;
                acc[0][k] += g[k];
                acc[1][k] += g[k] * (v[k] - mean[k]);
            }
        }
    }
    reduce_over_rows(acc, partials, tickets, channels, [=](int c, float sum, float sum_times_x) {
        dbeta[c] = sum;
        dgamma[c] = sum_times_x * saved[channels + c];
    });
}

// dx as in batch_norm_backward_apply. A thread does the 2x2 input pixels that start at twice its own coordinates: they
// lie in the same four windows, so that each window is read once for four pixels.
template <class T, bool TWO>
__global__ void __launch_bounds__(APPLY_THREADS, 2)
batch_norm_relu_max_pool_backward_apply(const Packed<T> *x, const Packed<T> *dy, const Packed<T> *dy2, const uint2 *winner,
                                        Packed<T> *dx, const float *saved, const float *gamma, const float *dgamma,
                                        const float *dbeta, Image size, uint32 rows, uint32 squares, int channels) {
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC, pitch = channels / VEC;
    if (channel >= channels) return;
    const Backward of(saved, gamma, nullptr, channel, channels);
    const InputGradient to(of, dgamma, dbeta, rows, channel);
    for (uint32 square = blockIdx.y * APPLY_ROWS + threadIdx.y; square < squares; square += gridDim.y * APPLY_ROWS) {
        const Place at(square, (size.height + 1) / 2, (size.width + 1) / 2);
        float dz[2][2][VEC] = {};
#pragma unroll
        for (int a = 0; a < 2; ++a) {
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const int row = at.row + a, column = at.column + b;  // of the window
                if (row >= size.out_height || column >= size.out_width) continue;
                const uint32 source = ((at.image * size.out_height + row) * size.out_width + column) * pitch + channel / VEC;
                const uint2 places = winner[source];
                float g[VEC];
                output_gradient<T, TWO>(dy, dy2, source, g);
#pragma unroll
                for (int r = a; r < 2; ++r) {  // the second window of each direction holds the second pixel only
#pragma unroll
                    for (int c = b; c < 2; ++c) {
                        const int place = (r + PAD - STRIDE * a) * KERNEL + c + PAD - STRIDE * b;
#pragma unroll
                        for (int k = 0; k < VEC; ++k) dz[r][c][k] += winner_of(places, k) == place ? g[k] : 0;
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int row = 2 * at.row + r, column = 2 * at.column + c;
                if (row >= size.height || column >= size.width) continue;
                const uint32 target = ((at.image * size.height + row) * size.width + column) * pitch + channel / VEC;
                float v[VEC];
                unpack(x[target], v);
#pragma unroll
                for (int k = 0; k < VEC; ++k) v[k] = of.scale[k] * dz[r][c][k] + to.b[k] * v[k] + to.c[k];
                dx[target] = pack<T>(v);
            }
        }
    }
}
