// ResNet's stem in inference: the first convolution, 7x7 with stride 2 and padding 3 on 4-channel images, 64 filters, with
// bias, ReLU and 3x3 max pooling with stride 2 and padding 1. What the convolution makes is never written.
//
// As a matrix product, out[filter, pixel] = sum over k of w[filter, k] * x[pixel, k]. For each of the 7 kernel rows, k runs
// over 8 taps (the first is padding: its weight is 0) of 4 channels: 64 bytes of one image row, which start 16 bytes later
// for each next pixel. That is how wgmma takes its second operand from shared memory, without a copy of any window
// (`overlapping`). The weights stay in registers, and so does the pooling: a thread has two neighbouring pixels of a row.
#include "copy_engine.cuh"
#include "warpgroup.cuh"

constexpr int SIZE = 7, IMAGE_CHANNELS = 4, FILTERS = 64, PIXEL_BYTES = 2 * IMAGE_CHANNELS;
constexpr int WIDTH = 112, GROUPS = WIDTH / 8;      // pixels of a row of the convolution, at most
constexpr int TEAMS = 2, TEAM_THREADS = 4 * WARP, MULTIPLYING = TEAMS * TEAM_THREADS, THREADS = MULTIPLYING + TEAMS * WARP;
constexpr int PAIRS = 8;                            // of image rows that a team has in shared memory
constexpr int LEFT = 2;                             // vectors of zeros left of an image row
constexpr int ROW_VECTORS = 116;                    // with the window of the last pixel
constexpr int POOLED_VECTORS = WIDTH / 2 * FILTERS / VEC;

struct Shared {
    uint4 pooled[TEAMS][2][POOLED_VECTORS];  // 64 filters a row, swizzled
    uint4 rows[TEAMS][PAIRS][2][ROW_VECTORS];
    uint4 zeros[ROW_VECTORS];
    uint64 full[TEAMS][PAIRS], empty[TEAMS][PAIRS];
};

struct Sizes { int height, width, out_height, out_width, pooled_height, pooled_width; };

__device__ inline float larger(float a, float b) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));  // NaN stays
    return a;
}

__device__ inline void meet_team(int team) {
    asm volatile("bar.sync %0, %1;" :: "r"(team + 1), "n"(TEAM_THREADS) : "memory");
}

// y = max pooling of ReLU(convolution + bias). A team of four multiplying warps, and one that starts the copies of what they
// read, walks down `strip` rows of y of an image, whose columns are one tile of the map of y: a matrix of 64 columns.
// Pair t of image rows is 2t - 1 and 2t, so row i of the convolution reads the pairs i - 1 to i + 1 and the first of i + 2.
// Shapes: x (N, H, W, 4), w (K, 7, 7, 4) with K = FILTERS, y (N, PH, PW, K); bias (K) fp32. W is even and 224 at most.
template <class T>
__global__ void __launch_bounds__(THREADS, 1)
stem_pool(const T *x, const T *w, const float *bias, const __grid_constant__ TensorMap y, Sizes size, int images, int strip) {
    extern __shared__ __align__(1024) uint4 memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    const bool multiplies = warp < MULTIPLYING / WARP;
    const int team = multiplies ? warp / 4 : warp - MULTIPLYING / WARP;
    const int strips = (size.pooled_height + strip - 1) / strip, items = images * strips;

    for (uint4 *at = &shared.rows[0][0][0][0] + threadIdx.x; at < &shared.zeros[ROW_VECTORS]; at += THREADS)
        *at = make_uint4(0, 0, 0, 0);
    show_to_products();
    if (threadIdx.x == 0) {
        for (int t = 0; t < TEAMS; ++t)
            for (int p = 0; p < PAIRS; ++p) {
                init_barrier(shared.full[t][p], 1);
                init_barrier(shared.empty[t][p], TEAM_THREADS / WARP);
            }
        show_barriers();
    }
    __syncthreads();

    Turn turn;
    if (!multiplies) {
        const uint32 row_bytes = size.width * PIXEL_BYTES;
        for (int item = blockIdx.x * TEAMS + team; lane == 0 && item < items; item += gridDim.x * TEAMS) {
            const int image = item / strips, first = item % strips * strip, end = min(first + strip, size.pooled_height);
            const int first_row = max(2 * first - 1, 0), end_row = min(2 * end, size.out_height);
            for (int pair = first_row - 1; pair < end_row + 2; ++pair, turn.next(PAIRS)) {
                wait_for_phase(shared.empty[team][turn.place], turn.parity ^ 1);  // at once in the first turn
                uint64 &full = shared.full[team][turn.place];
                const bool there[2] = {pair > 0 && 2 * pair - 1 < size.height, pair >= 0 && 2 * pair < size.height};
                arrive_expecting(full, (there[0] + there[1]) * row_bytes);
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (there[i])
                        load_bytes(shared.rows[team][turn.place][i] + LEFT,
                                   x + (int64_t(image) * size.height + 2 * pair - 1 + i) * size.width * IMAGE_CHANNELS,
                                   row_bytes, full);
            }
        }
        return;
    }

    // Filters `filter` and 8 further down: as mma.m16n8k16 has the first operand.
    const int in_team = threadIdx.x % TEAM_THREADS, filter = in_team / WARP * 16 + lane / 4;
    uint32 weights[SIZE][2][4];
#pragma unroll
    for (int row = 0; row < SIZE; ++row)
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int k = step * 16 + lane % 4 * 2 + e / 2 * 8, tap = k / IMAGE_CHANNELS - 1;
                const T *at = w + (((filter + e % 2 * 8) * SIZE + row) * SIZE + tap) * IMAGE_CHANNELS + k % IMAGE_CHANNELS;
                weights[row][step][e] = tap < 0 ? 0 : *reinterpret_cast<const uint32 *>(at);
            }
    const float biases[2] = {bias[filter], bias[filter + 8]};

    int buffer = 0;
    for (int item = blockIdx.x * TEAMS + team; item < items; item += gridDim.x * TEAMS) {
        const int image = item / strips, first = item % strips * strip, end = min(first + strip, size.pooled_height);
        const int first_row = max(2 * first - 1, 0), end_row = min(2 * end, size.out_height);
        float most[GROUPS][2] = {};  // of the rows of a window so far; ReLU gives nothing below 0
        Turn oldest = turn;          // of the pairs that the row reads
        for (int i = 0; i < 3; ++i, turn.next(PAIRS)) wait_for_phase(shared.full[team][turn.place], turn.parity);
        for (int row = first_row; row < end_row; ++row, turn.next(PAIRS), oldest.next(PAIRS)) {
            wait_for_phase(shared.full[team][turn.place], turn.parity);
            float products[GROUPS][4];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int e = 0; e < 4; ++e) products[g][e] = biases[e / 2];
            open_products();
#pragma unroll
            for (int j = 0; j < SIZE; ++j) {
                const int image_row = 2 * row - 3 + j, place = (oldest.place + j / 2) % PAIRS;
                const bool there = image_row >= 0 && image_row < size.height;
                const uint4 *at = there ? shared.rows[team][place][j % 2] : shared.zeros;
#pragma unroll
                for (int step = 0; step < 2; ++step) multiply_rows(products, weights[j][step], overlapping(at + step * 2), T{});
            }
            close_products();
            wait_for_products();
            hold_products(products);
            if (lane == 0) arrive(shared.empty[team][oldest.place]);

            // A thread has pixels 2u and 2u + 1 of each group, u = 4g + lane % 4, and needs 2u - 1 of its neighbour.
            const bool ends_window = row % 2 == 1 || row + 1 == size.out_height;
            float before[2] = {0, 0};
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const int pixel = g * 8 + lane % 4 * 2;
#pragma unroll
                for (int f = 0; f < 2; ++f) {
                    const float left = pixel < size.out_width ? larger(products[g][2 * f], 0) : 0;
                    const float right = pixel + 1 < size.out_width ? larger(products[g][2 * f + 1], 0) : 0;
                    const float from = __shfl_sync(0xffffffff, right, (lane & ~3) | (lane + 3) % 4);
                    const float of_row = larger(larger(left, right), lane % 4 ? from : before[f]);
                    before[f] = from;
                    // Until the window ends `products` is free to hold what is kept of this row.
                    products[g][2 * f] = of_row;
                    most[g][f] = larger(most[g][f], of_row);
                }
            }
            if (!ends_window) continue;
            if (row > 2 * first || row + 1 == size.out_height) {  // not the row before a strip's first window
                uint4 *const pooled = shared.pooled[team][buffer];
                if (in_team == 0) wait_for_stores<1>();
                meet_team(team);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                    for (int f = 0; f < 2; ++f) {
                        const int u = g * 4 + lane % 4, of = filter + f * 8;
                        if (u < size.pooled_width)
                            reinterpret_cast<T *>(&pooled[swizzled(u, of / VEC)])[of % VEC] = from_float<T>(most[g][f]);
                    }
                show_to_copies();
                meet_team(team);
                if (in_team == 0)
                    store_tile(y, 0, (image * size.pooled_height + row / 2) * size.pooled_width, 0, pooled);
                buffer ^= 1;
            }
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int f = 0; f < 2; ++f) most[g][f] = products[g][2 * f];
        }
        // The pairs that the last row has not given back.
        for (int i = 0; i < 3; ++i, oldest.next(PAIRS))
            if (lane == 0) arrive(shared.empty[team][oldest.place]);
    }
    if (in_team == 0) wait_for_stores<0>();
}
