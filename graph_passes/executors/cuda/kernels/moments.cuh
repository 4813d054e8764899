// Mean and variance of values that are seen in parts: Chan, Golub and LeVeque, 'Algorithms for computing the sample variance',
// The American Statistician 37, 1983.
#pragma once
#include "common.cuh"

// Of some values: how many, their mean, and the sum of squares of what they differ from it.
struct Moments {
    float count, mean, squares;

    // From the sums of v - near and of its square.
    __device__ static Moments from_sums(float pivot, float count, float sum, float sum_of_squares) {
        const float deviation = count > 0 ? sum / count : 0;
        return {count, pivot + deviation, sum_of_squares - sum * deviation};
    }

    // What another block has written.
    __device__ static Moments load_written(const Moments *at) {
        return {__ldcg(&at->count), __ldcg(&at->mean), __ldcg(&at->squares)};
    }
};

// Of the values of at(first), at(first + step), ... together, always in this order; AT_ONCE of them are read ahead.
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

// The end of a kernel of which gridDim.y blocks share the rows, and gridDim.x the columns. `of_part`, in shared memory, has the
// moments of the block's COLUMNS columns, from `first` on, in `parts` of its rows. The block leaves its own in `partials`, and
// the last block of the same columns to arrive writes those of all, in a fixed order, as BatchNorm reads them. Nothing is read
// behind it, so this takes as long as the reads: they are contiguous, and AT_ONCE are under way. For the first THREADS threads
// of a block, which wait for each other by `meet`.
// Shapes: of_part (max(parts, THREADS / COLUMNS), COLUMNS), sums (3, columns); partials: 3 * gridDim.y * columns floats,
// tickets (gridDim.x).
template <int COLUMNS, int THREADS, class Sync>
__device__ inline void finish_column_moments(Moments *of_part, int parts, int first, int columns, float *partials,
                                             uint32 *tickets, float *sums, Sync sync) {
    constexpr int SPLITS = THREADS / COLUMNS, IN_FLIGHT = 33;  // SPLITS threads of the last block share a column; H200: 132 blocks
    // Of each block and column the mean and the sum of squares; behind them how many rows each block has.
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

// The end of a kernel that has left the moments of each filter in the first `own` parts of `of_part`: the block's go to
// `partials` (gridDim.x, FILTERS), and the last block to arrive writes those of all, in a fixed order, as BatchNorm reads them:
// sums (3, FILTERS), tickets (1). For the first PARTS * FILTERS threads of a block, which wait for each other by `meet`.
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
    constexpr int IN_FLIGHT = 14, STEP = PARTS * IN_FLIGHT;  // H200: 132 blocks, in two or three rounds
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
