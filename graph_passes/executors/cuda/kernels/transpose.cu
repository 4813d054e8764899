// A tensor of up to four dimensions with its dimensions in another order, or with some of them backwards.
#include "common.cuh"

// Elements of the result along each of its dimensions, and how far apart they lie in what is read, from its element `first`
// on. Along a dimension that is read backwards, `step` is negative: numbers are modulo 2^32.
struct Order { uint32 size[4], step[4], first; };

// y[i][j][k][l] = x[first + i * step[0] + j * step[1] + k * step[2] + l * step[3]]. A thread for each element of type V, of as
// many bytes as one or several elements of the tensor, which keep their order.
// Shapes: x (items), y (size[0], size[1], size[2], size[3]).
template <class V> __global__ void transpose(const V *x, V *y, Order order, uint32 items) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= items) return;
    uint32 rest = at, from = order.first;
#pragma unroll
    for (int d = 3; d >= 0; --d) {
        from += rest % order.size[d] * order.step[d];
        rest /= order.size[d];
    }
    y[at] = x[from];
}
