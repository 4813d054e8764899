// Backward from one BatchNorm through the 1x1 convolution before it to the BatchNorm before that, in one launch:
//
//     dx = BatchNorm backward of dz;  dw = dx^T * input;  out = dx * w, masked by the earlier ReLU, with its sums
//
// dx, the gradient between BatchNorm and convolution, stays in shared memory and is never stored. With 128 input
// channels, one block has too few registers for the gradient of all weights: so a cluster of two blocks splits the K
// output channels in halves.
#include "batch_norm.cuh"
#include "pipeline.cuh"

constexpr int OWN_COLUMNS = 64, CHUNK = 64, VECTOR_BYTES = 16;
constexpr int ROWS = 64, PIECES = 4, PIECE_ROWS = ROWS / PIECES;  // rows of a tile, and of a quarter of it
constexpr int GROUP_WARPS = 4, GROUP = GROUP_WARPS * WARP, GROUPS = 4, WEIGHT_WARPS = 2 * GROUP_WARPS, THREADS = GROUPS * GROUP;
constexpr int CHUNK_VECTORS = CHUNK / VEC, TILE_VECTORS = ROWS * CHUNK_VECTORS, PIECE_VECTORS = PIECE_ROWS * CHUNK_VECTORS;
constexpr int PIECE_BYTES = PIECE_VECTORS * VECTOR_BYTES;  // bytes of a piece: 16 rows of 64 channels
constexpr int WARP_ROWS = WARP / CHUNK_VECTORS;            // rows of a chunk that a warp processes at once
constexpr int X_SLOTS = 5;  // slots for pieces of x, for each warp that computes dx
constexpr int COPIERS = 2;  // threads that share the copies into a stage

// How the work is split. All blocks of a cluster walk over the same tiles of rows; each block has its own channels. A block
// has four warpgroups:
//   0     dgrad: out = dx * w. In a cluster each block finishes half of the columns. It sends its partial sums of the other
//         half to the other block while it multiplies its own half.
//   1     computes dx from dz and x. Each warp works alone on one chunk of 64 channels and every PARTS-th piece of 16 rows.
//   2, 3  wgrad: dw = dx^T * input, every second chunk each. They also apply BatchNorm + ReLU to the convolution's input of
//         the next tile. One thread of each warpgroup starts the TMA loads of every second piece, as soon as the stage is free.
template <int K_, int COLUMNS_> struct Shape {
    static constexpr int COLUMNS = COLUMNS_, COLUMN_CHUNKS = COLUMNS / CHUNK, BLOCKS = COLUMNS / OWN_COLUMNS;
    static constexpr int ALL_K = K_, K = ALL_K / BLOCKS, CHUNKS = K / CHUNK;
    static constexpr int PARTS = GROUP_WARPS / CHUNKS, CHUNKS_PER_GROUP = (CHUNKS + 1) / 2;
    static constexpr int STAGES = BLOCKS == 1 ? 3 : 2;
    static constexpr int IN_FLIGHT = BLOCKS == 1 ? 4 : 2;  // vectors of dz and of x that a thread loads before it uses them
    // rows that the wgrad warps normalise at a time
    static constexpr int INPUT_ROWS = WEIGHT_WARPS / COLUMN_CHUNKS * WARP_ROWS;
    // Registers per thread after setmaxnreg; the launch gives 128 to each.
    static constexpr int REGS_NORM = BLOCKS == 1 ? 120 : 80, REGS_DGRAD = 112, REGS_WGRAD = BLOCKS == 1 ? 136 : 160;
    static_assert(CHUNKS * PARTS == GROUP_WARPS && PIECES % PARTS == 0 && INPUT_ROWS % 8 == 0, "the work is split evenly");
    static_assert(REGS_NORM + REGS_DGRAD + 2 * REGS_WGRAD <= GROUPS * 128, "the registers of the block");
};

// Operands of one tile, in chunks of 64 channels; warpgroup.cuh has the layout.
template <class S> struct Stage {
    uint4 dz[S::CHUNKS][TILE_VECTORS];            // overwritten in place by dx
    // input of the convolution; with REDUCE loaded as x of the earlier BatchNorm, then overwritten
    uint4 input[S::COLUMN_CHUNKS][TILE_VECTORS];
};

template <class S> struct Shared {
    uint4 weights[S::CHUNKS][S::COLUMN_CHUNKS][TILE_VECTORS];
    Stage<S> stages[S::STAGES];
    uint4 x[GROUP_WARPS][X_SLOTS][PIECE_VECTORS];
    // partial sums from the other block; reused for the final sums
    float4 received[S::BLOCKS == 1 ? 1 : OWN_COLUMNS / 8][GROUP];
    float prev_mean[S::COLUMNS], prev_scale[S::COLUMNS], prev_shift[S::COLUMNS];  // of the earlier BatchNorm
    // full: a piece of dz and of the convolution's input has arrived. prepared: dx and the input of a tile are ready. empty:
    // all readers of the stage are done.
    uint64 full[S::STAGES][PIECES], prepared[S::STAGES], empty[S::STAGES];
    uint64 x_full[GROUP_WARPS][X_SLOTS];
    // arrived: `received` is filled. read: the other block has read what this block sent. Both barriers have one phase
    // per tile. No waiter can miss a phase: `arrived` of the next tile completes only after all warps of this block
    // have read `received`, and `read` of the next tile completes only after these warps have sent again.
    uint64 arrived, read;
};

// This block's weights (K, COLUMNS) in shared memory, with the block's own columns first. Each 32 columns are stored in
// the order of `load_weights` of dgrad_reduce.cu. All threads take part except the threads of warpgroup 1. The weights
// and the parameters of the earlier BatchNorm are requested before the first tiles; if the tiles are requested first,
// the weights arrive 4 microseconds later.
template <class T, class S> struct Weights {
    static constexpr int LOADING_THREADS = THREADS - GROUP, ROW = S::COLUMNS / VEC, ALL = S::K * ROW;
    uint4 own[(ALL + LOADING_THREADS - 1) / LOADING_THREADS];
    const int first = threadIdx.x < GROUP ? threadIdx.x : threadIdx.x - GROUP;

    __device__ explicit Weights(const Packed<T> *w) {
#pragma unroll
        for (int i = 0; i * LOADING_THREADS < ALL; ++i)
            if (first + i * LOADING_THREADS < ALL) own[i] = words(w[first + i * LOADING_THREADS]);
    }
    __device__ void store(Shared<S> &shared) const {
#pragma unroll
        for (int i = 0; i * LOADING_THREADS < ALL; ++i) {
            const int at = first + i * LOADING_THREADS, k = at / ROW, vector = at % ROW;
            if (at >= ALL) break;
            uint4 *const tile = shared.weights[k / CHUNK][vector / CHUNK_VECTORS ^ blockIdx.x];
            const uint32 pairs[4] = {own[i].x, own[i].y, own[i].z, own[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                reinterpret_cast<uint32 *>(tile + swizzled(k % CHUNK, vector % CHUNK_VECTORS / 4 * 4 + j))[vector % 4] = pairs[j];
        }
    }
};

// Reduces 8 columns over the 8 rows of a warp, which are 4 lanes apart. Returns the sum of this lane's column, `own_column`.
__device__ inline float sum_over_rows(float (&v)[VEC], int lane) {
    reduce_scatter<4, 4>(v, lane);
    reduce_scatter<2, 8>(v, lane);
    reduce_scatter<1, 16>(v, lane);
    return v[0];
}
__device__ inline int own_column(int lane) { return lane / 4 % 2 * 4 + lane / 8 % 2 * 2 + lane / 16; }

// Barrier of the dgrad warpgroup alone, for the end of the kernel, when the other warpgroups are done.
constexpr NamedBarrier<2, GROUP> sync_group{};

// The work of a block, and the place of a thread in its block.
struct Work {
    uint32 rows, tiles, rank, first_channel;  // rank: in the cluster; first_channel: first of the block's output channels
    int lane, warp, warp_m;                   // warp_m: number of the warp in its warpgroup

    __device__ Work(uint32 rows, int channels)
        : rows(rows), tiles((rows + ROWS - 1) / ROWS), rank(blockIdx.x), first_channel(rank * channels), lane(lane_index()),
          warp(warp_index()), warp_m(warp % GROUP_WARPS) {}
};

// A BatchNorm: what its forward pass saved, its parameters and their gradients. The gradients of the later BatchNorm
// are read, the gradients of the earlier BatchNorm are written. Without ReLU, beta is null.
template <class Gradient> struct NormOf {
    const float *saved, *gamma, *beta;
    Gradient *dgamma, *dbeta;
};
using LaterNorm = NormOf<const float>;
using EarlierNorm = NormOf<float>;

// Stochastic depth of the later BatchNorm: the arguments of `drop_factor`.
struct Drop { const float *factors; uint32 first_factor, pixels; };

template <class S, bool REDUCE> __device__ inline void init_barriers(Shared<S> &shared) {
    for (int s = 0; s < S::STAGES; ++s) {
        for (int piece = 0; piece < PIECES; ++piece) mbarrier_init(shared.full[s][piece], 1);
        mbarrier_init(shared.prepared[s], GROUP_WARPS + (REDUCE ? WEIGHT_WARPS : 0));
        mbarrier_init(shared.empty[s], (GROUPS - 1) * GROUP_WARPS);
    }
    for (int i = 0; i < GROUP_WARPS; ++i)
        for (int slot = 0; slot < X_SLOTS; ++slot) mbarrier_init(shared.x_full[i][slot], 1);
    mbarrier_init(shared.arrived, 1);
    mbarrier_init(shared.read, GROUP_WARPS);
    fence_barrier_init();
}

// --- producer ---

// Called by one warp of warpgroup 2 and one of warpgroup 3, which run on different schedulers. Starts the loads of every
// second piece of a tile, from piece `part` on. TMA fills rows past the end with zeros.
template <class S>
__device__ inline void load_pieces(Shared<S> &shared, const TensorMap &dz, const TensorMap &prev, uint32 first_channel,
                                   int part, uint32 tile, int slot) {
    if (!elect_one()) return;
    Stage<S> &stage = shared.stages[slot];
#pragma unroll
    for (int i = 0; i < PIECES / COPIERS; ++i) {
        const int piece = i * COPIERS + part, row = tile * ROWS + piece * PIECE_ROWS, at = piece * PIECE_VECTORS;
        uint64 &full = shared.full[slot][piece];
        arrive_expect_tx(full, (S::CHUNKS + S::COLUMN_CHUNKS) * PIECE_BYTES);
#pragma unroll
        for (int c = 0; c < S::CHUNKS; ++c) tma_load(stage.dz[c] + at, dz, first_channel + c * CHUNK, row, 0, full);
#pragma unroll
        for (int c = 0; c < S::COLUMN_CHUNKS; ++c)
            tma_load(stage.input[c] + at, prev, c * CHUNK, row, 0, full);
    }
}

// --- warpgroup 1 ---

// Overwrites dz by dx, piece by piece, and loads the x that this needs.
template <class T, class S, bool RELU, bool DROP>
__device__ inline void compute_dx(Shared<S> &shared, const TensorMap &x, const LaterNorm &norm, const Drop &drop,
                                  const Work &work) {
    const int warp_m = work.warp_m, chunk = warp_m % S::CHUNKS, part = warp_m / S::CHUNKS;
    const int own_row = work.lane / 8, vector = work.lane % 8, channel = work.first_channel + chunk * CHUNK + vector * VEC;
    // Starts the load of the warp's n-th piece of x.
    const auto load_x = [&](int n) {
        const uint32 tile = blockIdx.y + n / S::CHUNKS * gridDim.y;
        if (tile >= work.tiles) return;
        uint64 &full = shared.x_full[warp_m][n % X_SLOTS];
        arrive_expect_tx(full, PIECE_BYTES);
        tma_load(shared.x[warp_m][n % X_SLOTS], x, work.first_channel + chunk * CHUNK,
                 tile * ROWS + (n % S::CHUNKS * S::PARTS + part) * PIECE_ROWS, 0, full);
    };
    const Backward of(norm.saved, norm.gamma, RELU ? norm.beta : nullptr, channel, S::ALL_K);
    const InputGradient to(of, norm.dgamma, norm.dbeta, work.rows, channel);
    if (elect_one())
        for (int n = 0; n < X_SLOTS; ++n) load_x(n);
    // This thread's vectors in each group of 8 rows: two, 4 rows apart.
    const int own_at[2] = {swizzled(own_row, vector), swizzled(own_row + 4, vector)};
    PipelineState pipe, x_pipe;
    int next = X_SLOTS;
    for (uint32 tile = blockIdx.y; tile < work.tiles; tile += gridDim.y, pipe.advance(S::STAGES)) {
        Stage<S> &stage = shared.stages[pipe.index];
        for (int piece = 0; piece < PIECES; ++piece) {
            mbarrier_wait(shared.full[pipe.index][piece], pipe.phase);
            if (piece % S::PARTS != part) continue;
            mbarrier_wait(shared.x_full[warp_m][x_pipe.index], x_pipe.phase);
            uint4 *const dz_piece = stage.dz[chunk] + piece * PIECE_VECTORS;
            const uint4 *const x_piece = shared.x[warp_m][x_pipe.index];
#pragma unroll
            for (int first = 0; first < PIECE_ROWS / WARP_ROWS; first += S::IN_FLIGHT) {
                uint4 own_dz[S::IN_FLIGHT], own_x[S::IN_FLIGHT];
                const auto at = [&](int i) { return own_at[i % 2] + (first + i) / 2 * 8 * CHUNK_VECTORS; };
#pragma unroll
                for (int i = 0; i < S::IN_FLIGHT; ++i) {
                    own_dz[i] = dz_piece[at(i)];
                    own_x[i] = x_piece[at(i)];
                }
#pragma unroll
                for (int i = 0; i < S::IN_FLIGHT; ++i) {
                    float g[VEC], v[VEC];
                    unpack(packed<T>(own_dz[i]), g);
                    unpack(packed<T>(own_x[i]), v);
                    const uint32 row = tile * ROWS + piece * PIECE_ROWS + (first + i) * WARP_ROWS + own_row;
                    const uint32 read = row < work.rows ? row : 0;
                    const float factor = DROP ? drop_factor(read, drop.factors, drop.first_factor, drop.pixels) : 1;
#pragma unroll
                    for (int k = 0; k < VEC; ++k) {
                        if (RELU && !(v[k] * of.scale[k] + of.shift[k] > 0)) g[k] = 0;
                        if (DROP) g[k] *= factor;
                        v[k] = to.of(k, of.scale[k], g[k], v[k]);
                    }
                    dz_piece[at(i)] = row < work.rows ? words(pack<T>(v)) : uint4{};
                }
            }
            __syncwarp();
            if (elect_one()) load_x(next);
            ++next;
            x_pipe.advance(X_SLOTS);
        }
        fence_view_async_shared();
        __syncwarp();
        if (work.lane == 0) arrive(shared.prepared[pipe.index]);
    }
}

// --- warpgroups 2 and 3 ---

// Applies the earlier BatchNorm + ReLU to a warp's rows of the input in a stage.
template <class T, class S>
__device__ inline void prepare_input(Shared<S> &shared, const PipelineState &pipe, int own, int lane) {
    const int input_chunk = own % S::COLUMN_CHUNKS, first_row = own / S::COLUMN_CHUNKS * WARP_ROWS;
    uint4 *const input = shared.stages[pipe.index].input[input_chunk] + swizzled(first_row + lane / 8, lane % 8);
    const int column = input_chunk * CHUNK + lane % 8 * VEC;
#pragma unroll
    for (int row = 0; row < ROWS; row += S::INPUT_ROWS) {
        mbarrier_wait(shared.full[pipe.index][(row + first_row) / PIECE_ROWS], pipe.phase);
        uint4 &at = input[row * CHUNK_VECTORS];
        float scale[VEC], shift[VEC];
        load_floats(shared.prev_scale + column, scale);
        load_floats(shared.prev_shift + column, shift);
        at = norm_relu<T>(at, scale, shift);
    }
    fence_view_async_shared();
    __syncwarp();
    if (lane == 0) arrive(shared.prepared[pipe.index]);
}

// dw = dx^T * input, left in `dw_parts`. Prepares the input of the next tile, and with `copies` also loads tiles.
template <class T, class S, bool REDUCE>
__device__ inline void compute_wgrad(Shared<S> &shared, const TensorMap &dz, const TensorMap &prev, float *dw_parts, int part,
                                     bool copies, const Work &work) {
    const int lane = work.lane, warp_m = work.warp_m, own = work.warp - 2 * GROUP_WARPS;
    const auto prepare = [&](uint32 tile, const PipelineState &pipe) {
        if (REDUCE && tile < work.tiles) prepare_input<T>(shared, pipe, own, lane);
    };
    PipelineState pipe, next_pipe;
    prepare(blockIdx.y, next_pipe);
    float dw[S::CHUNKS_PER_GROUP][S::COLUMNS / 8][4] = {};
    for (uint32 tile = blockIdx.y; tile < work.tiles; tile += gridDim.y, pipe.advance(S::STAGES)) {
        const Stage<S> &stage = shared.stages[pipe.index];
        mbarrier_wait(shared.prepared[pipe.index], pipe.phase);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < ROWS / 16; ++s)
#pragma unroll
            for (int m = 0; m < S::CHUNKS_PER_GROUP; ++m)
                wgmma_mn_mn(dw[m], smem_desc(stage.dz[(part + m * 2) % S::CHUNKS] + s * 16 * CHUNK_VECTORS),
                            smem_desc_mn(stage.input[0] + s * 16 * CHUNK_VECTORS), T{});
        wgmma_commit();
        wgmma_wait();
        if (lane == 0) arrive(shared.empty[pipe.index]);
        if (copies && tile + S::STAGES * gridDim.y < work.tiles) {
            mbarrier_wait(shared.empty[pipe.index], pipe.phase);
            load_pieces(shared, dz, prev, work.first_channel, part, tile + S::STAGES * gridDim.y, pipe.index);
        }
        __syncwarp();
        next_pipe.advance(S::STAGES);
        prepare(tile + gridDim.y, next_pipe);
    }
#pragma unroll
    for (int m = 0; m < S::CHUNKS_PER_GROUP; ++m) {
        const int k = (part + m * 2) * CHUNK + warp_m * 16 + lane / 4;
        float *const to = dw_parts + (size_t(blockIdx.y) * S::ALL_K + work.first_channel + k) * S::COLUMNS + lane % 4 * 2;
        if (k >= S::K) continue;
#pragma unroll
        for (int n = 0; n < S::COLUMNS / 8; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                *reinterpret_cast<float2 *>(to + r * 8 * S::COLUMNS + n * 8) = float2{dw[m][n][r * 2], dw[m][n][r * 2 + 1]};
    }
}

// --- warpgroup 0 ---

// out = dx * w, with REDUCE masked by the earlier ReLU, and the sums of that BatchNorm's backward pass.
template <class T, class S, bool REDUCE>
__device__ inline void compute_dgrad(Shared<S> &shared, const Packed<T> *prev, Packed<T> *out, const EarlierNorm &norm,
                                     float *partials, uint32 *tickets, const Work &work) {
    constexpr int QUARTERS = OWN_COLUMNS / 32;  // groups of 32 columns; a thread has 8 columns of each, in two rows
    constexpr int STEPS = S::K / 16, PRODUCTS = OWN_COLUMNS / 8;  // k-steps of a GEMM, and its 8-column accumulator tiles
    const int lane = work.lane, warp_m = work.warp_m, thread = threadIdx.x, column = work.rank * OWN_COLUMNS + lane % 4 * VEC;
    constexpr bool EXCHANGES = S::BLOCKS == 2;
    const uint32 other = EXCHANGES ? work.rank ^ 1 : 0, there = cluster_address(&shared.received[0][thread], other);
    const uint32 arrived_there = cluster_address(&shared.arrived, other), read_there = cluster_address(&shared.read, other);
    const uint64 own_weights = smem_desc(shared.weights[0][0]);
    const uint64 others_weights = smem_desc(shared.weights[0][S::COLUMN_CHUNKS - 1]);
    // Computes one GEMM. Descriptors are computed by addition: with a call of `smem_desc` for each descriptor, the
    // compiler keeps 16 descriptors in registers and runs out of registers.
    const auto multiply = [](float (&products)[PRODUCTS][4], uint64 tile, uint64 weights) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
            wgmma_k_mn(products, tile + (s / 4 * TILE_VECTORS + s % 4 * 2),
                       weights + (s / 4 * S::COLUMN_CHUNKS * TILE_VECTORS + s % 4 * 16 * CHUNK_VECTORS), T{});
        wgmma_commit();
    };
    PipelineState pipe;
    float sums[2][QUARTERS] = {};  // this thread's sums of one column per quarter
    uint32 parity = 0;
    for (uint32 tile = blockIdx.y; tile < work.tiles; tile += gridDim.y, pipe.advance(S::STAGES), parity ^= 1) {
        const Stage<S> &stage = shared.stages[pipe.index];
        float own[PRODUCTS][4] = {}, others[PRODUCTS][4] = {};
        const uint64 of_dz = smem_desc(stage.dz[0]);
        if (EXCHANGES && thread == 0) arrive_expect_tx(shared.arrived, sizeof(shared.received));
        mbarrier_wait(shared.prepared[pipe.index], pipe.phase);
        // keeps the compiler from touching `own` between the two GEMMs, because the second GEMM would wait for that
        wgmma_fence_operand(own);
        wgmma_fence();
        if (EXCHANGES) multiply(others, of_dz, others_weights);
        multiply(own, of_dz, own_weights);

        const uint32 first_row = tile * ROWS + warp_m * 16 + lane / 4;
        Packed<T> read[QUARTERS][2];
        if (REDUCE)
#pragma unroll
            for (int q = 0; q < QUARTERS; ++q)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const uint32 row = first_row + r * 8;
                    read[q][r] = prev[(row < work.rows ? row * (S::COLUMNS / VEC) : 0) + (column + q * 32) / VEC];
                }
        if (EXCHANGES) {  // sends the other block's half while this block's own half is multiplied
            wgmma_wait<1>();
            wgmma_fence_operand(others);
            mbarrier_wait(shared.read, parity ^ 1);  // the first tile does not wait
#pragma unroll
            for (int j = 0; j < PRODUCTS; ++j)
                st_async(there + j * GROUP * VECTOR_BYTES, others[j], arrived_there);
        }
        wgmma_wait();
        wgmma_fence_operand(own);
        if (lane == 0) arrive(shared.empty[pipe.index]);
        if constexpr (EXCHANGES) {
            mbarrier_wait(shared.arrived, parity);
#pragma unroll
            for (int j = 0; j < PRODUCTS; ++j) {
                const float4 more = shared.received[j][thread];
                own[j][0] += more.x;
                own[j][1] += more.y;
                own[j][2] += more.z;
                own[j][3] += more.w;
            }
            wgmma_fence_operand(own);
            __syncwarp();
            if (lane == 0) arrive_remote(read_there);
        }
#pragma unroll
        for (int q = 0; q < QUARTERS; ++q) {
            const int c = column + q * 32;
            float mean[VEC], scale[VEC], shift[VEC];
            if (REDUCE) {
                load_floats(shared.prev_mean + c, mean);
                load_floats(shared.prev_scale + c, scale);
                load_floats(shared.prev_shift + c, shift);
            }
            float of_rows[2][VEC];  // sums over this thread's two rows
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32 row = first_row + r * 8;
                float g[VEC], v[VEC];
#pragma unroll
                for (int k = 0; k < VEC; ++k) g[k] = own[q * 4 + k / 2][r * 2 + k % 2];
                if (REDUCE) {
                    unpack(read[q][r], v);
#pragma unroll
                    for (int k = 0; k < VEC; ++k) {
                        if (!(v[k] * scale[k] + shift[k] > 0)) g[k] = 0;
                        const float term = g[k] * (v[k] - mean[k]);  // g is 0 in rows past the end
                        of_rows[0][k] = r == 0 ? g[k] : of_rows[0][k] + g[k];
                        of_rows[1][k] = r == 0 ? term : of_rows[1][k] + term;
                    }
                }
                if (row < work.rows) out[row * (S::COLUMNS / VEC) + c / VEC] = pack<T>(g);
            }
            if (REDUCE)
#pragma unroll
                for (int j = 0; j < 2; ++j) sums[j][q] += sum_over_rows(of_rows[j], lane);
        }
    }
    if (REDUCE) {
        sync_group();  // `received` can be reused from here on: the other block's data for the last tile has arrived
        float *const of_warp = reinterpret_cast<float *>(shared.received) + warp_m * 2 * OWN_COLUMNS;
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int q = 0; q < QUARTERS; ++q) of_warp[j * OWN_COLUMNS + q * 32 + lane % 4 * VEC + own_column(lane)] = sums[j][q];
        reduce_parts<GROUP, GROUP_WARPS, 2, OWN_COLUMNS>(
            reinterpret_cast<float *>(shared.received), partials, tickets, S::COLUMNS,
            ParameterGradients{norm.saved, norm.dgamma, norm.dbeta, S::COLUMNS}, sync_group);
    }
}

// dx = scale * dz + b * x + c per channel of the later BatchNorm. With RELU, dz is masked where x * scale + shift <= 0. With
// DROP, dz is multiplied by the image's stochastic-depth factor.
// With REDUCE, the convolution's input is relu(BatchNorm(prev)). `out` is then the gradient of that BatchNorm's output,
// masked by the ReLU, and the kernel also computes the sums of batch_norm_backward_reduce. Without REDUCE, `prev` is the
// convolution's input, and `out` is its gradient.
// The gradient of the weights (K, C), in OHWI, is left in gridDim.y parts for `sum_parts`.
// The tensor maps have tiles of 16 rows and 64 columns. gridDim.x is the cluster; gridDim.y clusters share the rows.
// Shapes: dz, x (rows, K); saved (2, K), gamma, beta, dgamma, dbeta (K) fp32; w (K, C) with C = COLUMNS; prev, out (rows, C);
// prev_saved (2, C), prev_gamma, prev_beta, prev_dgamma, prev_dbeta (C), dw_parts (gridDim.y, K, C), partials (gridDim.y, 2,
// C), factors fp32; tickets (gridDim.x).
template <class T, int K, int COLUMNS, bool RELU, bool REDUCE, bool DROP>
__global__ void __cluster_dims__(COLUMNS / OWN_COLUMNS, 1, 1) __launch_bounds__(THREADS, 1)
norm_backward(const __grid_constant__ TensorMap dz, const __grid_constant__ TensorMap x,
              const __grid_constant__ TensorMap prev_tiles, const float *saved, const float *gamma,
              const float *beta, const float *dgamma, const float *dbeta, const Packed<T> *w,
              const Packed<T> *prev, Packed<T> *out, const float *prev_saved, const float *prev_gamma,
              const float *prev_beta, float *prev_dgamma, float *prev_dbeta, float *dw_parts, float *partials,
              uint32 *tickets, uint32 rows, const float *factors, uint32 first_factor, uint32 pixels) {
    using S = Shape<K, COLUMNS>;
    extern __shared__ __align__(1024) uint4 memory[];
    Shared<S> &shared = *reinterpret_cast<Shared<S> *>(memory);
    const Work work(rows, S::K);
    const int group = work.warp / GROUP_WARPS;

    if (threadIdx.x == 0) init_barriers<S, REDUCE>(shared);
    cluster_sync();

    if (group == 1) {
        setmaxnreg_dec<S::REGS_NORM>();
        compute_dx<T, S, RELU, DROP>(shared, x, {saved, gamma, beta, dgamma, dbeta}, {factors, first_factor, pixels}, work);
        cluster_sync();
        return;
    }

    const EarlierNorm earlier{prev_saved, prev_gamma, prev_beta, prev_dgamma, prev_dbeta};
    const int part = group - 2;
    const bool copies = group > 1 && work.warp_m == part;
    if (REDUCE && threadIdx.x < COLUMNS / VEC) {
        const int c = threadIdx.x * VEC;
        Backward(earlier.saved, earlier.gamma, earlier.beta, c, COLUMNS)
            .store(shared.prev_mean + c, shared.prev_scale + c, shared.prev_shift + c);
    }
    const Weights<T, S> weights(w + size_t(work.first_channel) * (COLUMNS / VEC));
    if (copies)
        for (uint32 s = 0, tile = blockIdx.y; s < S::STAGES && tile < work.tiles; ++s, tile += gridDim.y)
            load_pieces(shared, dz, prev_tiles, work.first_channel, part, tile, s);
    weights.store(shared);
    fence_view_async_shared();
    asm volatile("barrier.sync 1, %0;" :: "n"(THREADS - GROUP) : "memory");

    if (group > 1) {
        setmaxnreg_inc<S::REGS_WGRAD>();
        compute_wgrad<T, S, REDUCE>(shared, dz, prev_tiles, dw_parts, part, copies, work);
        cluster_sync();
        return;
    }
    setmaxnreg_dec<S::REGS_DGRAD>();
    compute_dgrad<T, S, REDUCE>(shared, prev, out, earlier, partials, tickets, work);
    cluster_sync();  // the other block may still signal `read` until here
}

// sum[i] = sum over `parts` of part[i], always in the same order. Each sum of 8 neighbouring elements is shared by 16
// threads, each with IN_FLIGHT parts in flight.
// Shapes: parts (num_parts, K, C) fp32, sum (K, C). vectors = K * C / 8.
template <class T>
__global__ void __launch_bounds__(256, 1)  // one block per SM: more registers for each thread
sum_parts(const float *parts, Packed<T> *sum, int num_parts, uint32 vectors) {
    constexpr int GROUPS = 16, IN_FLIGHT = 9;  // an H200 has 132 parts
    const uint32 i = (blockIdx.x * blockDim.x + threadIdx.x) / GROUPS;
    float total[VEC] = {};
    for (int next = threadIdx.x % GROUPS; i < vectors && next < num_parts; next += IN_FLIGHT * GROUPS) {
        float v[IN_FLIGHT][VEC] = {};
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; ++j) {
            const int part = next + j * GROUPS;
            if (part < num_parts) load_floats(parts + (size_t(part) * vectors + i) * VEC, v[j]);
        }
#pragma unroll
        for (int j = 0; j < IN_FLIGHT; ++j)
#pragma unroll
            for (int k = 0; k < VEC; ++k) total[k] += v[j][k];
    }
#pragma unroll
    for (int k = 0; k < VEC; ++k)
#pragma unroll
        for (int distance = 1; distance < GROUPS; distance *= 2) total[k] += __shfl_xor_sync(0xffffffff, total[k], distance);
    if (i < vectors && threadIdx.x % GROUPS == 0) sum[i] = pack<T>(total);
}
