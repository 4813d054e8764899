// Forward passes of 1x1 convolutions by Hopper's instructions: what conv1x1_forward.cu, conv1x1_pair.cu,
// dgrad_stream.cu and norm_stream.cuh share.
//
// As dgrad_reduce.cu has it, with C and K exchanged: y[row, k] = sum over c of x[row, c] * w[k, c]. These layers are bound by
// memory, and so are the kernels laid out. A block keeps the weights of COLUMNS outputs in shared memory. Two teams of four
// multiplying warps, each with a warp that starts the copies of what they read, walk over tiles of 64 rows, independent of
// each other: the products of one overlap with what the other does with its own. A warp has 16 rows, and from the products on
// it is on its own: it adds what is to be added, 64 columns at a time, in shared memory, whence the copy engine takes them.
#pragma once
#include "addends.cuh"
#include "warpgroup.cuh"

constexpr int TEAMS = 2, TEAM_WARPS = 4, MMA_WARPS = TEAMS * TEAM_WARPS, THREADS = (MMA_WARPS + TEAMS) * WARP;
constexpr int WARP_ROWS = 16, ROWS = TEAM_WARPS * WARP_ROWS;  // of a tile
constexpr int CHUNK = 64;                                     // channels of a tile of warpgroup.cuh: 128 bytes
constexpr int CHUNK_VECTORS = CHUNK / VEC, TILE_VECTORS = ROWS * CHUNK_VECTORS, RESULT_VECTORS = WARP_ROWS * CHUNK_VECTORS;
constexpr int VECTOR_BYTES = 16;
constexpr int MAX_COLUMNS = 256, MAX_STAGES = 12, MAX_RESULTS = 8;

// At the start of shared memory. Behind it, in vectors: the weights, (chunks, COLUMNS * 8); `stages` tiles of each team's x;
// `results` parts of each multiplying warp's y.
struct alignas(1024) Control {
    float bias[MAX_COLUMNS];
    uint64 weights, full[TEAMS][MAX_STAGES], empty[TEAMS][MAX_STAGES], addend[MMA_WARPS][MAX_RESULTS];
};

// --- 16 rows of 64 channels in shared memory, and two 8-column products of a warp ---

// Where this thread's row of the four 8x8 matrices of 16 columns, the `pair`-th such, lies in a result.
__device__ inline int matrix_row(int lane, int pair) { return swizzled(lane % 16, pair * 2 + lane / 16); }

__device__ inline void ldmatrix_x4(uint32 (&m)[4], const uint4 *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(smem_address(at)) : "memory");
}
__device__ inline void stmatrix_x4(uint4 *at, const uint32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(smem_address(at)), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}

// Sums of 64 columns over a warp's 16 rows. `v[2 * j + k]` is of column 8 * j + lane % 4 * 2 + k over two rows; what is left in
// v[0] and v[1] is of columns lane * 2 and lane * 2 + 1 over all.
__device__ inline void sum_over_rows(float (&v)[16], int lane) {
    reduce_scatter<8, 16>(v, lane);
    reduce_scatter<4, 8>(v, lane);
    reduce_scatter<2, 4>(v, lane);
}

// --- the tiles of a team ---

// Where a team's tiles of x lie, 64 channels each, in places that are used in turn.
struct Stages { uint4 *tiles; uint64 *full, *empty; int chunks, number; };

// PEERS: blocks of a cluster, for all of which each starts a part of the copies.
template <int PEERS = 1> __device__ inline void init_barriers(Control &control, int stages, int results_added) {
    mbarrier_init(control.weights, 1);
    for (int t = 0; t < TEAMS; ++t)
        for (int s = 0; s < stages; ++s) {
            mbarrier_init(control.full[t][s], 1);
            mbarrier_init(control.empty[t][s], TEAM_WARPS * PEERS);
        }
    for (int i = 0; i < MMA_WARPS; ++i)
        for (int r = 0; r < results_added; ++r) mbarrier_init(control.addend[i][r], 1);
    fence_barrier_init();
}

// For one thread: starts the copies of `chunks` tiles of weights, (COLUMNS, 64) each.
template <int COLUMNS>
__device__ inline void load_weights(uint4 *to, const TensorMap &w, int chunks, int first_column, uint64 &barrier) {
    for (int c = 0; c < chunks; ++c) tma_load(to + c * COLUMNS * CHUNK_VECTORS, w, c * CHUNK, first_column, 0, barrier);
}

// For one thread: starts the copies of the team's tiles of x, as places for them become free. With TWO the last `chunks_2`
// are of x_2, whose rows are those of y. PEERS make other columns of the same rows, and start copies in turn, for all of them.
template <bool TWO = false, int PEERS = 1>
__device__ inline void load_tiles(const Stages &stages, const TensorMap &x, const TileRange &range, const TileStep &walk,
                                  const TensorMap *x_2 = nullptr, int chunks_2 = 0) {
    const int chunks_1 = stages.chunks - chunks_2, own = PEERS > 1 ? cluster_rank() : 0;
    PipelineState pipe, of_peers;
    for (uint32 tile = range.first; tile < range.end; tile += range.step)
        for (int c = 0; c < stages.chunks; ++c, pipe.advance(stages.number), of_peers.advance(PEERS)) {
            mbarrier_wait(stages.empty[pipe.index], pipe.phase ^ 1);  // at once in the first turn
            uint64 &full = stages.full[pipe.index];
            arrive_expect_tx(full, walk.rows * CHUNK_VECTORS * VECTOR_BYTES);
            if (of_peers.index != own) continue;
            uint4 *const to = stages.tiles + pipe.index * TILE_VECTORS;
            if (TWO && c >= chunks_1)
                tma_load_multicast<PEERS>(to, *x_2, (c - chunks_1) * CHUNK, tile * walk.y_row, tile * walk.y_line, full);
            else
                tma_load_multicast<PEERS>(to, x, c * CHUNK, tile * walk.x_row, tile * walk.x_line, full);
        }
}

using Addends = AddendsOf<CHUNK, RESULT_VECTORS>;

// --- what a warp does with a tile ---

// Of the warps that multiply.
constexpr NamedBarrier<1, MMA_WARPS * WARP> sync_mma_warps{};

// The bias, to which the products are added.
template <int N> __device__ inline void init_accumulators(float (&products)[N][4], const float *bias, int lane) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const float2 b = *reinterpret_cast<const float2 *>(&bias[j * 8 + lane % 4 * 2]);
        products[j][0] = products[j][2] = b.x;
        products[j][1] = products[j][3] = b.y;
    }
}

// A place for a tile of x is free, as far as this warp can tell.
template <int PEERS> __device__ inline void release(uint64 &empty, int lane) {
    if (PEERS == 1 && lane == 0) arrive(empty);
    if (PEERS > 1 && lane < PEERS) arrive_remote(lane, empty);
}

// products += x * w for the next tile of x. The rows of the weights' tiles are their columns, or k with ROWS_ARE_K.
template <class T, bool ROWS_ARE_K = false, int PEERS = 1, int N>
__device__ inline void multiply_tile(float (&products)[N][4], const uint4 *weights, const Stages &stages, PipelineState &pipe,
                                     int lane) {
    int before = 0;  // the place of the chunk before
    for (int c = 0; c < stages.chunks; ++c, pipe.advance(stages.number)) {
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

// 16 columns, which are two 8-column products: adds what lies there, applies ReLU, and leaves them there, rounded. `m` has
// them as the first operand of the next product.
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

// The 64 columns of part `p` of the products, likewise.
template <class T, bool ADD, bool RELU, int N>
__device__ inline void finish_part(const float (&products)[N][4], int p, uint4 *at, int lane) {
#pragma unroll
    for (int pair = 0; pair < CHUNK / 16; ++pair) {
        uint32 m[4];
        finish<T, ADD, RELU>(products[p * 8 + pair * 2], products[p * 8 + pair * 2 + 1], at + matrix_row(lane, pair), m);
    }
}

// Adds up to 16 rows of a result to the sums of a thread's two columns, 2 * lane and the next: of what differs from `near`,
// and of its square.
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
    const auto stored = [&](int r) { return words[r * WARP + (lane ^ r % 8 * 4)]; };  // where `swizzled` has it
    // Of 0 to 16 the only one with this bit. Compared with 16 instead, where the caller has cut `rows` at 0 and 16, ptxas (12.9
    // and 13.0) takes the flag of an instruction that cuts at both, which says something else: short tiles came here too.
    if (rows & WARP_ROWS) {
        uint32 bits[WARP_ROWS];  // all on their way before the first is needed
#pragma unroll
        for (int r = 0; r < WARP_ROWS; ++r) bits[r] = stored(r);
#pragma unroll
        for (int r = 0; r < WARP_ROWS; ++r) add(bits[r]);
    } else
#pragma unroll 1
        for (int r = 0; r < rows; ++r) add(stored(r));
}
