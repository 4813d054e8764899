// What 1x1 convolutions in floats (conv1x1_forward.cuh) and in integers (quantised_stream.cuh) share: the tiles of a team, and
// what is added to them.
#pragma once
#include "copy_engine.cuh"

// Every `step`-th of the tiles, from `first` on.
struct Share { uint32 first, end, step; };

// What a warp adds to its part of each tile: it is on its way into all of the results but the one that is worked on.
template <int CHUNK, int RESULT_VECTORS> struct AddendsOf {
    const TensorMap &map;
    const TileWalk &walk;
    uint64 *arrived;
    uint4 *results;
    Share share;
    int first_column, own_row, parts, part = 0;

    // For one thread: starts the copy of the next part.
    __device__ void load(int place) {
        if (share.first >= share.end) return;
        uint64 &there = arrived[place];
        arrive_expecting(there, RESULT_VECTORS * sizeof(uint4));
        load_tile(results + place * RESULT_VECTORS, map, first_column + part * CHUNK, share.first * walk.y_row + own_row,
                  share.first * walk.y_line, there);
        if (++part == parts) {
            part = 0;
            share.first += share.step;
        }
    }
};
