// 1x1 convolutions on Hopper: shared by conv1x1_forward.cu, conv1x1_pair.cu, dgrad_stream.cu and norm_stream.cuh.
//
//     y[row, k] = sum over c of x[row, c] * w[k, c]
//
// These layers are bound by memory, and the kernels are designed for that. A block keeps the weights of COLUMNS outputs
// in shared memory. It has two teams of four MMA warps, and one TMA warp per team. Each team walks over tiles of 64
// rows, independently of the other team: one team can multiply while the other finishes its tile. In the epilogue each
// warp works alone on its 16 rows: it adds the addend in shared memory, 64 columns at a time, and TMA stores the result
// from there. dgrad_reduce.cu computes the same product with C and K exchanged.
#pragma once
#include "conv1x1_tiles.cuh"

constexpr int TEAMS = 2, MMA_WARPS = TEAMS * TEAM_WARPS, THREADS = (MMA_WARPS + TEAMS) * WARP;
constexpr int CHUNK = 64, MAX_RESULTS = 8;  // channels of a tile; result slots of a warp

// At the start of shared memory. Then follow, in vectors: the weights (chunks, COLUMNS * 8); `stages` tiles of x for each
// team; `results` parts of y for each MMA warp.
struct alignas(1024) Control {
    float bias[MAX_COLUMNS];
    uint64 weights, full[TEAMS][MAX_STAGES], empty[TEAMS][MAX_STAGES], addend[MMA_WARPS][MAX_RESULTS];
};

// --- 16 rows of 64 channels in shared memory, and two 8-column accumulator tiles of a warp ---

// Index of this lane's row for ldmatrix or stmatrix of 16 columns: the `pair`-th pair of 8-column tiles of a result.
__device__ inline int matrix_row(int lane, int pair) { return swizzled(lane % 16, pair * 2 + lane / 16); }

__device__ inline void ldmatrix_x4(uint32 (&m)[4], const uint4 *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(smem_address(at)) : "memory");
}
__device__ inline void stmatrix_x4(uint4 *at, const uint32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(smem_address(at)), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}

// Sums 64 columns over a warp's 16 rows. On entry, `v[2 * j + k]` is the sum of column 8 * j + lane % 4 * 2 + k over two
// rows. On exit, v[0] and v[1] are the sums of columns lane * 2 and lane * 2 + 1 over all rows.
__device__ inline void sum_over_rows(float (&v)[16], int lane) {
    reduce_scatter<8, 16>(v, lane);
    reduce_scatter<4, 8>(v, lane);
    reduce_scatter<2, 4>(v, lane);
}

// Sums of SUMS terms over a warp's rows: for the two columns of each part that this thread sums.
template <int SUMS, int PARTS> struct ColumnSums {
    float sums[SUMS][PARTS][2] = {};

    // Adds part `p`; `of_rows` has the layout of `v` in `sum_over_rows`.
    __device__ void add(int p, float (&of_rows)[SUMS][16], int lane) {
#pragma unroll
        for (int j = 0; j < SUMS; ++j) {
            sum_over_rows(of_rows[j], lane);
#pragma unroll
            for (int k = 0; k < 2; ++k) sums[j][p][k] += of_rows[j][k];
        }
    }
    // Stores the sums as `reduce_parts` reads them: (warps, SUMS, PARTS * CHUNK).
    __device__ void store(float *of_warps, int warp, int lane) const {
#pragma unroll
        for (int j = 0; j < SUMS; ++j)
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    of_warps[(warp * SUMS + j) * PARTS * CHUNK + p * CHUNK + lane * 2 + k] = sums[j][p][k];
    }
};

// --- the tiles of a team ---

template <int PEERS = 1> __device__ inline void init_barriers(Control &control, int stages, int slots_added) {
    mbarrier_init(control.weights, 1);
    init_tile_barriers<TEAMS, PEERS>(control, stages, slots_added);
}

// Called by one thread. Starts the loads of `chunks` tiles of weights, (COLUMNS, 64) each.
template <int COLUMNS>
__device__ inline void load_weights(uint4 *to, const TensorMap &w, int chunks, int first_column, uint64 &barrier) {
    for (int c = 0; c < chunks; ++c) tma_load(to + c * COLUMNS * CHUNK_VECTORS, w, c * CHUNK, first_column, 0, barrier);
}

// Called by one thread. Starts the loads of the team's tiles, as stages become empty: for each tile `chunks` of x, 64
// channels each, and with TWO `chunks_2` of x_2, which has the rows of y. The PEERS blocks of a cluster compute
// different columns of the same rows. They take turns in starting loads, and each load is multicast to all of these
// blocks.
template <bool TWO = false, int PEERS = 1>
__device__ inline void load_tiles(const Stages &stages, const TensorMap &x, int chunks, const TileRange &range,
                                  const TileStep &walk, const TensorMap *x_2 = nullptr, int chunks_2 = 0) {
    const int own = PEERS > 1 ? cluster_rank() : 0;
    PipelineState pipe, of_peers;
    for (uint32 tile = range.first; tile < range.end; tile += range.step)
        for (int c = 0; c < chunks + (TWO ? chunks_2 : 0); ++c, pipe.advance(stages.number), of_peers.advance(PEERS)) {
            mbarrier_wait(stages.empty[pipe.index], pipe.phase ^ 1);  // the first round does not wait
            uint64 &full = stages.full[pipe.index];
            arrive_expect_tx(full, walk.rows * CHUNK_VECTORS * VECTOR_BYTES);
            if (of_peers.index != own) continue;
            uint4 *const to = stages.tiles + pipe.index * TILE_VECTORS;
            if (TWO && c >= chunks)
                tma_load_multicast<PEERS>(to, *x_2, (c - chunks) * CHUNK, tile * walk.y_row, tile * walk.y_line, full);
            else
                tma_load_multicast<PEERS>(to, x, c * CHUNK, tile * walk.x_row, tile * walk.x_line, full);
        }
}

using Addends = AddendsOf<CHUNK>;

// --- the work of a warp on a tile ---

// Barrier of the MMA warps.
constexpr NamedBarrier<1, MMA_WARPS * WARP> sync_mma_warps{};

// Initialises the accumulators with the bias.
template <int N> __device__ inline void init_accumulators(float (&products)[N][4], const float *bias, int lane) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const float2 b = *reinterpret_cast<const float2 *>(&bias[j * 8 + lane % 4 * 2]);
        products[j][0] = products[j][2] = b.x;
        products[j][1] = products[j][3] = b.y;
    }
}

// Tells all producers that this warp has read a stage.
template <int PEERS> __device__ inline void release(uint64 &empty, int lane) {
    if (PEERS == 1 && lane == 0) arrive(empty);
    if (PEERS > 1 && lane < PEERS) arrive_remote(lane, empty);
}

// products += x * w for the next tile of x. The weights are K-major, or MN-major with ROWS_ARE_K.
template <class T, bool ROWS_ARE_K = false, int PEERS = 1, int N>
__device__ inline void multiply_tile(float (&products)[N][4], const uint4 *weights, int chunks, const Stages &stages,
                                     PipelineState &pipe, int lane) {
    int before = 0;  // stage of the previous chunk
    for (int c = 0; c < chunks; ++c, pipe.advance(stages.number)) {
        mbarrier_wait(stages.full[pipe.index], pipe.phase);
        const uint4 *a = stages.tiles + pipe.index * TILE_VECTORS, *b = weights + c * N * 8 * CHUNK_VECTORS;
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < CHUNK / 16; ++s)
            if constexpr (ROWS_ARE_K)
                wgmma_k_mn(products, smem_desc(a + s * 2), smem_desc_mn(b + s * 16 * CHUNK_VECTORS), T{});
            else
                wgmma_k_k(products, smem_desc(a + s * 2), smem_desc(b + s * 2), T{});
        wgmma_commit();
        wgmma_wait<1>();
        if (c > 0) release<PEERS>(stages.empty[before], lane);
        before = pipe.index;
    }
    wgmma_wait();
    wgmma_fence_operand(products);
    release<PEERS>(stages.empty[before], lane);
}

// Finishes 16 columns, which are two accumulator tiles. Adds the values stored at `at`, applies ReLU, rounds, and stores the
// result at `at`. `m` is the result as A fragment of the next wgmma.
template <class T, bool ADD, bool RELU>
__device__ inline void finish(const float (&left)[4], const float (&right)[4], uint4 *at, uint32 (&m)[4]) {
    float v[8] = {left[0], left[1], left[2], left[3], right[0], right[1], right[2], right[3]};
    if (ADD) ldmatrix_x4(m, at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (ADD) {
            const float2 more = unpack_two<T>(m[i]);
            v[2 * i] += more.x;
            v[2 * i + 1] += more.y;
        }
        m[i] = RELU ? pack_two<T>(relu(v[2 * i]), relu(v[2 * i + 1])) : pack_two<T>(v[2 * i], v[2 * i + 1]);
    }
    stmatrix_x4(at, m);
}

// Finishes the 64 columns of part `p`.
template <class T, bool ADD, bool RELU, int N>
__device__ inline void finish_part(const float (&products)[N][4], int p, uint4 *at, int lane) {
#pragma unroll
    for (int pair = 0; pair < CHUNK / 16; ++pair) {
        uint32 m[4];
        finish<T, ADD, RELU>(products[p * 8 + pair * 2], products[p * 8 + pair * 2 + 1], at + matrix_row(lane, pair), m);
    }
}

// Sets the pivot of each of this thread's two columns, which should be near the column's mean: the value in the first
// row.
template <class T> __device__ inline void set_pivot(float (&pivot)[2], const uint4 *result, int lane) {
    const float2 first = unpack_two<T>(reinterpret_cast<const uint32 *>(result)[lane]);
    pivot[0] = first.x;
    pivot[1] = first.y;
}

// Adds up to 16 rows of a result to the sums of this thread's two columns, 2 * lane and 2 * lane + 1. The sums are of v -
// pivot and of (v - pivot)^2.
template <class T>
__device__ inline void add_rows(const uint4 *result, int rows, int lane, const float (&pivot)[2], float (&of_column)[2][2]) {
    const auto add = [&](uint32 bits) {
        const float2 v = unpack_two<T>(bits);
        const float deviation[2] = {v.x - pivot[0], v.y - pivot[1]};
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            of_column[k][0] += deviation[k];
            of_column[k][1] += deviation[k] * deviation[k];
        }
    };
    const uint32 *const words = reinterpret_cast<const uint32 *>(result);
    const auto stored = [&](int r) { return words[r * WARP + (lane ^ r % 8 * 4)]; };  // position by `swizzled`
    // True only for rows == 16, because 0 <= rows <= 16. With the condition `rows == 16`, and a caller that has clamped
    // `rows`, ptxas 12.9 and 13.0 reuse the flag of the instruction that clamps at both ends. That flag has another
    // meaning, so short tiles took this branch, too.
    if (rows & WARP_ROWS) {
        uint32 bits[WARP_ROWS];  // all loads are in flight before the first is used
#pragma unroll
        for (int r = 0; r < WARP_ROWS; ++r) bits[r] = stored(r);
#pragma unroll
        for (int r = 0; r < WARP_ROWS; ++r) add(bits[r]);
    } else
#pragma unroll 1
        for (int r = 0; r < rows; ++r) add(stored(r));
}
