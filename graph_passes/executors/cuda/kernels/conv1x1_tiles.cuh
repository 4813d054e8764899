// Shared by the 1x1 convolutions in floating point (conv1x1_forward.cuh) and in integers (quantised_stream.cuh): which tiles a
// team processes, the circular buffer of its tiles of x, and the result slots of a warp.
#pragma once
#include "pipeline.cuh"

constexpr int WARP_ROWS = 16, ROWS = TEAM_WARPS * WARP_ROWS;  // rows of a warp, and of a tile
// Vectors of a chunk of channels in one row (the 128 bytes of a tile of warpgroup.cuh), of a tile, and of a warp's result.
constexpr int CHUNK_VECTORS = 8, TILE_VECTORS = ROWS * CHUNK_VECTORS, RESULT_VECTORS = WARP_ROWS * CHUNK_VECTORS;
constexpr int VECTOR_BYTES = 16;
constexpr int MAX_COLUMNS = 256, MAX_STAGES = 12;

// Tile of a 1x1 convolution: how many rows it has, and the step from one tile to the next, in rows and lines of x and of y.
struct TileStep { int rows, x_row, x_line, y_row, y_line; };

// Every `step`-th tile, starting with `first`.
struct TileRange { uint32 first, end, step; };

// A team's tiles of `tile_rows` rows; gridDim.y blocks share the rows.
template <int TEAMS> __device__ inline TileRange tiles_of(int team, uint32 rows, int tile_rows) {
    return {blockIdx.y * TEAMS + team, (rows + tile_rows - 1) / tile_rows, gridDim.y * TEAMS};
}

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
