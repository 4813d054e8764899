// Mean and variance of values that are seen in parts: Chan, Golub and LeVeque, 'Algorithms for computing the sample variance',
// The American Statistician 37, 1983.
#pragma once
#include "common.cuh"

// Of some values: how many, their mean, and the sum of squares of what they differ from it.
struct Moments {
    float count, mean, squares;

    // From the sums of v - near and of its square.
    __device__ static Moments about(float near, float count, float sum, float sum_of_squares) {
        const float from_near = count > 0 ? sum / count : 0;
        return {count, near + from_near, sum_of_squares - sum * from_near};
    }

    // What another block has written.
    __device__ static Moments written(const Moments *at) {
        return {__ldcg(&at->count), __ldcg(&at->mean), __ldcg(&at->squares)};
    }
};

// Of the values of at(first), at(first + step), ... together, always in this order.
template <class At> __device__ Moments together(int first, int end, int step, At at) {
    float near = 0, count = 0, sum = 0, sum_of_squares = 0;
#pragma unroll 8
    for (int i = first; i < end; i += step) {
        const Moments part = at(i);
        if (i == first) near = part.mean;
        const float from_near = part.mean - near;
        count += part.count;
        sum += part.count * from_near;
        sum_of_squares += part.squares + part.count * from_near * from_near;
    }
    return Moments::about(near, count, sum, sum_of_squares);
}

// The end of a kernel that has left the moments of each filter in the first `own` parts of `of_part`: the block's go to
// `partials` (gridDim.x, FILTERS), and the last block to arrive writes those of all, in a fixed order, as BatchNorm reads them:
// sums (3, FILTERS), tickets (1). For blocks of PARTS * FILTERS threads, all of which come here.
template <int PARTS, int FILTERS>
__device__ inline void write_sums(Moments (&of_part)[PARTS][FILTERS], int own, Moments *partials, uint32 *tickets, float *sums) {
    __shared__ bool last;
    __syncthreads();
    const int part = threadIdx.x / FILTERS, filter = threadIdx.x % FILTERS;
    const auto of_filter = [&](int i) { return of_part[i][filter]; };
    if (part == 0) {
        partials[blockIdx.x * FILTERS + filter] = together(0, own, 1, of_filter);
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(tickets, 1) == gridDim.x - 1;
        if (last) *tickets = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    of_part[part][filter] = together(part, gridDim.x, PARTS, [=](int block) {
        return Moments::written(&partials[block * FILTERS + filter]);
    });
    __syncthreads();
    if (part > 0) return;
    const Moments all = together(0, PARTS, 1, of_filter);
    sums[filter] = 0;
    sums[FILTERS + filter] = all.squares;
    sums[2 * FILTERS + filter] = all.mean;
}
