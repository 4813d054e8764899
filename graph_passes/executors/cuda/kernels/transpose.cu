// A tensor of up to four dimensions with its dimensions in another order.
#include "common.cuh"

// Elements of the result along each of its dimensions, and how far apart they lie in what is read.
struct Order { uint32 size[4], step[4]; };

// y[i][j][k][l] = x[i * step[0] + j * step[1] + k * step[2] + l * step[3]]. A thread for each element.
// Shapes: x (items), y (size[0], size[1], size[2], size[3]).
template <class T> __global__ void transpose(const T *x, T *y, Order order, uint32 items) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= items) return;
    uint32 rest = at, from = 0;
#pragma unroll
    for (int d = 3; d >= 0; --d) {
        from += rest % order.size[d] * order.step[d];
        rest /= order.size[d];
    }
    y[at] = x[from];
}
