// Depthwise convolutions of K x K, K = 3, 5 or 7, with strides of 1 or 2: forward, also with the sums of the output for a
// BatchNorm, and both gradients. Sums are fp32, in a fixed order.
//
// A thread works on CHANNELS neighbouring channels and COLUMNS columns of a strip of rows. The thread goes down the
// strip and reads each row once. It adds the row to all rows of the result that need it, while the next row is being
// loaded. Weights and sums stay in registers, which limits CHANNELS and COLUMNS. Columns that neighbouring threads also
// read come from the L1 cache.
#include "moments.cuh"

constexpr int THREADS = 128;  // threads of a block

// The piece of the result that a thread computes at a time.
template <class T, int K> struct Piece {
    static constexpr int CHANNELS = K == 7 ? 2 : 4;
    static constexpr int COLUMNS = K == 5 ? 2 : 4;
    // least number of blocks per multiprocessor, which limits a thread's registers
    static constexpr int BLOCKS = K == 3 ? 3 : 2;
};

template <class T, int N> struct alignas(N * sizeof(T)) Vector { T element[N]; };

// How the work is divided, as `Walk` of depthwise.py. The result is the output of a convolution, or the gradient of its
// data; the images are the tensor that is read. In the window of the result's pixel o, pixel k is pixel o * stride + k
// + offset of the images. The pixels of the images lie DILATION apart.
struct Walk {
    int channels, groups;              // groups of CHANNELS that a block works on; the blocks of gridDim.y share them
    int pieces, strips, items, rows;   // pieces of COLUMNS columns, strips of rows; items = images * strips * pieces
    int height, width;  // size of the images
    int result_height, result_width;
    int top, left;                     // the offsets of rows and columns
    int first_row, first_column;  // row and column of the result where the first strip and piece begin: 0 or less
};

// A thread's part of the images and of the result.
template <class T, int K> struct Place {
    int channel, image, row, column;  // row, column: position in the result where the part begins
    bool exists;

    __device__ Place(const Walk &walk, int item) {
        channel = (blockIdx.y * walk.groups + threadIdx.x % walk.groups) * Piece<T, K>::CHANNELS;
        exists = channel < walk.channels && item < walk.items;
        const int rest = item / walk.pieces;
        column = walk.first_column + item % walk.pieces * Piece<T, K>::COLUMNS;
        row = walk.first_row + rest % walk.strips * walk.rows;
        image = rest / walk.strips;
    }
};

// The first item of a thread; each following item is gridDim.x * `items_of_block` items further.
__device__ inline int items_of_block(const Walk &walk) { return THREADS / walk.groups; }
__device__ inline int first_item(const Walk &walk) {
    const int own = threadIdx.x / walk.groups;  // surplus threads have no item
    return own < items_of_block(walk) ? blockIdx.x * items_of_block(walk) + own : walk.items;
}

// Neighbouring pixels of a row, every STEP-th of COUNT columns; zeros outside of the images. The pixels stay packed while
// the load is in flight.
template <class T, int CHANNELS, int COUNT, int STEP> struct Row {
    Vector<T, CHANNELS> pixel[(COUNT + STEP - 1) / STEP];

    // `images`: the first pixel of the image, at the thread's channel. Only columns that are multiples of STEP have
    // pixels.
    __device__ void load(const T *images, int row, int column, int height, int width, int channels) {
        const bool has_row = row >= 0 && row < height;
#pragma unroll
        for (int j = 0; j < COUNT; j += STEP) {
            const int at = (column + j) / STEP;
            pixel[j / STEP] = {};
            if (has_row && column + j >= 0 && at < width)
                pixel[j / STEP] = *reinterpret_cast<const Vector<T, CHANNELS> *>(images + (row * width + at) * channels);
        }
    }

    __device__ void unpack(int j, float (&v)[CHANNELS]) const {
#pragma unroll
        for (int k = 0; k < CHANNELS; ++k) v[k] = to_float(pixel[j / STEP].element[k]);
    }
};

// The order of a strip: in step i of PERIOD, row i of the images is read, which is row i - k of the window of result
// row (i - k) / STRIDE. LIVE result rows are unfinished at a time; `slot` is the index of a row's sums among these.
template <int K, int STRIDE, int DILATION> struct Order {
    static constexpr int LIVE = (K + STRIDE - 1) / STRIDE, PERIOD = LIVE * STRIDE * DILATION;
    __device__ static constexpr bool has_row(int i, int k) { return (i - k + K * STRIDE) % STRIDE == 0; }
    __device__ static constexpr int slot(int i, int k) { return (i - k + PERIOD) / STRIDE % LIVE; }
};

// The weights (C, K, K) of the thread's channels; FLIPPED for the gradient of the data.
template <class T, int K, int CHANNELS, bool FLIPPED>
__device__ inline void load_weights(const T *weights, float (&w)[K * K][CHANNELS]) {
    Vector<T, CHANNELS> parts[K * K];
#pragma unroll
    for (int i = 0; i < K * K; ++i) parts[i] = reinterpret_cast<const Vector<T, CHANNELS> *>(weights)[i];
#pragma unroll
    for (int tap = 0; tap < K * K; ++tap)
#pragma unroll
        for (int k = 0; k < CHANNELS; ++k) {
            const int at = k * K * K + (FLIPPED ? K * K - 1 - tap : tap);
            w[tap][k] = to_float(parts[at / CHANNELS].element[at % CHANNELS]);
        }
}

// One item: calls finish(row, column, sum) for each pixel of the result, with the sums of the CHANNELS channels.
template <class T, int K, int STRIDE, int DILATION, int CHANNELS, class Finish>
__device__ inline void convolve(const T *images, const float (&w)[K * K][CHANNELS], const Walk &walk, const Place<T, K> &place,
                                Finish finish) {
    using Steps = Order<K, STRIDE, DILATION>;
    constexpr int COLUMNS = Piece<T, K>::COLUMNS, READ = (COLUMNS - 1) * STRIDE + K;
    const int first_row = place.row * STRIDE + walk.top, first_column = place.column * STRIDE + walk.left;
    const int steps = (walk.rows - 1) * STRIDE + K;
    images += size_t(place.image) * walk.height * walk.width * walk.channels + place.channel;
    // A row above the image must not become row 0, although division rounds towards 0.
    const auto row_at = [&](int step) { return first_row + step < 0 ? -1 : (first_row + step) / DILATION; };
    float sum[Steps::LIVE][COLUMNS][CHANNELS] = {};
    Row<T, CHANNELS, READ, DILATION> now, next;
    now.load(images, row_at(0), first_column, walk.height, walk.width, walk.channels);
    for (int begin = 0; begin < steps; begin += Steps::PERIOD) {
#pragma unroll
        for (int i = 0; i < Steps::PERIOD; ++i) {
            if (begin + i >= steps) break;
            if (i % DILATION == 0) {
                next.load(images, row_at(begin + i + DILATION), first_column, walk.height, walk.width, walk.channels);
#pragma unroll
                for (int j = 0; j < READ; j += DILATION) {
                    float v[CHANNELS];
                    now.unpack(j, v);
#pragma unroll
                    for (int y = 0; y < K; ++y)
#pragma unroll
                        for (int c = 0; c < COLUMNS; ++c) {
                            const int x = j - c * STRIDE;
                            if (!Steps::has_row(i, y) || x < 0 || x >= K) continue;
#pragma unroll
                            for (int k = 0; k < CHANNELS; ++k) sum[Steps::slot(i, y)][c][k] += w[y * K + x][k] * v[k];
                        }
                }
                now = next;
            }
            if (!Steps::has_row(i, K - 1)) continue;
            constexpr int LAST = K - 1;
            const int row = place.row + (begin + i - LAST) / STRIDE;
            const bool is_own = begin + i >= LAST && row >= 0 && row < walk.result_height;
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                float(&of_pixel)[CHANNELS] = sum[Steps::slot(i, LAST)][c];
                const int column = place.column + c;
                if (is_own && column >= 0 && column < walk.result_width) finish(row, column, of_pixel);
#pragma unroll
                for (int k = 0; k < CHANNELS; ++k) of_pixel[k] = 0;
            }
        }
    }
}

template <class T, int CHANNELS> __device__ inline Vector<T, CHANNELS> packed_vector(const float (&v)[CHANNELS]) {
    Vector<T, CHANNELS> packed;
#pragma unroll
    for (int k = 0; k < CHANNELS; k += 2) from_floats(v[k], v[k + 1], packed.element + k);
    return packed;
}

template <class T, int CHANNELS>
__device__ inline void write_pixel(T *result, const Walk &walk, int image, int row, int column, int channel,
                                   const Vector<T, CHANNELS> &pixel) {
    const size_t at = (size_t(image) * walk.result_height + row) * walk.result_width + column;
    *reinterpret_cast<Vector<T, CHANNELS> *>(result + at * walk.channels + channel) = pixel;
}

// y = convolution of x with w, plus the bias.
// Shapes: x (N, H, W, C), w (C, K, K), bias (C) fp32 or null, y (N, OH, OW, C). gridDim.x * items_of_block >= items.
template <class T, int K, int STRIDE>
__global__ void __launch_bounds__(THREADS, Piece<T, K>::BLOCKS) depthwise_forward(const T *x, const T *w, const float *bias, T *y, Walk walk) {
    constexpr int CHANNELS = Piece<T, K>::CHANNELS;
    const Place<T, K> place(walk, first_item(walk));
    if (!place.exists) return;
    float weights[K * K][CHANNELS];
    load_weights<T, K, CHANNELS, false>(w + place.channel * K * K, weights);
    convolve<T, K, STRIDE, 1>(x, weights, walk, place, [&](int row, int column, float (&sum)[CHANNELS]) {
        if (bias)
#pragma unroll
            for (int k = 0; k < CHANNELS; ++k) sum[k] += bias[place.channel + k];
        write_pixel(y, walk, place.image, row, column, place.channel, packed_vector<T>(sum));
    });
}

// Computes dx from dy.
// Shapes: dy (N, OH, OW, C), w (C, K, K), dx (N, H, W, C). gridDim.x * items_of_block >= items.
template <class T, int K, int STRIDE>
__global__ void __launch_bounds__(THREADS, Piece<T, K>::BLOCKS) depthwise_dgrad(const T *dy, const T *w, T *dx, Walk walk) {
    constexpr int CHANNELS = Piece<T, K>::CHANNELS;
    const Place<T, K> place(walk, first_item(walk));
    if (!place.exists) return;
    float weights[K * K][CHANNELS];
    load_weights<T, K, CHANNELS, true>(w + place.channel * K * K, weights);
    convolve<T, K, 1, STRIDE>(dy, weights, walk, place, [&](int row, int column, float (&sum)[CHANNELS]) {
        write_pixel(dx, walk, place.image, row, column, place.channel, packed_vector<T>(sum));
    });
}

// Computes y, and the moments of each channel of the rounded y over the items of each block, for `depthwise_moments`.
// Shapes: x (N, H, W, C), w (C, K, K), y (N, OH, OW, C), parts (gridDim.x, C).
template <class T, int K, int STRIDE>
__global__ void __launch_bounds__(THREADS, Piece<T, K>::BLOCKS) depthwise_statistics(const T *x, const T *w, T *y, Moments *parts, Walk walk) {
    constexpr int CHANNELS = Piece<T, K>::CHANNELS;
    __shared__ Moments of_thread[THREADS * CHANNELS];
    const int block_items = items_of_block(walk), channels = walk.groups * CHANNELS;
    float pivot[CHANNELS] = {}, sum[CHANNELS] = {}, squares[CHANNELS] = {}, count = 0;
    const Place<T, K> first(walk, first_item(walk));
    if (first.exists) {
        float weights[K * K][CHANNELS];
        load_weights<T, K, CHANNELS, false>(w + first.channel * K * K, weights);
        for (int item = first_item(walk); item < walk.items; item += gridDim.x * block_items) {
            const Place<T, K> place(walk, item);
            convolve<T, K, STRIDE, 1>(x, weights, walk, place, [&](int row, int column, float (&of_pixel)[CHANNELS]) {
                const Vector<T, CHANNELS> stored = packed_vector<T>(of_pixel);
                write_pixel(y, walk, place.image, row, column, place.channel, stored);
#pragma unroll
                for (int k = 0; k < CHANNELS; ++k) {
                    const float v = to_float(stored.element[k]);
                    if (count == 0) pivot[k] = v;
                    sum[k] += v - pivot[k];
                    squares[k] += (v - pivot[k]) * (v - pivot[k]);
                }
                ++count;
            });
        }
    }
    if (threadIdx.x / walk.groups < block_items)
#pragma unroll
        for (int k = 0; k < CHANNELS; ++k)
            of_thread[threadIdx.x * CHANNELS + k] = Moments::from_sums(pivot[k], count, sum[k], squares[k]);
    __syncthreads();
    for (int own = threadIdx.x; own < channels; own += THREADS) {
        const int channel = blockIdx.y * channels + own;
        if (channel < walk.channels)
            parts[blockIdx.x * walk.channels + channel] =
                combine(0, block_items, 1, [&](int i) { return of_thread[i * channels + own]; });
    }
}

// LANES: channels or weights of a block; SPLITS: threads that share one of them; for the two kernels that complete sums
constexpr int LANES = 32, SPLITS = 8;

// Computes the sums for a BatchNorm: zeros, squares of deviations, means.
// Shapes: parts (num_parts, C), sums (3, C) fp32. gridDim.x * LANES >= C.
__global__ void __launch_bounds__(LANES *SPLITS) depthwise_moments(const Moments *parts, float *sums, int num_parts,
                                                                   int channels) {
    __shared__ Moments of_split[SPLITS][LANES];
    const int lane = threadIdx.x % LANES, split = threadIdx.x / LANES, channel = blockIdx.x * LANES + lane;
    if (channel < channels)
        of_split[split][lane] = combine(split, num_parts, SPLITS, [&](int i) { return parts[i * channels + channel]; });
    __syncthreads();
    if (channel >= channels || split > 0) return;
    const Moments all = combine(0, SPLITS, 1, [&](int i) { return of_split[i][lane]; });
    sums[channel] = 0;
    sums[channels + channel] = all.squares;
    sums[2 * channels + channel] = all.mean;
}

// Computes the gradient of the weights over the items of each block, for `depthwise_sum`.
// Shapes: x (N, H, W, C), dy (N, OH, OW, C), parts (gridDim.x, C, K, K) fp32.
template <class T, int K, int STRIDE>
__global__ void __launch_bounds__(THREADS, Piece<T, K>::BLOCKS) depthwise_wgrad(const T *x, const T *dy, float *parts, Walk walk) {
    using Steps = Order<K, STRIDE, 1>;
    constexpr int CHANNELS = Piece<T, K>::CHANNELS, COLUMNS = Piece<T, K>::COLUMNS, READ = (COLUMNS - 1) * STRIDE + K;
    __shared__ float of_thread[THREADS * CHANNELS];
    const int block_items = items_of_block(walk), channels = walk.groups * CHANNELS;
    const int steps = (walk.rows - 1) * STRIDE + K;
    float sum[K * K][CHANNELS] = {};
    for (int item = first_item(walk); item < walk.items; item += gridDim.x * block_items) {
        const Place<T, K> place(walk, item);
        if (!place.exists) break;
        const int first_row = place.row * STRIDE + walk.top, first_column = place.column * STRIDE + walk.left;
        const T *const images = x + size_t(place.image) * walk.height * walk.width * walk.channels + place.channel;
        const T *const gradients =
            dy + size_t(place.image) * walk.result_height * walk.result_width * walk.channels + place.channel;
        const int end = min(place.row + walk.rows, walk.result_height);  // end of the strip's rows of dy
        float g[Steps::LIVE][COLUMNS][CHANNELS] = {};
        Row<T, CHANNELS, READ, 1> now, next;
        Row<T, CHANNELS, COLUMNS, 1> next_gradient;
        now.load(images, first_row, first_column, walk.height, walk.width, walk.channels);
        next_gradient.load(gradients, place.row, place.column, end, walk.result_width, walk.channels);
        for (int begin = 0; begin < steps; begin += Steps::PERIOD) {
#pragma unroll
            for (int i = 0; i < Steps::PERIOD; ++i) {
                if (begin + i >= steps) break;
                next.load(images, first_row + begin + i + 1, first_column, walk.height, walk.width, walk.channels);
                if (Steps::has_row(i, 0)) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) next_gradient.unpack(c, g[Steps::slot(i, 0)][c]);
                    next_gradient.load(gradients, place.row + (begin + i) / STRIDE + 1, place.column, end,
                                       walk.result_width, walk.channels);
                }
#pragma unroll
                for (int j = 0; j < READ; ++j) {
                    float v[CHANNELS];
                    now.unpack(j, v);
#pragma unroll
                    for (int row = 0; row < K; ++row)
#pragma unroll
                        for (int c = 0; c < COLUMNS; ++c) {
                            const int column = j - c * STRIDE;
                            if (!Steps::has_row(i, row) || column < 0 || column >= K) continue;
#pragma unroll
                            for (int k = 0; k < CHANNELS; ++k)
                                sum[row * K + column][k] += v[k] * g[Steps::slot(i, row)][c][k];
                        }
                }
                now = next;
            }
        }
    }
#pragma unroll
    for (int tap = 0; tap < K * K; ++tap) {
        if (threadIdx.x / walk.groups < block_items)
#pragma unroll
            for (int k = 0; k < CHANNELS; ++k) of_thread[threadIdx.x * CHANNELS + k] = sum[tap][k];
        __syncthreads();
#pragma unroll 1
        for (int own = threadIdx.x; own < channels; own += THREADS) {
            float total = 0;
#pragma unroll 4
            for (int i = 0; i < block_items; ++i) total += of_thread[i * channels + own];
            const int channel = blockIdx.y * channels + own;
            if (channel < walk.channels) parts[(size_t(blockIdx.x) * walk.channels + channel) * K * K + tap] = total;
        }
        __syncthreads();
    }
}

// sum = the sum of all parts, added one after the other.
// Shapes: parts (num_parts, size) fp32, sum (size). gridDim.x * LANES >= size.
template <class T>
__global__ void __launch_bounds__(LANES *SPLITS) depthwise_sum(const float *parts, T *sum, int num_parts, int size) {
    __shared__ float of_split[SPLITS][LANES];
    const int lane = threadIdx.x % LANES, split = threadIdx.x / LANES, at = blockIdx.x * LANES + lane;
    float total = 0;
    if (at < size)
#pragma unroll 8
        for (int part = split; part < num_parts; part += SPLITS) total += parts[size_t(part) * size + at];
    of_split[split][lane] = total;
    __syncthreads();
    if (at >= size || split > 0) return;
    for (int other = 1; other < SPLITS; ++other) total += of_split[other][lane];
    sum[at] = from_float<T>(total);
}
