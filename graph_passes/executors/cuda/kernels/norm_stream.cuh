// From a BatchNorm through the 1x1 convolution that reads what it makes, forward (norm_conv1x1.cu) and backward
// (norm_dgrad.cu), by Hopper's instructions: what both share.
//
// They are laid out as conv1x1_forward.cuh says, but that what is multiplied is made first. Tiles of 64 rows and 64 channels
// come in twos, of the two tensors that it is made of. A warp takes its 16 rows of both to registers as the tensor cores have
// them, as the first operand of a product, and the places of both are free for the next tiles. What is made of them goes to a
// place of the warp's own, whence the copy engine takes it, and is multiplied from the registers. What the convolution gives
// goes the same way.
//
// Where a block cannot keep the weights, they are streamed: for each chunk of channels they come from the L2 cache once for
// both teams, which so go through their tiles side by side.
#pragma once
#include "batch_norm.cuh"
#include "conv1x1_forward.cuh"

constexpr int WEIGHT_STAGES = 2;                     // for a chunk's weights, where they are streamed
constexpr int STREAMING = (MMA_WARPS + 4) * WARP;  // threads of a block then: four warps give registers to the others

// At the start of shared memory. Behind it: Affine (chunks); in vectors the weights of all chunks, or places for those of some,
// (COLUMNS * 8) each; `stages` times two tiles of each team; a result of each multiplying warp.
struct alignas(1024) NormControl { Control control; uint64 full[WEIGHT_STAGES], empty[WEIGHT_STAGES]; };

// Of a chunk of channels, what is made is first * scale + (second * scale_2 + shift), or the like.
struct Affine { float scale[CHUNK], shift[CHUNK], scale_2[CHUNK]; };

// What they take: tiles begin at multiples of 1024 bytes.
__device__ inline int affine_vectors(int chunks) { return (chunks * int(sizeof(Affine)) + 1023) / 1024 * 1024 / VECTOR_BYTES; }

__device__ inline float2 load_float2(const float *of, int first) { return *reinterpret_cast<const float2 *>(of + first); }

// For one thread.
__device__ inline void init_barriers(NormControl &all, int stages) {
    for (int slot = 0; slot < WEIGHT_STAGES; ++slot) {
        mbarrier_init(all.full[slot], 1);
        mbarrier_init(all.empty[slot], MMA_WARPS);
    }
    init_barriers(all.control, stages, 0);
}

struct Corner { int column, row; };  // of a tile

// For one thread: starts the copies of two tiles to a team's next place, as soon as it is free.
__device__ inline void load_two(const Stages &stages, PipelineState &pipe, const TensorMap &first, Corner of_first,
                                const TensorMap &second, Corner of_second) {
    mbarrier_wait(stages.empty[pipe.index], pipe.phase ^ 1);  // at once in the first turn
    uint64 &full = stages.full[pipe.index];
    arrive_expect_tx(full, 2 * TILE_VECTORS * VECTOR_BYTES);
    uint4 *const to = stages.tiles + pipe.index * 2 * TILE_VECTORS;
    tma_load(to, first, of_first.column, of_first.row, 0, full);
    tma_load(to + TILE_VECTORS, second, of_second.column, of_second.row, 0, full);
    pipe.advance(stages.number);
}

// For one thread: starts the copies of each chunk's weights, as many times as there are rounds of tiles. `load` starts those
// of a chunk to a place, which end a phase of a barrier.
template <int COLUMNS, class Load>
__device__ inline void stream_weights(uint4 *to, NormControl &all, int chunks, uint32 rounds, Load load) {
    PipelineState pipe;
    for (uint32 round = 0; round < rounds; ++round)
        for (int c = 0; c < chunks; ++c, pipe.advance(WEIGHT_STAGES)) {
            mbarrier_wait(all.empty[pipe.index], pipe.phase ^ 1);  // at once in the first turn
            arrive_expect_tx(all.full[pipe.index], COLUMNS * CHUNK_VECTORS * VECTOR_BYTES);
            load(to + pipe.index * COLUMNS * CHUNK_VECTORS, c, all.full[pipe.index]);
        }
}

// The place for a warp's results is free.
__device__ inline void acquire_result(int lane) {
    if (lane == 0) tma_store_wait<0>();
    __syncwarp();
}
// Starts the copy of a warp's result, which all of it have written.
__device__ inline void store_result(const TensorMap &to, int column, int row, const uint4 *result, int lane) {
    tma_store_fence();
    __syncwarp();
    if (lane == 0) tma_store(to, column, row, 0, result);
    __syncwarp();
}

// A team's warp is done with a chunk's weights.
__device__ inline void release_weights(NormControl &all, PipelineState &pipe, int lane) {
    if (lane == 0) arrive(all.empty[pipe.index]);
    pipe.advance(WEIGHT_STAGES);
}
// Of the teams some may have a tile less, whose `chunks` of weights come nonetheless.
__device__ inline void skip_weights(NormControl &all, PipelineState &pipe, int chunks, int lane) {
    for (int c = 0; c < chunks; ++c) {
        mbarrier_wait(all.full[pipe.index], pipe.phase);
        __syncwarp();
        release_weights(all, pipe, lane);
    }
}
