// What 1x1 convolutions in floats (conv1x1_forward.cuh) and in integers (quantised_stream.cuh) share: the tiles of a team, and
// what is added to them.
#pragma once
#include "tma.cuh"

// Every `step`-th of the tiles, from `first` on.
struct TileRange { uint32 first, end, step; };

// What a warp adds to its part of each tile: it is on its way into all of the results but the one that is worked on.
template <int CHUNK, int RESULT_VECTORS> struct AddendsOf {
    const TensorMap &map;
    const TileStep &walk;
    uint64 *arrived;
    uint4 *results;
    TileRange range;
    int first_column, own_row, parts, part = 0;

    // For one thread: starts the copy of the next part.
    __device__ void load(int slot) {
        if (range.first >= range.end) return;
        uint64 &there = arrived[slot];
        arrive_expect_tx(there, RESULT_VECTORS * sizeof(uint4));
        tma_load(results + slot * RESULT_VECTORS, map, first_column + part * CHUNK, range.first * walk.y_row + own_row,
                 range.first * walk.y_line, there);
        if (++part == parts) {
            part = 0;
            range.first += range.step;
        }
    }
};
