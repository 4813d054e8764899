// Columns of a matrix, which are channels of images: copied to other columns, for Concat and slice_axis, and back.
#include "common.cuh"

// to[row][to_first + c] = from[row][from_first + c] for c < columns. With FILL, all other columns of `to` become 0, and
// each element of `to` has a thread; without FILL, each copied element has a thread. V: one element, or a vector of 8
// neighbouring elements; all column numbers count V.
// Shapes: from (rows, from_pitch), to (rows, to_pitch). items = rows * (FILL ? to_pitch : columns).
template <class V, bool FILL>
__global__ void copy_columns(const V *from, V *to, uint32 items, uint32 columns, uint32 from_pitch, uint32 from_first,
                             uint32 to_pitch, uint32 to_first) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= items) return;
    const uint32 width = FILL ? to_pitch : columns, row = at / width, target = at % width + (FILL ? 0 : to_first);
    const uint32 column = target - to_first;  // wraps around to a huge number for columns before `to_first`
    V v = {};
    if (column < columns) v = from[size_t(row) * from_pitch + from_first + column];
    to[size_t(row) * to_pitch + target] = v;
}
