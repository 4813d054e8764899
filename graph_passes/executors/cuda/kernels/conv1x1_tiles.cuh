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

// Every `step`-th tile, from `first` to before `end`.
struct TileRange { uint32 first, end, step; };

// A team's tiles of `tile_rows` rows; gridDim.y blocks share the rows.
template <int TEAMS> __device__ inline TileRange tiles_of(int team, uint32 rows, int tile_rows) {
    return {blockIdx.y * TEAMS + team, (rows + tile_rows - 1) / tile_rows, gridDim.y * TEAMS};
}

// --- the mainloop: the circular buffer of a team's tiles of x, which producers fill and consumers empty ---

// `number` stages of `stage_vectors` each.
struct Stages {
    uint4 *tiles;
    uint64 *full, *empty;
    int number;

    template <class Control>
    __device__ Stages(Control &control, int team, uint4 *all_tiles, int number, int stage_vectors = TILE_VECTORS)
        : tiles(all_tiles + team * number * stage_vectors), full(control.full[team]), empty(control.empty[team]),
          number(number) {}
};

// PEERS: blocks of a cluster. Each block starts a part of the copies, which go to all blocks of the cluster.
// `slots_added`: result slots of a warp that receive addends.
template <int TEAMS, int PEERS = 1, class Control>
__device__ inline void init_tile_barriers(Control &control, int stages, int slots_added) {
    for (int t = 0; t < TEAMS; ++t)
        for (int s = 0; s < stages; ++s) {
            mbarrier_init(control.full[t][s], 1);
            mbarrier_init(control.empty[t][s], TEAM_WARPS * PEERS);
        }
    for (int i = 0; i < TEAMS * TEAM_WARPS; ++i)
        for (int slot = 0; slot < slots_added; ++slot) mbarrier_init(control.addend[i][slot], 1);
    fence_barrier_init();
}

// --- the epilogue: a warp's result slots ---

// A tile of y has `parts` parts of CHUNK columns. A warp finishes its rows of one part after another in its `slots`
// result slots. Addends are prefetched into these slots: every slot holds an addend in flight, except the slot that is
// being processed.
template <int CHUNK> struct AddendsOf {
    const TensorMap &map;
    const TileStep &walk;
    uint64 *arrived;
    uint4 *results;
    TileRange range;
    int first_column, own_row, parts, slots, part = 0;

    // One thread calls the functions of this struct. `load` starts the copy of the next part into this slot.
    __device__ void load(int slot) {
        if (range.first >= range.end) return;
        uint64 &there = arrived[slot];
        arrive_expect_tx(there, RESULT_VECTORS * VECTOR_BYTES);
        tma_load(results + slot * RESULT_VECTORS, map, first_column + part * CHUNK, range.first * walk.y_row + own_row,
                 range.first * walk.y_line, there);
        if (++part == parts) {
            part = 0;
            range.first += range.step;
        }
    }
    __device__ void load_all() {
        for (int slot = 0; slot < slots; ++slot) load(slot);
    }
    // Refills the slot before this one. Its store is older than the last PENDING stores.
    template <int PENDING> __device__ void refill_before(int slot) {
        tma_store_wait<PENDING>();
        load(slot == 0 ? slots - 1 : slot - 1);
    }
};

// Waits until a result slot may be used: with ADD until the addend has arrived, otherwise until TMA has read the
// previous result. A warp has at least MIN_SLOTS of the `slots`.
template <bool ADD, int MIN_SLOTS>
__device__ inline void acquire_slot(uint64 &arrived, const PipelineState &result, int slots, int lane) {
    if (ADD) {
        mbarrier_wait(arrived, result.phase);
    } else {
        if (lane == 0) {  // with two slots, this waits for the last store but one
            if (MIN_SLOTS > 1 || slots > 1)
                tma_store_wait<1>();
            else
                tma_store_wait<0>();
        }
        __syncwarp();
    }
}
