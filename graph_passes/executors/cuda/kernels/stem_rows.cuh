// ResNet's first convolution, 7x7 with stride 2 and padding 3 on 4-channel images, 64 filters, on Hopper: what its forward
// kernels share.
//
// As a matrix product, out[filter, pixel] = sum over k of w[filter, k] * x[pixel, k]. For each of the 7 kernel rows, k runs
// over 8 taps (the first is padding: its weight is 0) of 4 channels: 64 bytes of one image row, which start 16 bytes later
// for each next pixel. That is how wgmma takes its second operand from shared memory, without a copy of any window
// (`overlapping`). The weights stay in registers.
//
// A block has teams of four multiplying warps, each with a warp that starts the copies of what they read: three, for a team
// waits for its products, its stores and itself, and two left the tensor cores and the memory idle for half of the time. A team
// walks down strips of an image's rows. Pair t of image rows is 2t - 1 and 2t, so row i of the convolution reads the pairs i - 1 to
// i + 1 and the first of i + 2.
#pragma once
#include "tma.cuh"
#include "warpgroup.cuh"

constexpr int SIZE = 7, IMAGE_CHANNELS = 4, FILTERS = 64, PIXEL_BYTES = 2 * IMAGE_CHANNELS;
constexpr int WIDTH = 112, GROUPS = WIDTH / 8;      // pixels of a row of the convolution, at most
constexpr int TEAMS = 3, TEAM_THREADS = 4 * WARP, MMA_THREADS = TEAMS * TEAM_THREADS, THREADS = MMA_THREADS + TEAM_THREADS;
// Registers, of 128 that each thread begins with. They change hands by groups of four warps: three of the last group start copies,
// and the fourth only makes it whole.
constexpr int REGS_PRODUCER = 24, REGS_MMA = 160;
constexpr int PAIRS = 8;                            // of image rows that a team has in shared memory
constexpr int LEFT = 2;                             // vectors of zeros left of an image row
constexpr int ROW_VECTORS = 116;                    // with the window of the last pixel

// First in a block's shared memory: compute-sanitizer takes each overlapping window for 3,584 bytes, and reports those that
// would end behind that memory.
struct ImageRows {
    uint4 rows[TEAMS][PAIRS][2][ROW_VECTORS];
    uint4 zeros[ROW_VECTORS];
    uint64 full[TEAMS][PAIRS], empty[TEAMS][PAIRS];

    // By all threads of the block.
    __device__ void init() {
        for (uint4 *at = &rows[0][0][0][0] + threadIdx.x; at < &zeros[ROW_VECTORS]; at += THREADS)
            *at = make_uint4(0, 0, 0, 0);
        fence_view_async_shared();
        if (threadIdx.x == 0) {
            for (int t = 0; t < TEAMS; ++t)
                for (int p = 0; p < PAIRS; ++p) {
                    mbarrier_init(full[t][p], 1);
                    mbarrier_init(empty[t][p], TEAM_THREADS / WARP);
                }
            fence_barrier_init();
        }
        __syncthreads();
    }

    // By one thread: starts the copies of the pairs that these rows of the convolution of an image read.
    template <class T>
    __device__ void copy(int team, PipelineState &pipe, const T *image, int height, int width, int first_row, int end_row) {
        const uint32 row_bytes = width * PIXEL_BYTES;
        for (int pair = first_row - 1; pair < end_row + 2; ++pair, pipe.advance(PAIRS)) {
            mbarrier_wait(empty[team][pipe.index], pipe.phase ^ 1);  // at once in the first turn
            const bool there[2] = {pair > 0 && 2 * pair - 1 < height, pair >= 0 && 2 * pair < height};
            arrive_expect_tx(full[team][pipe.index], (there[0] + there[1]) * row_bytes);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (there[i])
                    tma_load_bulk(rows[team][pipe.index][i] + LEFT, image + int64_t(2 * pair - 1 + i) * width * IMAGE_CHANNELS,
                                  row_bytes, full[team][pipe.index]);
        }
    }
};

// A team's multiplying warps, and where they are in its image rows.
template <class T> struct Multiplier {
    ImageRows &images;
    const int team, lane = threadIdx.x % WARP;
    uint32 weights[SIZE][2][4];  // of `filter` and 8 further down: as mma.m16n8k16 has the first operand
    PipelineState pipe, oldest;           // the next pair, and the first of those that the row reads

    __device__ static int filter() { return threadIdx.x % TEAM_THREADS / WARP * 16 + threadIdx.x % WARP / 4; }

    __device__ Multiplier(ImageRows &images, int team, const T *w) : images(images), team(team) {
#pragma unroll
        for (int row = 0; row < SIZE; ++row)
#pragma unroll
            for (int step = 0; step < 2; ++step)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int k = step * 16 + lane % 4 * 2 + e / 2 * 8, tap = k / IMAGE_CHANNELS - 1;
                    const T *at = w + (((filter() + e % 2 * 8) * SIZE + row) * SIZE + tap) * IMAGE_CHANNELS + k % IMAGE_CHANNELS;
                    weights[row][step][e] = tap < 0 ? 0 : *reinterpret_cast<const uint32 *>(at);
                }
    }

    // Before the first row of a strip.
    __device__ void begin_strip() {
        oldest = pipe;
        for (int i = 0; i < 3; ++i, pipe.advance(PAIRS)) mbarrier_wait(images.full[team][pipe.index], pipe.phase);
    }

    // products += this row of the convolution; to be called for one after the other.
    __device__ void row(float (&products)[GROUPS][4], int row, int height) {
        mbarrier_wait(images.full[team][pipe.index], pipe.phase);
        uint64 windows[SIZE];
#pragma unroll
        for (int j = 0; j < SIZE; ++j) {
            const int image_row = 2 * row - 3 + j, place = (oldest.index + j / 2) % PAIRS;
            const bool there = image_row >= 0 && image_row < height;
            windows[j] = smem_desc_windows(there ? images.rows[team][place][j % 2] : images.zeros);
        }
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < SIZE; ++j)
#pragma unroll
            for (int step = 0; step < 2; ++step) wgmma_k_k(products, weights[j][step], windows[j] + step * 2, T{});
        wgmma_commit();
        wgmma_wait();
        wgmma_fence_operand(products);
        if (lane == 0) arrive(images.empty[team][oldest.index]);
        pipe.advance(PAIRS);
        oldest.advance(PAIRS);
    }

    // After the last: the pairs that it has not given back.
    __device__ void end_strip() {
        for (int i = 0; i < 3; ++i, oldest.advance(PAIRS))
            if (lane == 0) arrive(images.empty[team][oldest.index]);
    }
};
