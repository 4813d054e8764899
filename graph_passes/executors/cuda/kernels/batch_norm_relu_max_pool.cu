// BatchNorm, ReLU and the 3x3 max pooling with stride 2 that consumes it (ResNet's stem), fused. The normalised tensor
// is the largest tensor of the network. Neither this tensor nor its gradient is ever written.
//
// `winner` is the position of the maximum in its window (row * 3 + column). It is NOBODY if no value is above 0: ReLU then
// lets no gradient through. `x_winner` is x at that position, so that the sums of the backward pass need not search for it.
#include "batch_norm_relu_max_pool.cuh"

constexpr int STRIP = 8;  // output rows that a thread of the forward pass computes

// --- forward: compares packed words, two 16-bit channels at once ---

template <class T> constexpr int LANE_BITS = sizeof(T) * 8;                   // bits per channel in a word
template <class T> constexpr int WORDS = sizeof(Packed<T>) / sizeof(uint32);  // words for 8 channels
template <class T> union Words {
    Packed<T> packed;
    uint32 word[WORDS<T>];
    __device__ Words() {}
};

// Replicates `value` in every lane of a word.
template <class T> __device__ constexpr uint32 in_lanes(uint32 value) {
    return LANE_BITS<T> == 16 ? value | value << 16 : value;
}

// Sets all bits of each lane where a > b.
template <class T> __device__ inline uint32 greater(uint32 a, uint32 b) {
    const T *one = reinterpret_cast<const T *>(&a), *other = reinterpret_cast<const T *>(&b);
    uint32 bits = 0;
#pragma unroll
    for (int lane = 0; lane < 32 / LANE_BITS<T>; ++lane)
        if (to_float(one[lane]) > to_float(other[lane])) bits |= ~0u >> (32 - LANE_BITS<T>) << lane * LANE_BITS<T>;
    return bits;
}
template <> __device__ inline uint32 greater<half>(uint32 a, uint32 b) {
    uint32 bits;
    asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(bits) : "r"(a), "r"(b));
    return bits;
}
#if __CUDA_ARCH__ >= 900
template <> __device__ inline uint32 greater<bfloat16>(uint32 a, uint32 b) {
    uint32 bits;
    asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(bits) : "r"(a), "r"(b));
    return bits;
}
#endif

// Running maximum and its position, per channel; among equal values the first wins. If the scale is negative, `flip` inverts
// the sign of the values: the smallest x then gives the largest output.
template <class T> struct Largest {
    uint32 value[WORDS<T>], place[WORDS<T>];

    __device__ void compare(int w, uint32 with, uint32 its_place) {
        const uint32 better = greater<T>(with, value[w]);
        value[w] = (with & better) | (value[w] & ~better);
        place[w] = (its_place & better) | (place[w] & ~better);
    }

    // Takes the maximum of three neighbours in a row; `left` is the position of the first.
    __device__ void look_across(const Words<T> (&x)[KERNEL], const Words<T> &flip, uint32 left) {
#pragma unroll
        for (int w = 0; w < WORDS<T>; ++w) {
            value[w] = x[0].word[w] ^ flip.word[w];
            place[w] = left;
#pragma unroll
            for (int j = 1; j < KERNEL; ++j) compare(w, x[j].word[w] ^ flip.word[w], in_lanes<T>(j));
        }
    }

    // Merges the maximum of one row of the window.
    __device__ void look_down(const Largest &of_row, int row) {
#pragma unroll
        for (int w = 0; w < WORDS<T>; ++w) compare(w, of_row.value[w], of_row.place[w] + in_lanes<T>(row * KERNEL));
    }
};

// y = max over the window of relu(x * scale + shift). NaN needs no special case: a NaN in x makes the statistics, the
// scale and so the whole channel NaN. A thread computes a strip, which is a column of STRIP pixels, from top to bottom.
// Rows shared by two windows are read once, and the next two rows are in flight. Pixels outside the image are replaced
// by pixels at the edge, which changes no maximum. Strips are processed from the last to the first, like the rows in
// batch_norm_apply.
// Shapes: x (N, H, W, C); y, x_winner (N, OH, OW, C); winner (N, OH, OW, C) bytes; sums (2 or 3, C), saved (2, C),
// gamma, beta, running_mean, running_var (C) fp32. rows = N*H*W, strips = N * ceil(OH / STRIP) * OW.
template <class T>
__global__ void __launch_bounds__(APPLY_THREADS, 3)
batch_norm_relu_max_pool(const Packed<T> *x, const float *sums, bool about_mean, const float *gamma, const float *beta,
                         Packed<T> *y, uint2 *winner, Packed<T> *x_winner, float *saved, float *running_mean,
                         float *running_var, float eps, float momentum, Image size, uint32 rows, uint32 strips,
                         int channels) {
    __shared__ __align__(16) SharedForward forward;
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC, pitch = channels / VEC, vector = channel / VEC;
    if (threadIdx.y == 0 && channel < channels)
        forward.keep(Forward(sums, about_mean, gamma, beta, saved, running_mean, running_var, eps, momentum, rows, channel,
                             channels));
    __syncthreads();
    if (channel >= channels) return;
    float scale[VEC], shift[VEC];
    forward.load_own(scale, shift);
    Words<T> flip, least;
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
        flip.packed.element[k] = from_float<T>(scale[k] < 0 ? -0.f : 0.f);  // only the sign bit
        least.packed.element[k] = from_float<T>(-INF);
    }
    for (uint32 i = blockIdx.y * APPLY_ROWS + threadIdx.y; i < strips; i += gridDim.y * APPLY_ROWS) {
        const Place at(strips - 1 - i, (size.out_height + STRIP - 1) / STRIP, size.out_width);
        const int first = at.row * STRIP, end = min(first + STRIP, size.out_height);
        const int middle = at.column * STRIDE, last = size.width - 1;
        const int columns[KERNEL] = {max(middle - 1, 0), min(middle, last), min(middle + 1, last)};
        const uint32 left = in_lanes<T>(at.column == 0 ? 1 : 0);  // position of the first of the three columns
        const auto load_row = [&](int row, Words<T> (&to)[KERNEL]) {
            const uint32 from = (at.image * size.height + min(row, size.height - 1)) * size.width;
#pragma unroll
            for (int j = 0; j < KERNEL; ++j) to[j].packed = x[(from + columns[j]) * pitch + vector];
        };
        Words<T> upper[KERNEL], lower[KERNEL];
        Largest<T> above;  // maximum of the row above the window's centre
#pragma unroll
        for (int w = 0; w < WORDS<T>; ++w) {
            above.value[w] = least.word[w];
            above.place[w] = in_lanes<T>(NOBODY);
        }
        if (first > 0) {
            load_row(first * STRIDE - 1, upper);
            above.look_across(upper, flip, left);
        }
        load_row(first * STRIDE, upper);
        load_row(first * STRIDE + 1, lower);
#pragma unroll 1
        for (int row = first; row < end; ++row) {
            Largest<T> best = above, of_row;
            of_row.look_across(upper, flip, left);
            if (row + 1 < end) load_row((row + 1) * STRIDE, upper);
            best.look_down(of_row, 1);
            above.look_across(lower, flip, left);
            if (row + 1 < end) load_row((row + 1) * STRIDE + 1, lower);
            best.look_down(above, 2);

            const uint32 to = ((at.image * size.out_height + row) * size.out_width + at.column) * pitch + vector;
            Words<T> value;
#pragma unroll
            for (int w = 0; w < WORDS<T>; ++w) value.word[w] = best.value[w] ^ flip.word[w];
            x_winner[to] = value.packed;
            float v[VEC];
            unpack(value.packed, v);
            // scale and shift are reloaded for each row: kept in registers, they would need too many
            forward.load_own(scale, shift);
            uint2 places = {0, 0};
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                v[k] = v[k] * scale[k] + shift[k];
                uint32 p = best.place[k * LANE_BITS<T> / 32] >> k * LANE_BITS<T> % 32 & 0xff;
                if (v[k] <= 0) {
                    v[k] = 0;
                    p = NOBODY;
                }
                (k < 4 ? places.x : places.y) |= p << 8 * (k % 4);
            }
            y[to] = pack<T>(v);
            winner[to] = places;
        }
    }
}

// --- backward ---

// dbeta and dgamma as in batch_norm_backward_reduce, summed over output pixels: each output's gradient goes to one winner.
// The gradient is dy; with TWO it is dy + dy2, which is also stored as dz.
// Shapes: x_winner, dy, dy2, dz (N, OH, OW, C); winner (N, OH, OW, C) bytes; saved (2, C), dgamma, dbeta (C), partials
// (gridDim.y, 2, C) fp32; tickets (gridDim.x). outputs = N*OH*OW.
template <class T, bool TWO>
__global__ void __launch_bounds__(REDUCE_THREADS, 1)
batch_norm_relu_max_pool_backward_reduce(const Packed<T> *x_winner, const Packed<T> *dy, const Packed<T> *dy2,
                                         const uint2 *winner, Packed<T> *dz, const float *saved, float *dgamma,
                                         float *dbeta, float *partials, uint32 *tickets, uint32 outputs, int channels) {
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC, pitch = channels / VEC;
    float acc[2][VEC] = {};
    if (channel < channels) {
        float mean[VEC];
        load_floats(saved + channel, mean);
#pragma unroll 2
        for (uint32 pixel = blockIdx.y * REDUCE_ROWS + threadIdx.y; pixel < outputs; pixel += gridDim.y * REDUCE_ROWS) {
            const uint32 at = pixel * pitch + channel / VEC;
            const uint2 places = winner[at];
            float g[VEC], g2[VEC], v[VEC];
            unpack(dy[at], g);
            if (TWO) unpack(dy2[at], g2);
            unpack(x_winner[at], v);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                if (TWO) g[k] += g2[k];
                if (winner_of(places, k) == NOBODY) g[k] = 0;
                acc[0][k] += g[k];
                acc[1][k] += g[k] * (v[k] - mean[k]);
            }
            if (TWO) dz[at] = pack<T>(g);
        }
    }
    reduce_over_rows(acc, partials, tickets, channels, [=](int c, const float (&of)[2]) {
        dgamma[c] = of[1] * saved[channels + c];
        dbeta[c] = of[0];
    });
}

// The gradient of x. One thread computes 2x2 pixels.
// Shapes: x, dx (N, H, W, C); dz (N, OH, OW, C); winner (N, OH, OW, C) bytes; saved (2, C), gamma, dgamma, dbeta (C) fp32.
// rows = N*H*W, squares = N * ceil(H / 2) * ceil(W / 2).
template <class T>
__global__ void __launch_bounds__(APPLY_THREADS, 2)
batch_norm_relu_max_pool_backward_apply(const Packed<T> *x, const Packed<T> *dz, const uint2 *winner, Packed<T> *dx,
                                        const float *saved, const float *gamma, const float *dgamma, const float *dbeta,
                                        Image size, uint32 rows, uint32 squares, int channels) {
    const int channel = (blockIdx.x * TILE + threadIdx.x) * VEC, pitch = channels / VEC;
    if (channel >= channels) return;
    const PoolGradient<T> gradient(saved, gamma, dgamma, dbeta, rows, channel, channels);
    for (uint32 square = blockIdx.y * APPLY_ROWS + threadIdx.y; square < squares; square += gridDim.y * APPLY_ROWS) {
        const Place at(square, (size.height + 1) / 2, (size.width + 1) / 2);
        gradient.square(x, dz, winner, at.image, at.row, at.column, size, pitch, channel / VEC,
                        [=](int r, int s, bool inside, const Packed<T> &v) {
            const uint32 pixel = (at.image * size.height + 2 * at.row + r) * size.width + 2 * at.column + s;
            if (inside) dx[pixel * pitch + channel / VEC] = v;
        });
    }
}
