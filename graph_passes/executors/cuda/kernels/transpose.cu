// Transposes a tensor of up to four dimensions. Some dimensions may also be reversed.
#include "common.cuh"

// size: the shape of the result. step: the distance in x between neighbouring elements of the result, for each
// dimension. first: the index in x of the result's first element. Along a reversed dimension `step` is negative, modulo
// 2^32.
struct Order { uint32 size[4], step[4], first; };

// y[i][j][k][l] = x[first + i * step[0] + j * step[1] + k * step[2] + l * step[3]]. One thread copies one element of
// type V. An element of V may be several neighbouring elements of the tensor.
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
