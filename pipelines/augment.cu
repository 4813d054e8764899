// Augments a decoded batch on a GPU for training: resize, policy operations, colours, blur, solarise, erase, normalise.
//
// augment.py launches these kernels. It puts definitions before this file: `enum Family`, MEAN, PER_STD (1 / standard
// deviation), MEAN_COLOUR (R, G, B, 0 to 255), FILL (grey outside an image), CUTOUT (side of the square cut from each
// window, as a fraction; 0 for none), SOLARISES and ERASES (whether any image is solarised or erased), CHANNELS, BLOCK
// (threads of a block), and HALF if the batch is fp16.
//
// Resized images are changed in rounds. In each round, every image has one `Change`, with its own family and numbers.
// The last round also writes the batch; without rounds, the resize writes it. So the number of launches depends only on
// the number of rounds, not on the images' operations. Between rounds pixels are bytes, as in Pillow.
//
// Shapes: N images of H x W pixels. windows: (N,), each of its own size. x: the resized images, (N, H, W, 3) uint8.
// changes: (N, rounds). finishes: (N,). statistics: (N, 3).

using uint8 = unsigned char;
using uint32 = unsigned int;

// The decoded part of an image. Layout: WINDOW in augment.py.
struct Window {
    const uint8 *pixels;  // (height, width, 3)
    int height, width;
};

// The change of one image in one round. Layout: CHANGE in augment.py.
struct Change {
    int family;
    float place[2][3];  // WARP: maps a position (x, y, 1) in the output to a position in the input, in pixels
    float colour[3][4];               // MATRIX, COLOURS: maps a colour (R, G, B, 1) to the new colour
    float centre;                     // COLOURS: fraction of the image's mean grey to add
    float factor;                     // CONTRAST, SHARPNESS
    // BITS: threshold: values from here on are inverted; mask: bits to keep; lift: added to values below 128
    int threshold, mask, lift;
    float sigma;                      // BLUR_X, BLUR_Y: standard deviation, in pixels
};

// The parameters of an image's resize and of its last steps. Layout: FINISH in augment.py.
struct Finish {
    int mirror, cubic;  // cubic: bicubic, else bilinear
    float hole[2];      // CUTOUT: left and top of the square, as fractions of the window
    int solarise;
    int top, left, bottom, right;  // the erased rectangle
};

// A rectangle of an image, in pixels.
struct Rectangle {
    int top, left, bottom, right;

    __device__ bool has(int row, int column) const {
        return top <= row && row < bottom && left <= column && column < right;
    }
};

// Statistics of one channel of one image, for the families that need them.
struct Statistics {
    float mean;
    uint8 table[256];  // AUTO_CONTRAST, EQUALIZE: the new value of each level
};

#ifdef HALF
struct Element { unsigned short bits; };
__device__ inline Element element(float v) {
    Element e;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(e.bits) : "f"(v));
    return e;
}
#else
using Element = float;
__device__ inline Element element(float v) { return v; }
#endif

struct alignas(CHANNELS == 4 ? 4 * sizeof(Element) : sizeof(Element)) Pixel { Element channel[CHANNELS]; };

struct Colour {
    float channel[3];  // 0 to 255
    __device__ float &operator[](int c) { return channel[c]; }
};

// Adding 2^23 rounds to a whole number, because the lowest mantissa bit then has the value 1. A conversion instruction
// would take as long as eight additions.
constexpr float UNITS = 8388608.f;

// Both round to the nearest byte value: `to_level` returns a float, `to_byte` a byte.
__device__ inline float to_level(float v) { return (fminf(fmaxf(v, 0.f), 255.f) + UNITS) - UNITS; }
__device__ inline uint8 to_byte(float v) { return uint8(__float_as_uint(fminf(fmaxf(v, 0.f), 255.f) + UNITS)); }

// Clamp to 0..255 and truncate, as Pillow does.
__device__ inline float cut(float v) { return truncf(fminf(fmaxf(v, 0.f), 255.f)); }

// Computes Pillow's Image.blend.
__device__ inline float blend(float from, float to, float factor) { return cut(from + factor * (to - from)); }

__device__ inline float grey(float r, float g, float b) { return 0.299f * r + 0.587f * g + 0.114f * b; }

// A uint8 image with reading functions.
struct Image {
    const uint8 *pixels;
    int height, width;

    __device__ Colour at(int y, int x) const {
        const uint8 *p = pixels + 3 * (y * width + x);
        return {{float(p[0]), float(p[1]), float(p[2])}};
    }

    // Bilinear interpolation; pixels outside the image are FILL.
    __device__ Colour between(float y, float x) const {
        // Clamp positions far outside, which all read FILL, so that they fit an int.
        const float row = floorf(fminf(fmaxf(y, -2.f), height + 1.f)), column = floorf(fminf(fmaxf(x, -2.f), width + 1.f));
        const float below = fminf(fmaxf(y - row, 0.f), 1.f), right = fminf(fmaxf(x - column, 0.f), 1.f);
        Colour sum = {{0, 0, 0}};
        for (int k = 0; k < 4; ++k) {
            const int v = int(row) + k / 2, u = int(column) + k % 2;
            const float weight = (k / 2 ? below : 1 - below) * (k % 2 ? right : 1 - right);
            const bool is_inside = 0 <= v && v < height && 0 <= u && u < width;
            Colour corner = is_inside ? at(v, u) : Colour{{FILL, FILL, FILL}};
            for (int c = 0; c < 3; ++c) sum[c] += weight * corner[c];
        }
        return sum;
    }
};

// Reflects a position outside the image about the centre of the outermost pixel.
__device__ inline int reflected(int at, int size) {
    while (size > 1 && (at < 0 || at >= size)) at = at < 0 ? -at : 2 * (size - 1) - at;
    return size > 1 ? at : 0;
}

// Blends Pillow's ImageFilter.SMOOTH with the image. The outermost pixels are unchanged.
__device__ inline Colour sharpened(const Image &image, int y, int x, float factor) {
    Colour here = image.at(y, x), sum = {{0, 0, 0}};
    if (y == 0 || x == 0 || y == image.height - 1 || x == image.width - 1) return here;
    for (int k = 0; k < 9; ++k) {
        Colour near = image.at(y + k / 3 - 1, x + k % 3 - 1);
        for (int c = 0; c < 3; ++c) sum[c] += (k == 4 ? 5 : 1) * near[c];
    }
    for (int c = 0; c < 3; ++c) here[c] = blend(floorf(sum[c] / 13 + 0.5f), here[c], factor);
    return here;
}

// Blurs along one direction with a Gaussian that ends after three standard deviations.
__device__ inline Colour blurred(const Image &image, int y, int x, float sigma, bool along_x) {
    const int radius = int(ceilf(3 * sigma));
    Colour sum = {{0, 0, 0}};
    float weights = 0;
    for (int d = -radius; d <= radius; ++d) {
        const float weight = expf(-0.5f * d * d / (sigma * sigma));
        Colour near = along_x ? image.at(y, reflected(x + d, image.width)) : image.at(reflected(y + d, image.height), x);
        for (int c = 0; c < 3; ++c) sum[c] += weight * near[c];
        weights += weight;
    }
    for (int c = 0; c < 3; ++c) sum[c] /= weights;
    return sum;
}

// The pixel after the image's change, not yet rounded.
__device__ inline Colour changed(const Image &image, int y, int x, const Change &change, const Statistics *statistics) {
    if (change.family == WARP) {
        const float u = x + 0.5f, v = y + 0.5f;
        const float(&m)[2][3] = change.place;
        return image.between(m[1][0] * u + m[1][1] * v + m[1][2] - 0.5f, m[0][0] * u + m[0][1] * v + m[0][2] - 0.5f);
    }
    if (change.family == SHARPNESS) return sharpened(image, y, x, change.factor);
    if (change.family == BLUR_X || change.family == BLUR_Y)
        return blurred(image, y, x, change.sigma, change.family == BLUR_X);
    Colour from = image.at(y, x), to = from;
    if (change.family == MATRIX || change.family == COLOURS) {
        float centre = 0;
        if (change.family == COLOURS && change.centre != 0)
            centre = change.centre * grey(statistics[0].mean, statistics[1].mean, statistics[2].mean);
        for (int c = 0; c < 3; ++c) {
            const float(&m)[4] = change.colour[c];
            to[c] = m[0] * from[0] + m[1] * from[1] + m[2] * from[2] + m[3] + centre;
        }
    } else if (change.family == CONTRAST) {
        const float mean = floorf(grey(statistics[0].mean, statistics[1].mean, statistics[2].mean) + 0.5f);
        for (int c = 0; c < 3; ++c) to[c] = blend(mean, from[c], change.factor);
    } else if (change.family == AUTO_CONTRAST || change.family == EQUALIZE) {
        for (int c = 0; c < 3; ++c) to[c] = statistics[c].table[int(from[c])];
    } else if (change.family == BITS) {
        for (int c = 0; c < 3; ++c) {
            const int lifted = int(from[c]) + (from[c] < 128 ? change.lift : 0);
            to[c] = (from[c] >= change.threshold ? 255 - lifted : lifted) & change.mask;
        }
    }
    return to;
}

// The final pixel of the batch: solarised, erased, normalised. A fourth channel is zero.
__device__ inline Pixel finished(Colour colour, int row, int column, const Finish &finish) {
    const Rectangle erased = {finish.top, finish.left, finish.bottom, finish.right};
    Pixel pixel = {};
    for (int c = 0; c < 3; ++c) {
        float v = to_level(colour[c]);
        if (SOLARISES && finish.solarise && v >= 128) v = 255 - v;
        if (ERASES && erased.has(row, column)) v = MEAN_COLOUR[c];
        pixel.channel[c] = element((v - MEAN[c]) * PER_STD[c]);
    }
    return pixel;
}

__device__ inline int clamped(int at, int low, int high) { return at < low ? low : at > high ? high : at; }

// The resize in one direction, equal to DALI's. An output pixel is the mean of the input pixels around its position,
// weighted by distance. If the image shrinks, the range of input pixels grows by the same factor. Beyond the border,
// the outermost pixel is repeated.
template <bool CUBIC> struct Axis {
    int input;        // pixels
    float scale;      // input pixels per output pixel
    float narrowing;  // factor of distances: 1 / scale if the image shrinks, otherwise 1
    float reach;      // input pixels that count on each side

    __device__ Axis(int input, int output) : input(input) {
        scale = float(input) / output;
        const float wider = fmaxf(scale, 1.f);
        narrowing = 1 / wider;
        reach = (CUBIC ? 2 : 1) * wider;
    }
    __device__ float place(int at) const { return (at + 0.5f) * scale - 0.5f; }
    __device__ int first(int at) const { return int(ceilf(place(at) - reach)); }
    __device__ int last(int at) const { return int(floorf(place(at) + reach)); }

    __device__ float weight(float pixels) const {
        const float d = fabsf(pixels) * narrowing;
        if (!CUBIC) return fmaxf(1 - d, 0.f);
        // Keys, 1981, a = -0.5
        return d < 1 ? (1.5f * d - 2.5f) * d * d + 1 : d < 2 ? ((-0.5f * d + 2.5f) * d - 4) * d + 2 : 0;
    }
};

// The square that cutout removes from a window; part of it may lie outside.
__device__ inline Rectangle hole_of(const Window &window, const Finish &how) {
    const float x = how.hole[0], y = how.hole[1];
    return {int(y * window.height), int(x * window.width), int((y + CUTOUT) * window.height), int((x + CUTOUT) * window.width)};
}

constexpr int ROWS = 8;     // output rows per block; their pixels share the weights of a column
constexpr int CHUNK = 512;  // input columns in shared memory at a time
constexpr int PIXELS = 4;   // input pixels that a thread sums at a time: three words
constexpr int PAIR = 2;  // output rows that a thread computes at a time, which share most input rows
constexpr int BLOCKS = 3;  // resident blocks per multiprocessor, so that some compute while others wait for input
using Sums = float[ROWS][3][CHUNK];

// Reads a window in words of four bytes, because a GPU reads a word as fast as a byte. The first and the last word may
// reach beyond the window.
struct Words {
    const uint32 *words;
    uint32 before, last;  // bytes of the first word before the window; index of the last word

    __device__ Words(const Window &window) {
        before = reinterpret_cast<unsigned long long>(window.pixels) % 4;
        words = reinterpret_cast<const uint32 *>(window.pixels - before);
        last = (before + 3ll * window.height * window.width - 1) / 4;
    }

    // Read PIXELS pixels from `pixel` on; beyond the window, the last word is repeated.
    __device__ void read(uint32 pixel, uint32 (&three)[3]) const {
        const uint32 byte = before + 3 * pixel, first = byte / 4;
        uint32 four[4];
        for (uint32 k = 0; k < 4; ++k) four[k] = __ldg(words + (first + k < last ? first + k : last));
        for (int k = 0; k < 3; ++k) three[k] = __funnelshift_r(four[k], four[k + 1], byte % 4 * 8);
    }
};

// One byte of a word as a float: the byte becomes the lowest bits of UNITS, which is then subtracted.
__device__ inline float number(uint32 word, int byte) {
    return __uint_as_float(__byte_perm(word, __float_as_uint(UNITS), 0x7440 + byte)) - UNITS;
}

struct alignas(16) Four { float number[PIXELS]; };

// The vertical resize: computes ROWS output rows from `top` on, for `count` input columns from `start` on. The channels
// are stored separately, so that neighbouring threads later read neighbouring numbers.
template <bool CUBIC>
__device__ inline void sum_rows(const Window &window, const Rectangle hole, const Axis<CUBIC> axis, int top, int height,
                                int start, int count, Sums &sums) {
    const Words words(window);
    const int groups = (count + PIXELS - 1) / PIXELS;
    for (int item = threadIdx.x; item < ROWS / PAIR * groups; item += blockDim.x) {
        const int row = item / groups * PAIR, y = top + row, group = item % groups, left = start + group * PIXELS;
        if (y >= height) return;
        const float places[PAIR] = {axis.place(y), axis.place(y + 1)};
        const int last = axis.last(y + 1);
        Four sum[PAIR][3] = {};
        float weights[PAIR] = {};
        for (int at = axis.first(y); at <= last; ++at) {
            const int from = clamped(at, 0, window.height - 1);
            uint32 three[3];
            words.read(from * window.width + left, three);
            const float weight[PAIR] = {axis.weight(at - places[0]), axis.weight(at - places[1])};
            for (int i = 0; i < PIXELS; ++i) {
                const bool is_cut = CUTOUT > 0 && hole.has(from, left + i);
                for (int c = 0, byte = 3 * i; c < 3; ++c, ++byte) {
                    const float v = is_cut ? MEAN_COLOUR[c] : number(three[byte / 4], byte % 4);
                    for (int r = 0; r < PAIR; ++r) sum[r][c].number[i] += weight[r] * v;
                }
            }
            for (int r = 0; r < PAIR; ++r) weights[r] += weight[r];
        }
        for (int r = 0; r < PAIR; ++r)
            for (int c = 0; c < 3; ++c) {
                for (int i = 0; i < PIXELS; ++i) sum[r][c].number[i] *= 1 / weights[r];
                reinterpret_cast<Four &>(sums[row + r][c][group * PIXELS]) = sum[r][c];
            }
    }
}

// Resizes ROWS rows of an image and calls write(row, column, colour) for each pixel; the colour is not rounded. One thread
// per output column.
template <bool CUBIC, class Write>
__device__ inline void resized(const Window window, const Finish &how, int height, int width, Sums &sums, Write write) {
    const Axis<CUBIC> down(window.height, height), along(window.width, width);
    const Rectangle hole = hole_of(window, how);
    const int top = ROWS * blockIdx.x, threads = blockDim.x;
    for (int left = 0; left < width; left += threads) {
        const int x = left + threadIdx.x, right = clamped(left + threads, 0, width) - 1;
        const int begin = clamped(along.first(left), 0, window.width - 1);
        const int end = clamped(along.last(right), 0, window.width - 1) + 1;
        const float place = along.place(x);
        Colour sum[ROWS] = {};
        float weights = 0;
        for (int start = begin; start < end; start += CHUNK) {
            const int stop = clamped(start + CHUNK, 0, end);
            __syncthreads();  // all threads have read the previous chunk
            sum_rows(window, hole, down, top, height, start, stop - start, sums);
            __syncthreads();
            if (x >= width) continue;
            // The range of input columns. It is limited to this chunk below, except that the first and last chunks also serve
            // positions beyond the border.
            int from = along.first(x), to = along.last(x);
            if (start > begin && from < start) from = start;
            if (stop < end && to >= stop) to = stop - 1;
            for (int at = from; at <= to; ++at) {
                const float weight = along.weight(at - place);
                const int column = clamped(at, start, stop - 1) - start;
                for (int row = 0; row < ROWS; ++row)
                    for (int c = 0; c < 3; ++c) sum[row][c] += weight * sums[row][c][column];
                weights += weight;
            }
        }
        if (x >= width) continue;
        for (int row = 0; row < ROWS && top + row < height; ++row) {
            for (int c = 0; c < 3; ++c) sum[row][c] *= 1 / weights;
            write(top + row, how.mirror ? width - 1 - x : x, sum[row]);
        }
    }
}

// Resizes with the image's interpolation.
template <class Write>
__device__ inline void resized(const Window &window, const Finish &how, int height, int width, Write write) {
    alignas(Four) __shared__ Sums sums;
    if (how.cubic)
        resized<true>(window, how, height, width, sums, write);
    else
        resized<false>(window, how, height, width, sums, write);
}

// The resize, if rounds follow. Shapes: y (N, H, W, 3). A block makes ROWS rows (blockIdx.x) of an image (blockIdx.y).
extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS)
resize_images(const Window *windows, const Finish *finishes, uint8 *__restrict__ y, int height, int width) {
    const int n = blockIdx.y;
    resized(windows[n], finishes[n], height, width, [=](int row, int column, Colour colour) {
        const long long at = (1ll * n * height + row) * width + column;
        for (int c = 0; c < 3; ++c) y[3 * at + c] = to_byte(colour[c]);
    });
}

// The resize, if no round follows. Shapes: y (N, H, W, CHANNELS). Blocks as in resize_images.
extern "C" __global__ void __launch_bounds__(BLOCK, BLOCKS)
resize_and_finish(const Window *windows, const Finish *finishes, Pixel *__restrict__ y, int height, int width) {
    const int n = blockIdx.y;
    resized(windows[n], finishes[n], height, width, [=](int row, int column, Colour colour) {
        y[(1ll * n * height + row) * width + column] = finished(colour, row, column, finishes[n]);
    });
}

// A round other than the last. Shapes: y has the shape of x. One thread per pixel; blockIdx.y is the image.
extern "C" __global__ void change_images(const uint8 *__restrict__ x, const Change *changes, const Statistics *statistics,
                                         uint8 *__restrict__ y, int height, int width, int round, int rounds) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, pixels = height * width, n = blockIdx.y;
    if (at >= pixels) return;
    const Image image = {x + 3ll * n * pixels, height, width};
    Colour colour = changed(image, at / width, at % width, changes[n * rounds + round], statistics + 3 * n);
    for (int c = 0; c < 3; ++c) y[3 * (1ll * n * pixels + at) + c] = to_byte(colour[c]);
}

// The last round. Shapes: y (N, H, W, CHANNELS). Threads as in change_images.
extern "C" __global__ void finish_images(const uint8 *__restrict__ x, const Change *changes, const Statistics *statistics,
                                         const Finish *finishes, Pixel *__restrict__ y, int height, int width, int round,
                                         int rounds) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, pixels = height * width, n = blockIdx.y;
    if (at >= pixels) return;
    const int row = at / width, column = at % width;
    const Image image = {x + 3ll * n * pixels, height, width};
    Colour colour = changed(image, row, column, changes[n * rounds + round], statistics + 3 * n);
    y[1ll * n * pixels + at] = finished(colour, row, column, finishes[n]);
}

// several histograms, because threads that increment one entry at the same time wait for each other
constexpr int HISTOGRAMS = 8;

// Before a round: measures the statistics that its families need. One block per channel (blockIdx.x) of an image
// (blockIdx.y).
extern "C" __global__ void measure_images(const uint8 *__restrict__ x, const Change *changes, Statistics *statistics,
                                          int pixels, int round, int rounds) {
    const int n = blockIdx.y, channel = blockIdx.x, first = threadIdx.x, stride = blockDim.x;
    const Change &change = changes[n * rounds + round];
    const bool has_table = change.family == AUTO_CONTRAST || change.family == EQUALIZE;
    if (!has_table && change.family != CONTRAST && !(change.family == COLOURS && change.centre != 0)) return;

    __shared__ uint32 counts[HISTOGRAMS][256];  // pixels of each level; summed into counts[0] below
    for (int i = first; i < HISTOGRAMS * 256; i += stride) counts[i / 256][i % 256] = 0;
    __syncthreads();
    const uint8 *levels = x + 3ll * n * pixels + channel;
#pragma unroll 4
    for (int i = first; i < pixels; i += stride) atomicAdd(&counts[first / 32 % HISTOGRAMS][levels[3 * i]], 1u);
    __syncthreads();
    for (int level = first; level < 256; level += stride)
        for (int k = 1; k < HISTOGRAMS; ++k) counts[0][level] += counts[k][level];
    __syncthreads();

    const uint32 *count = counts[0];
    int low = 255, high = 0;
    uint32 sum = 0;
    for (int level = 0; level < 256; ++level) {
        sum += level * count[level];  // below 2^32 for 16 million pixels
        if (count[level]) low = level < low ? level : low, high = level;
    }
    Statistics &found = statistics[3 * n + channel];
    if (first == 0) found.mean = float(sum) / pixels;
    if (!has_table) return;
    const uint32 step = (pixels - count[high]) / 255;  // EQUALIZE: pixels per output level
    for (int level = first; level < 256; level += stride) {
        int to = level;
        if (change.family == AUTO_CONTRAST && high > low) {
            const int stretched = (level - low) * 255 / (high - low);
            to = stretched < 0 ? 0 : stretched > 255 ? 255 : stretched;
        } else if (change.family == EQUALIZE && step > 0) {
            uint32 darker = step / 2;
            for (int k = 0; k < level; ++k) darker += count[k];
            to = darker / step < 255 ? darker / step : 255;
        }
        found.table[level] = to;
    }
}
