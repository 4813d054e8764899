// Shared by the 1x1 convolutions in floating point (conv1x1_forward.cuh) and in integers (quantised_stream.cuh): which tiles
// a team processes, and how the tiles of an addend are prefetched.
#pragma once
#include "tma.cuh"

// Every `step`-th tile, starting with `first`.
struct TileRange { uint32 first, end, step; };

// Prefetches the addend of a warp's part of each tile into its result slots. Every slot holds an addend in flight, except the
// one that is being processed.
template <int CHUNK, int RESULT_VECTORS> struct AddendsOf {
    const TensorMap &map;
    const TileStep &walk;
    uint64 *arrived;
    uint4 *results;
    TileRange range;
    int first_column, own_row, parts, part = 0;

    // Called by one thread. Starts the copy of the next part into this slot.
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
