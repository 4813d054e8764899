// BatchNorm fused with the 1x1 convolution that reads its output, on Hopper. Shared by the forward kernel (norm_conv1x1.cu)
// and the backward kernel (norm_dgrad.cu).
//
// The design of conv1x1_forward.cuh is used, but the A operand is computed first, from two tensors. Their tiles of 64
// rows and 64 channels are loaded in pairs. A warp loads its 16 rows of both into registers, in the layout of an A
// fragment; the stage is then free for the next tiles. The result goes to a slot of the warp in shared memory, from
// which TMA stores it, and is multiplied from the registers. The convolution's output goes through the same slot.
//
// Weights too large for shared memory are streamed. The weights of each chunk of channels are loaded from the L2 cache
// once for both teams, so both teams process their tiles in lockstep.
#pragma once
#include "batch_norm.cuh"
#include "conv1x1_forward.cuh"

constexpr int WEIGHT_STAGES = 2;                     // stages for a chunk's weights, if they are streamed
// threads of a block with streamed weights: four producer warps give registers to the others
constexpr int STREAMING = (MMA_WARPS + 4) * WARP;

// At the start of shared memory. Then follow: Affine (chunks); in vectors the weights of all chunks, or stages for some of
// them, (COLUMNS * 8) each; `stages` pairs of tiles for each team; a result slot for each MMA warp.
struct alignas(1024) NormControl { Control control; uint64 full[WEIGHT_STAGES], empty[WEIGHT_STAGES]; };

// Coefficients of a chunk of channels: first * scale + (second * scale_2 + shift), or a similar form.
struct Affine { float scale[CHUNK], shift[CHUNK], scale_2[CHUNK]; };

// Vectors of shared memory for the `Affine` array, rounded up: tiles begin at multiples of 1024 bytes.
__device__ inline int affine_vectors(int chunks) { return (chunks * int(sizeof(Affine)) + 1023) / 1024 * 1024 / VECTOR_BYTES; }

__device__ inline float2 load_float2(const float *of, int first) { return *reinterpret_cast<const float2 *>(of + first); }

// m = `of(i, first, bits, bits_2)` of x and, with TWO, of a second tensor: the A fragment of 16 columns of a warp's
// rows, the `pair`-th such group. `bits` and `bits_2` are two neighbouring channels of x and of the second tensor, from
// `first` on. i % 2: rows 0-7 or 8-15; i / 2: first or second 8 columns.
template <bool TWO, class Of>
__device__ inline void make_fragment(const uint4 *x, const uint4 *second, int pair, int lane, uint32 (&m)[4], Of of) {
    uint32 of_second[4];
    ldmatrix_x4(m, x + matrix_row(lane, pair));
    if (TWO) ldmatrix_x4(of_second, second + matrix_row(lane, pair));
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = of(i, pair * 16 + i / 2 * 8 + lane % 4 * 2, m[i], TWO ? of_second[i] : 0);
}

// The addend of a normalised tensor before the ReLU: nothing, an unchanged tensor, or a tensor after its own BatchNorm.
enum Addend { NO_ADDEND, PLAIN, NORMALISED };

// m = relu(norm(x) + addend), for 16 columns of a warp's rows, the `pair`-th such group. If there is an addend, `bits` gets the
// signs of this thread's channels, two bits of each byte:
//   word r * 2 + h = rows r * 8 to r * 8 + 7 of the warp, channels h * 32 to h * 32 + 31, one byte for 8 channels
// The bits equal those of batch_norm.cu and batch_norm_pair.cu.
template <class T, Addend ADDEND>
__device__ inline void normalise(const Affine &of, const uint4 *x, const uint4 *addend, int pair, int lane, uint32 (&m)[4],
                                 uint32 (&bits)[4]) {
    make_fragment<ADDEND != NO_ADDEND>(x, addend, pair, lane, m, [&](int i, int first, uint32 own, uint32 added) {
        const float2 scale = load_float2(of.scale, first), shift = load_float2(of.shift, first), more = unpack_two<T>(added);
        float2 v = unpack_two<T>(own);
        if (ADDEND == NORMALISED) {
            const float2 scale_2 = load_float2(of.scale_2, first);
            v.x = v.x * scale.x + (more.x * scale_2.x + shift.x);
            v.y = v.y * scale.y + (more.y * scale_2.y + shift.y);
        } else {
            v.x = v.x * scale.x + shift.x;
            v.y = v.y * scale.y + shift.y;
            if (ADDEND == PLAIN) {
                v.x += more.x;
                v.y += more.y;
            }
        }
        if (ADDEND != NO_ADDEND)
            bits[i % 2 * 2 + pair / 2] |= (uint32(v.x > 0) | uint32(v.y > 0) << 1) << (pair % 2 * 2 + i / 2) * 8;
        return pack_two<T>(relu(v.x), relu(v.y));
    });
}

// Called by one thread. Initialises the mbarriers.
__device__ inline void init_barriers(NormControl &all, int stages) {
    for (int slot = 0; slot < WEIGHT_STAGES; ++slot) {
        mbarrier_init(all.full[slot], 1);
        mbarrier_init(all.empty[slot], MMA_WARPS);
    }
    init_barriers(all.control, stages, 0);
}

struct Corner { int column, row; };  // first column and row of a tile

// Called by one thread. Starts the loads of a pair of tiles into the team's next stage, as soon as it is empty.
__device__ inline void load_two(const Stages &stages, PipelineState &pipe, const TensorMap &first, Corner of_first,
                                const TensorMap &second, Corner of_second) {
    mbarrier_wait(stages.empty[pipe.index], pipe.phase ^ 1);  // the first round does not wait
    uint64 &full = stages.full[pipe.index];
    arrive_expect_tx(full, 2 * TILE_VECTORS * VECTOR_BYTES);
    uint4 *const to = stages.tiles + pipe.index * 2 * TILE_VECTORS;
    tma_load(to, first, of_first.column, of_first.row, 0, full);
    tma_load(to + TILE_VECTORS, second, of_second.column, of_second.row, 0, full);
    pipe.advance(stages.number);
}

// Called by one thread. Starts the loads of each chunk's weights, once per round of tiles. `load` starts the load of
// one chunk into a stage; the bytes of the chunk count towards a phase of the barrier.
template <int COLUMNS, class Load>
__device__ inline void stream_weights(uint4 *to, NormControl &all, int chunks, uint32 rounds, Load load) {
    PipelineState pipe;
    for (uint32 round = 0; round < rounds; ++round)
        for (int c = 0; c < chunks; ++c, pipe.advance(WEIGHT_STAGES)) {
            mbarrier_wait(all.empty[pipe.index], pipe.phase ^ 1);  // the first round does not wait
            arrive_expect_tx(all.full[pipe.index], COLUMNS * CHUNK_VECTORS * VECTOR_BYTES);
            load(to + pipe.index * COLUMNS * CHUNK_VECTORS, c, all.full[pipe.index]);
        }
}

// Waits until TMA has read the warp's result slot.
__device__ inline void acquire_result(int lane) {
    if (lane == 0) tma_store_wait<0>();
    __syncwarp();
}
// Starts the store of the warp's result, after all its lanes have written.
__device__ inline void store_result(const TensorMap &to, int column, int row, const uint4 *result, int lane) {
    tma_store_fence();
    __syncwarp();
    if (lane == 0) tma_store(to, column, row, 0, result);
    __syncwarp();
}

// Starts the store of a chunk of a warp's rows, given as A fragments, from the warp's result slot.
__device__ inline void store_fragments(const TensorMap &to, int column, int row, const uint32 (&m)[CHUNK / 16][4], uint4 *result,
                                       int lane) {
    acquire_result(lane);
#pragma unroll
    for (int pair = 0; pair < CHUNK / 16; ++pair) stmatrix_x4(result + matrix_row(lane, pair), m[pair]);
    store_result(to, column, row, result, lane);
}
// Starts products += m * w for the A fragments of a chunk. The weights are K-major, or MN-major with ROWS_ARE_K. `m` may be
// overwritten after wgmma_wait.
template <class T, bool ROWS_ARE_K = false, int N>
__device__ inline void multiply_fragments(float (&products)[N][4], const uint32 (&m)[CHUNK / 16][4], const uint4 *weights) {
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < CHUNK / 16; ++s)
        if constexpr (ROWS_ARE_K)
            wgmma_k_mn(products, m[s], smem_desc_mn(weights + s * 16 * CHUNK_VECTORS), T{});
        else
            wgmma_k_k(products, m[s], smem_desc(weights + s * 2), T{});
    wgmma_commit();
}

// Tells the producer that this warp is done with a chunk's weights.
__device__ inline void release_weights(NormControl &all, PipelineState &pipe, int lane) {
    if (lane == 0) arrive(all.empty[pipe.index]);
    pipe.advance(WEIGHT_STAGES);
}
// A team may have one tile less than the others. It must still release the weights of that round, `chunks` stages.
__device__ inline void skip_weights(NormControl &all, PipelineState &pipe, int chunks, int lane) {
    for (int c = 0; c < chunks; ++c) {
        mbarrier_wait(all.full[pipe.index], pipe.phase);
        __syncwarp();
        release_weights(all, pipe, lane);
    }
}
