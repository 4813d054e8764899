// INT8 convolutions on tensor cores. The epilogue requantises, adds a shortcut, applies ReLU and stores.
//
// The reduction is cut into chunks of 128 bytes: 128 channels of a tap, or several taps of 16, 32 or 64 channels. Chunks are
// loaded ahead, with zeros for taps in the padding. Two blocks per SM hide each other's prologue and epilogue.
#include "integer_products.cuh"

// A block has `GROUPS` warpgroups. Each warpgroup computes 64 rows; all warpgroups compute the same columns.
template <int GROUPS_, int COLUMNS_> struct Tile {
    static constexpr int GROUPS = GROUPS_, COLUMNS = COLUMNS_, ROWS = 64 * GROUPS, THREADS = 128 * GROUPS;
    static constexpr int BLOCKS = GROUPS * COLUMNS > 256 ? 1 : GROUPS == 1 ? 4 : COLUMNS == 64 ? 3 : 2;  // blocks per SM
    static constexpr int STAGES = GROUPS * COLUMNS > 256 ? 4 : 3;
    // wgmma groups in flight when the next chunk is started: a block that is alone on its SM must not pause.
    static constexpr int PENDING = BLOCKS == 1 ? 1 : 0, AHEAD = STAGES - 1 - PENDING;
};

// Tiles in the layout of warpgroup.cuh, with rows of 128 bytes.
template <class S> struct Stage {
    uint4 rows[S::ROWS * 8];
    uint4 columns[S::COLUMNS * 8];
};

// Position of the vector that a thread copies next: a tap of the window, and a vector of its channels. With 128
// channels or more, all taps of 128 channels come before the next 128 channels, because the taps then find most pixels
// in the L1 cache. With fewer channels, a chunk has several taps.
struct Walk {
    int tap_h, tap_w, channel, step;

    __device__ Walk(const Convolution &c, int vectors, int vector)
        : tap_h(0), tap_w(vectors >= 8 ? 0 : vector / vectors), channel(vectors >= 8 ? vector : vector % vectors),
          step(vectors >= 8 ? 1 : 8 / vectors) {
        wrap(c);
    }
    __device__ void advance(const Convolution &c) {
        tap_w += step;
        wrap(c);
        if (step == 1 && tap_h == c.kernel_h) {
            tap_h = 0;
            channel += 8;
        }
    }
    __device__ void wrap(const Convolution &c) {
        for (; tap_w >= c.kernel_w; tap_w -= c.kernel_w) ++tap_h;
    }
};

// C is 16, 32, 64 or a multiple of 128; K is a multiple of 16. ONE: 1x1 at stride 1, where pixels and rows coincide.
// Shapes: x (N, H, W, C), weight (K, kernel_h, kernel_w, C), addend (rows, K) int8; bias (K) int32; multiplier (K) fp32; y
// (rows, K), int8 or of the type T. chunks = ceil(kernel_h * kernel_w * C / 128).
template <class T, int GROUPS, int COLUMNS, bool ONE, bool ADD, bool RELU>
__global__ void __launch_bounds__(Tile<GROUPS, COLUMNS>::THREADS, Tile<GROUPS, COLUMNS>::BLOCKS)
quantised_conv(const uint4 *x, const uint4 *weight, const float *multiplier, const int *bias, const uint4 *addend, T *y,
               Convolution c, float addend_share, int chunks) {
    using S = Tile<GROUPS, COLUMNS>;
    constexpr int STAGES = S::STAGES, COPIED_ROWS = S::THREADS / 8, ROW_COPIES = S::ROWS / COPIED_ROWS;
    constexpr int COLUMN_COPIES = COLUMNS / COPIED_ROWS;
    extern __shared__ __align__(1024) uint4 memory[];
    Stage<S> *stages = reinterpret_cast<Stage<S> *>(memory);
    const int lane = lane_index(), warp = warp_index();
    const int column_tiles = (c.filters + COLUMNS - 1) / COLUMNS;
    const uint32 first_row = blockIdx.x / column_tiles * S::ROWS;
    const int first_column = blockIdx.x % column_tiles * COLUMNS;
    const int vectors = c.channels / VECTOR, taps = c.kernel_h * c.kernel_w;

    // This thread copies one vector of every chunk, for several rows and columns.
    const int copied_row = threadIdx.x / 8, copied_vector = threadIdx.x % 8;
    Walk at(c, vectors, copied_vector);
    int pixel[ROW_COPIES], top[ROW_COPIES], left[ROW_COPIES];
#pragma unroll
    for (int i = 0; i < ROW_COPIES; ++i) {
        const uint32 row = first_row + copied_row + i * COPIED_ROWS;
        if (ONE) {
            pixel[i] = row;
            top[i] = left[i] = row < c.rows ? 0 : -1;
        } else {
            const Place place(c, row < c.rows ? row : 0);
            pixel[i] = (place.image * c.height + place.top) * c.width + place.left;
            top[i] = row < c.rows ? place.top : -(1 << 30);
            left[i] = place.left;
        }
    }
    const auto copy_chunk = [&](int chunk) {
        if (chunk < chunks) {
            Stage<S> &stage = stages[chunk % STAGES];
            const int down = at.tap_h * c.dilate_h, right = at.tap_w * c.dilate_w;
            const bool in_window = at.tap_h < c.kernel_h && at.channel < vectors;
            const int offset = (down * c.width + right) * vectors + at.channel;
#pragma unroll
            for (int i = 0; i < ROW_COPIES; ++i) {
                const bool there = in_window && (ONE ? top[i] == 0 : uint32(top[i] + down) < uint32(c.height) &&
                                                                      uint32(left[i] + right) < uint32(c.width));
                cp_async_zfill_l1(&stage.rows[swizzled(copied_row + i * COPIED_ROWS, copied_vector)],
                           x + (there ? pixel[i] * vectors + offset : 0), there);
            }
            const int of_filter = (at.tap_h * c.kernel_w + at.tap_w) * vectors + at.channel;
#pragma unroll
            for (int i = 0; i < COLUMN_COPIES; ++i) {
                const int column = copied_row + i * COPIED_ROWS, filter = first_column + filter_of(column);
                const bool there = in_window && filter < c.filters;
                cp_async_zfill_l1(&stage.columns[swizzled(column, copied_vector)],
                           weight + (there ? filter * taps * vectors + of_filter : 0), there);
            }
            at.advance(c);
        }
        cp_async_commit();
    };

    Results<T, COLUMNS, ADD, RELU> results{multiplier, bias, y, addend_share, c.filters,
                                           first_column + lane % 4 * VECTOR};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        results.row[r] = first_row + warp * 16 + lane / 4 + r * 8;
        results.there[r] = results.row[r] < c.rows;
    }
#pragma unroll
    for (int s = 0; s < S::AHEAD; ++s) copy_chunk(s);
    results.load_addends(addend);

    int products[COLUMNS / 8][4];
    results.start(products);
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const Stage<S> &stage = stages[chunk % STAGES];
        cp_async_wait<S::AHEAD - 1>();
        int8_fence_view_async_shared();
        __syncthreads();  // the chunk has arrived, and all warps are done with chunk - PENDING - 1
        int8_mma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            int8_mma(products, stage.rows + warp / 4 * 64 * 8 + k * 2, stage.columns + k * 2);
        int8_mma_commit();
        copy_chunk(chunk + S::AHEAD);
        int8_mma_wait<S::PENDING>();
    }
    int8_mma_wait();
    int8_mma_fence_operand(products);
    results.store(products);
}
