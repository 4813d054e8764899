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
