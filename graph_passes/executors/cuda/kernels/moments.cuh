// Combines mean and variance from parts: Chan, Golub and LeVeque, 'Algorithms for computing the sample variance', The
// American Statistician 37, 1983.
#pragma once
#include "common.cuh"

// count, mean, and sum of squared deviations from the mean.
struct Moments {
    float count, mean, squares;

    // From the sums of v - pivot and of (v - pivot)^2.
    __device__ static Moments from_sums(float pivot, float count, float sum, float sum_of_squares) {
        const float deviation = count > 0 ? sum / count : 0;
        return {count, pivot + deviation, sum_of_squares - sum * deviation};
    }

    // Loads moments that another block has written, past the L1 cache.
    __device__ static Moments load_written(const Moments *at) {
        return {__ldcg(&at->count), __ldcg(&at->mean), __ldcg(&at->squares)};
    }
};

// Combines at(first), at(first + step), ... in this fixed order; IN_FLIGHT loads are in flight.
template <int IN_FLIGHT = 8, class At> __device__ Moments combine(int first, int end, int step, At at) {
    float pivot = 0, count = 0, sum = 0, sum_of_squares = 0;
#pragma unroll IN_FLIGHT
    for (int i = first; i < end; i += step) {
        const Moments part = at(i);
        if (i == first) pivot = part.mean;
        const float deviation = part.mean - pivot;
        count += part.count;
        sum += part.count * deviation;
        sum_of_squares += part.squares + part.count * deviation * deviation;
    }
    return Moments::from_sums(pivot, count, sum, sum_of_squares);
}

// The epilogue of a kernel in which gridDim.y blocks share the rows and gridDim.x the columns. `of_part`, in shared
// memory, has the moments of the block's COLUMNS columns, from `first` on, over `parts` parts of its rows. Each block
// writes its combined moments to `partials`. The last block of these columns to arrive combines the moments of all
// blocks, in a fixed order, and writes them in the layout that BatchNorm reads. No later work hides the reads of this
// block, so they are contiguous, and IN_FLIGHT reads are in flight. The first THREADS threads of a block call this
// function; `sync` is the barrier of these threads.
// Shapes: of_part (max(parts, THREADS / COLUMNS), COLUMNS), sums (3, columns); partials: 3 * gridDim.y * columns
// floats, tickets (gridDim.x).
template <int COLUMNS, int THREADS, class Sync>
__device__ inline void finish_column_moments(Moments *of_part, int parts, int first, int columns, float *partials,
                                             uint32 *tickets, float *sums, Sync sync) {
    // threads that share a column in the last block; an H200 has 132 blocks
    constexpr int SPLITS = THREADS / COLUMNS, IN_FLIGHT = 33;
    // `partials`: (mean, squares) of each block and column, then the row count of each block.
    float2 *const of_blocks = reinterpret_cast<float2 *>(partials);
    float *const counts = partials + 2 * gridDim.y * columns + blockIdx.x * gridDim.y;
    const int column = threadIdx.x % COLUMNS, split = threadIdx.x / COLUMNS, n = first + column;
    const bool has_column = split < SPLITS && n < columns;
    const auto of_column = [&](int i) { return of_part[i * COLUMNS + column]; };
    sync();
    if (has_column && split == 0) {
        const Moments own = combine(0, parts, 1, of_column);
        of_blocks[blockIdx.y * columns + n] = make_float2(own.mean, own.squares);
        if (column == 0) counts[blockIdx.y] = own.count;
    }
    __threadfence();
    sync();
    bool is_last = false;
    if (threadIdx.x == 0) {
        is_last = atomicAdd(&tickets[blockIdx.x], 1) == gridDim.y - 1;
        if (is_last) tickets[blockIdx.x] = 0;
    }
    if (!sync.any(is_last)) return;
    __threadfence();
    if (has_column) {
        constexpr int STEP = SPLITS * IN_FLIGHT;
        const int blocks = gridDim.y, end = (blocks + STEP - 1) / STEP * STEP;
        of_part[split * COLUMNS + column] = combine<IN_FLIGHT>(split, end, SPLITS, [&](int block) -> Moments {
            if (block >= blocks) return {};
            const float2 of_block = __ldcg(&of_blocks[block * columns + n]);
            return {__ldcg(&counts[block]), of_block.x, of_block.y};
        });
    }
    sync();
    if (!has_column || split > 0) return;
    const Moments all = combine(0, SPLITS, 1, of_column);
    sums[n] = 0;
    sums[columns + n] = all.squares;
    sums[2 * columns + n] = all.mean;
}

// The epilogue of a kernel that has left the moments of each filter in the first `own` parts of `of_part`. Each block
// writes its combined moments to `partials` (gridDim.x, FILTERS). The last block to arrive combines the moments of all
// blocks, in a fixed order, and writes `sums` (3, FILTERS) in the layout that BatchNorm reads. `tickets` has one
// element. The first PARTS * FILTERS threads of a block call this function; `sync` is the barrier of these threads.
template <int PARTS, int FILTERS, class Sync = BlockBarrier>
__device__ inline void finish_moments(Moments (&of_part)[PARTS][FILTERS], int own, Moments *partials, uint32 *tickets, float *sums,
                                      Sync sync = {}) {
    sync();
    const int part = threadIdx.x / FILTERS, filter = threadIdx.x % FILTERS;
    const auto of_filter = [&](int i) { return of_part[i][filter]; };
    if (part == 0) {
        partials[blockIdx.x * FILTERS + filter] = combine(0, own, 1, of_filter);
        __threadfence();
    }
    sync();
    bool is_last = false;
    if (threadIdx.x == 0) {
        is_last = atomicAdd(tickets, 1) == gridDim.x - 1;
        if (is_last) *tickets = 0;
    }
    if (!sync.any(is_last)) return;
    __threadfence();
    constexpr int IN_FLIGHT = 14, STEP = PARTS * IN_FLIGHT;  // an H200 has 132 blocks: two or three rounds
    const int blocks = gridDim.x, end = (blocks + STEP - 1) / STEP * STEP;
    of_part[part][filter] = combine<IN_FLIGHT>(part, end, PARTS, [=](int block) -> Moments {
        if (block >= blocks) return {};
        return Moments::load_written(&partials[block * FILTERS + filter]);
    });
    sync();
    if (part > 0) return;
    const Moments all = combine(0, PARTS, 1, of_filter);
    sums[filter] = 0;
    sums[FILTERS + filter] = all.squares;
    sums[2 * FILTERS + filter] = all.mean;
}
