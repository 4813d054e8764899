// ResNet's first convolution on Hopper (7x7 with stride 2 and padding 3 on 4-channel images, 64 filters): shared by its
// forward kernels.
//
//     out[filter, pixel] = sum over k of w[filter, k] * x[pixel, k]
//
// For each of the 7 kernel rows, k runs over 8 taps of 4 channels; the first tap is padding, and its weight is 0. The 8
// taps are 64 bytes of one image row; for the next output pixel they start 16 bytes later. wgmma reads these bytes as
// its B operand from shared memory, without im2col (`smem_desc_windows`). The weights stay in registers.
//
// A block has three teams of four MMA warps, and one producer warp per team. Each team waits for its products, its
// stores and its own warps; with only two teams the tensor cores and the memory were idle half of the time. A team
// walks down strips of an image's rows. Image rows are loaded in pairs: pair t is rows 2t - 1 and 2t. Row i of the
// convolution reads pairs i - 1 to i + 1 and the first row of pair i + 2.
#pragma once
#include "pipeline.cuh"

constexpr int SIZE = 7, IMAGE_CHANNELS = 4, FILTERS = 64, PIXEL_BYTES = 2 * IMAGE_CHANNELS;
constexpr int WIDTH = 112, GROUPS = WIDTH / 8;      // maximum number of pixels in a row of the convolution
constexpr int TEAMS = 3, TEAM_THREADS = TEAM_WARPS * WARP, MMA_THREADS = TEAMS * TEAM_THREADS, THREADS = MMA_THREADS + TEAM_THREADS;
// Registers per thread after setmaxnreg; the launch gives 128 to each. Registers move between whole warpgroups: three
// warps of the last warpgroup load image rows; the fourth warp only completes the warpgroup.
constexpr int REGS_PRODUCER = 24, REGS_MMA = 160;
constexpr int PAIRS = 8;                            // pairs of image rows of a team in shared memory
constexpr int LEFT = 2;                             // vectors of zeros left of an image row
constexpr int ROW_VECTORS = 116;  // vectors of an image row, including the window of the last pixel

// This struct must come first in a block's shared memory: compute-sanitizer assumes 3,584 bytes for each overlapping
// window, and reports windows that would end after the block's shared memory.
struct ImageRows {
    uint4 rows[TEAMS][PAIRS][2][ROW_VECTORS];
    uint4 zeros[ROW_VECTORS];
    uint64 full[TEAMS][PAIRS], empty[TEAMS][PAIRS];

    // Called by all threads of the block.
    __device__ void init() {
        for (uint4 *at = &rows[0][0][0][0] + threadIdx.x; at < &zeros[ROW_VECTORS]; at += THREADS)
            *at = make_uint4(0, 0, 0, 0);
        fence_view_async_shared();
        if (threadIdx.x == 0) {
            for (int t = 0; t < TEAMS; ++t)
                for (int p = 0; p < PAIRS; ++p) {
                    mbarrier_init(full[t][p], 1);
                    mbarrier_init(empty[t][p], TEAM_WARPS);
                }
            fence_barrier_init();
        }
        __syncthreads();
    }

    // Called by one thread. Starts the loads of all pairs of image rows that rows `first_row` to `end_row` - 1 of the
    // convolution read.
    template <class T>
    __device__ void copy(int team, PipelineState &pipe, const T *image, int height, int width, int first_row, int end_row) {
        const uint32 row_bytes = width * PIXEL_BYTES;
        for (int pair = first_row - 1; pair < end_row + 2; ++pair, pipe.advance(PAIRS)) {
            mbarrier_wait(empty[team][pipe.index], pipe.phase ^ 1);  // the first round does not wait
            const bool there[2] = {pair > 0 && 2 * pair - 1 < height, pair >= 0 && 2 * pair < height};
            arrive_expect_tx(full[team][pipe.index], (there[0] + there[1]) * row_bytes);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (there[i])
                    tma_load_bulk(rows[team][pipe.index][i] + LEFT, image + int64_t(2 * pair - 1 + i) * width * IMAGE_CHANNELS,
                                  row_bytes, full[team][pipe.index]);
        }
    }

    // A team's producer warp: loads the image rows of the team's items. `rows_of(item, image, first, end)` gets an item's image
    // and its rows of the convolution.
    template <class T, class RowsOf>
    __device__ void produce(const WarpRole<TEAMS> &role, int lane, const T *x, int items, int height, int width, RowsOf rows_of) {
        setmaxnreg_dec<REGS_PRODUCER>();
        PipelineState pipe;
        for (int item = blockIdx.x * TEAMS + role.team; lane == 0 && role.team < TEAMS && item < items; item += gridDim.x * TEAMS) {
            int image, first, end;
            rows_of(item, image, first, end);
            copy(role.team, pipe, x + int64_t(image) * height * width * IMAGE_CHANNELS, height, width, first, end);
        }
    }
};

// The MMA warps of a team, and the position of these warps in the team's image rows.
template <class T> struct Multiplier {
    ImageRows &images;
    const int team, lane = threadIdx.x % WARP;
    uint32 weights[SIZE][2][4];  // A fragments of mma.m16n8k16: rows are `filter()` and filter() + 8
    PipelineState pipe, oldest;           // the next pair to arrive, and the first pair that the current row reads

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

    // Call before the first row of a strip.
    __device__ void begin_strip() {
        oldest = pipe;
        for (int i = 0; i < 3; ++i, pipe.advance(PAIRS)) mbarrier_wait(images.full[team][pipe.index], pipe.phase);
    }

    // products += this row of the convolution. Call it for consecutive rows.
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

    // Call after the last row of a strip: releases the remaining pairs.
    __device__ void end_strip() {
        for (int i = 0; i < 3; ++i, oldest.advance(PAIRS))
            if (lane == 0) arrive(images.empty[team][oldest.index]);
    }
};
