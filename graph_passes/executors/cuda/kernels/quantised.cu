// INT8: the operators between convolutions, and convolutions of any shape. Most convolutions run on tensor cores
// instead, through quantised_conv.cu or cuDNN.
#include "quantised.cuh"
#include "window.cuh"

// y = round(x / scale), saturated to int8.
// Shapes: x of the type T, y int8 (8 * vectors).
template <class T>
__global__ void quantise(const Packed<T> *x, uint2 *y, float reciprocal_scale, uint32 vectors) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    float v[VEC];
    unpack(x[at], v);
    struct alignas(8) { int8 element[VEC]; } out;
#pragma unroll
    for (int k = 0; k < VEC; ++k) out.element[k] = int8(saturated(__fmul_rn(v[k], reciprocal_scale)));
    y[at] = *reinterpret_cast<const uint2 *>(&out);
}

// Space to depth: 2x2 pixels of images with up to 4 channels become the 16 channels of one pixel, in units of a scale. The
// border is zeros: `before_h` pixels above and `before_w` to the left. One thread per output pixel.
// Shapes: x (N, height, width, channels) of the type T, channels 4; y (N, out_height, out_width, 16) int8. squares = N *
// out_height * out_width.
template <class T>
__global__ void quantise_squares(const T *x, uint4 *y, float reciprocal_scale, uint32 squares, int height, int width,
                                 int out_height, int out_width, int before_h, int before_w) {
    struct alignas(4 * sizeof(T)) Pixel { T value[4]; };
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= squares) return;
    const uint32 image = at / out_width / out_height;
    const int top = 2 * (int(at / out_width % out_height) - before_h);
    const int left = 2 * (int(at % out_width) - before_w);
    struct alignas(16) { int8 element[16]; } out = {};
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const int h = top + p / 2, w = left + p % 2;
        if (uint32(h) >= uint32(height) || uint32(w) >= uint32(width)) continue;
        const Pixel pixel = reinterpret_cast<const Pixel *>(x)[(image * height + h) * size_t(width) + w];
#pragma unroll
        for (int c = 0; c < 4; ++c)
            out.element[4 * p + c] = int8(saturated(__fmul_rn(to_float(pixel.value[c]), reciprocal_scale)));
    }
    y[at] = *reinterpret_cast<const uint4 *>(&out);
}

// y = x * scale.
// Shapes: x int8, y of the type T (8 * vectors).
template <class T>
__global__ void dequantise(const uint2 *x, Packed<T> *y, float scale, uint32 vectors) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    const uint2 words = x[at];
    float v[VEC];
#pragma unroll
    for (int k = 0; k < VEC; ++k) v[k] = __fmul_rn(__int2float_rn(byte_of(k < 4 ? words.x : words.y, k % 4)), scale);
    y[at] = pack<T>(v);
}

// The image of an output pixel, and the part of the image that its window covers.
struct Region {
    uint32 image;
    int top, bottom, left, right;  // relative to the image; may lie in the padding

    __device__ Region(const Window &w, uint32 pixel)
        : image(pixel / w.out_width / w.out_height), top(int(pixel / w.out_width % w.out_height) * w.stride_h - w.pad_h),
          bottom(min(top + w.kernel_h, w.height + w.pad_h)), left(int(pixel % w.out_width) * w.stride_w - w.pad_w),
          right(min(left + w.kernel_w, w.width + w.pad_w)) {}
    __device__ int pixels() const { return (bottom - top) * (right - left); }
    __device__ void clip(const Window &w) {
        top = max(top, 0), left = max(left, 0), bottom = min(bottom, w.height), right = min(right, w.width);
    }
};

// y = maximum over the window; padding never wins. A thread computes 4 * WORDS channels. SIZE is the size of a square
// window, whose loads are then all in flight at once; with 0 the window can have any size.
// Shapes: x (N, H, W, C), y (N, OH, OW, C) int8. items = N * OH * OW * C / (4 * WORDS), pitch = C / (4 * WORDS).
template <int WORDS, int SIZE>
__global__ void quantised_max_pool(const uint32 *x, uint32 *y, Window w, uint32 items, int pitch) {
    struct alignas(4 * WORDS) Words { uint32 word[WORDS]; };
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= items) return;
    Region region(w, at / pitch);
    region.clip(w);
    // Bytes 1 and 3 of a word are compared as the high bytes of two 16-bit numbers; so are bytes 0 and 2, after a shift.
    // Hopper compares two 16-bit numbers in one instruction, and four bytes in seven. The low bytes only decide between equal
    // high bytes.
    Words odd, even;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) odd.word[i] = even.word[i] = 0x80008000;
    const auto pixel = [&](int h, int c) {
        return reinterpret_cast<const Words *>(x)[((region.image * w.height + h) * size_t(w.width) + c) * pitch + at % pitch];
    };
    const auto take = [&](const Words &v) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            odd.word[i] = __vmaxs2(odd.word[i], v.word[i]);
            even.word[i] = __vmaxs2(even.word[i], v.word[i] << 8);
        }
    };
    if constexpr (SIZE == 0) {
        for (int h = region.top; h < region.bottom; ++h)
            for (int c = region.left; c < region.right; ++c) take(pixel(h, c));
    } else if (region.top < region.bottom && region.left < region.right) {
        Words all[SIZE * SIZE];  // at the borders some pixels are read twice
#pragma unroll
        for (int k = 0; k < SIZE * SIZE; ++k)
            all[k] = pixel(min(region.top + k / SIZE, region.bottom - 1),
                           min(region.left + k % SIZE, region.right - 1));
#pragma unroll
        for (int k = 0; k < SIZE * SIZE; ++k) take(all[k]);
    }
    Words best;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) best.word[i] = __byte_perm(even.word[i], odd.word[i], 0x7351);
    reinterpret_cast<Words *>(y)[at] = best;
}

enum Divisor { SUM, IMAGE, PADDING };

// y = the exact sum over the window times fp32(ratio / divisor). The divisor is 1 for SUM. For IMAGE it is the number
// of the window's pixels within the image; PADDING also counts pixels in the padding. A thread computes 4 * WORDS
// channels.
// Shapes: x (N, H, W, C) int8, y (N, OH, OW, C), int8 or of the type T. items and pitch as above.
template <class T, int WORDS, Divisor DIVISOR>
__global__ void quantised_average_pool(const uint32 *x, T *y, Window w, double ratio, uint32 items, int pitch) {
    struct alignas(4 * WORDS) Words { uint32 word[WORDS]; };
    struct Channels { T element[4 * WORDS]; };
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= items) return;
    Region region(w, at / pitch);
    const int padded = region.pixels();
    region.clip(w);
    int sum[4 * WORDS] = {};
    // Whole lines are contiguous in memory and are read like one long line. For 7x7 pixels a thread then waits seven
    // times, for eight loads each, instead of 28 times, for up to four loads each.
    const bool whole = region.left == 0 && region.right == w.width;
    const int height = region.bottom - region.top, width = region.right - region.left;
    const int lines = whole ? 1 : height, length = whole ? height * width : width;
    for (int h = 0; h < lines; ++h) {
        const size_t first = (region.image * w.height + region.top + h) * size_t(w.width) + region.left;
#pragma unroll 8
        for (int c = 0; c < length; ++c) {
            const Words v = reinterpret_cast<const Words *>(x)[(first + c) * pitch + at % pitch];
#pragma unroll
            for (int k = 0; k < 4 * WORDS; ++k) sum[k] += byte_of(v.word[k / 4], k % 4);
        }
    }
    const float multiplier = float(ratio / (DIVISOR == SUM ? 1 : DIVISOR == IMAGE ? region.pixels() : padded));
    Channels out;
#pragma unroll
    for (int k = 0; k < 4 * WORDS; ++k) out.element[k] = result<T>(__fmul_rn(__int2float_rn(sum[k]), multiplier));
    reinterpret_cast<Channels *>(y)[at] = out;
}

// Direct convolution, one thread per output, for shapes and GPUs without a faster kernel. The channels of a group are a
// multiple of 4. `bias` and `addend` may be null.
// Shapes: x (N, H, W, C), weight (K, kernel_h, kernel_w, C / groups), addend (rows, K) int8; multiplier (K) fp32; bias (K)
// int32; y (rows, K), int8 or of the type T. outputs = rows * K.
template <class T, bool ADD, bool RELU>
__global__ void quantised_conv_direct(const int *x, const int *weight, const float *multiplier, const int *bias,
                                      const int8 *addend, T *y, Convolution c, float addend_share, uint32 outputs, int groups) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= outputs) return;
    const int filter = at % c.filters, words = c.channels / 4, own = words / groups;
    const Place place(c, at / c.filters);
    const int first = filter / (c.filters / groups) * own;
    const int *w = weight + size_t(filter) * c.kernel_h * c.kernel_w * own;
    int sum = bias ? bias[filter] : 0;
    for (int i = 0; i < c.kernel_h; ++i)
        for (int j = 0; j < c.kernel_w; ++j, w += own) {
            const int row = place.top + i * c.dilate_h, column = place.left + j * c.dilate_w;
            if (uint32(row) >= uint32(c.height) || uint32(column) >= uint32(c.width)) continue;
            const int *pixel = x + ((place.image * c.height + row) * size_t(c.width) + column) * words + first;
            for (int k = 0; k < own; ++k) sum = __dp4a(pixel[k], w[k], sum);
        }
    y[at] = result<T>(requantised<ADD, RELU>(sum, multiplier[filter], ADD ? addend[at] : 0, addend_share));
}
