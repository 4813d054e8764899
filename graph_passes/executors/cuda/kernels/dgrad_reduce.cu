// The gradient of a 1x1 convolution's input, with the sums of the BatchNorm backward pass that reads it, on tensor cores:
//
//     dx[row, c] = sum over k of dy[row, k] * w[k, c]          rows = N*H*W, k < K, c < C, `columns` = C
//
// These layers are bound by memory: bytes in flight matter, not peak TFLOP/s. A block keeps its part of the weights in shared
// memory and walks over tiles of rows, while the next tiles are being loaded.
#include "batch_norm.cuh"
#include "warpgroup.cuh"

// A thread's 8 columns of one row, from four 8-column accumulator tiles. `high` selects the row 8 further down.
__device__ inline void columns_of(const float (*products)[4], bool high, float (&v)[VEC]) {
#pragma unroll
    for (int k = 0; k < VEC; ++k) v[k] = products[k / 2][(high ? 2 : 0) + k % 2];
}

// Loads COLUMNS columns of the weights (K, C), from column `first` on, into a K-major operand. Columns are permuted so that a
// thread's 8 accumulators of one row are neighbouring columns. Among 32 columns, accumulators 2t and 2t + 1 of tile j, which
// thread t of a quad has, are columns 8t + 2j and 8t + 2j + 1.
template <class T, int K, int COLUMNS>
__device__ inline void load_weights(uint4 (&weights)[K / 64][COLUMNS * 8], const T *w, int first, int columns) {
    for (int i = threadIdx.x; i < K / VEC * COLUMNS; i += blockDim.x) {
        const int c = i % COLUMNS, vector = i / COLUMNS, n = first + c / 32 * 32 + c % 8 / 2 * 8 + c % 32 / 8 * 2 + c % 2;
        Packed<T> v{};
        if (n < columns)
#pragma unroll
            for (int j = 0; j < VEC; ++j) v.element[j] = w[size_t(vector * VEC + j) * columns + n];
        weights[vector / 8][swizzled(c, vector % 8)] = words(v);
    }
}

// Adds up N sums per column over a block's warps and then over all blocks of the same columns, like `reduce_parts`;
// `shared` is the `of_part` of `reduce_parts`. Each warp has OWN * 32 of the COLUMNS columns, from `column` on, in one
// of PARTS parts of the block's rows.
template <int THREADS, int PARTS, int COLUMNS, int OWN, int N, class Finish>
__device__ void reduce_columns(float (&sums)[OWN][N][VEC], int part, int column, float *shared, float *partials,
                               uint32 *tickets, int columns, Finish finish) {
    const int lane = threadIdx.x % WARP;
    __syncthreads();  // reuses the memory of the weights
#pragma unroll
    for (int q = 0; q < OWN; ++q)
#pragma unroll
        for (int j = 0; j < N; ++j) {
#pragma unroll
            for (int k = 0; k < VEC; ++k)
#pragma unroll
                for (int distance = 4; distance < WARP; distance *= 2)
                    sums[q][j][k] += __shfl_xor_sync(0xffffffff, sums[q][j][k], distance);
            float *const to = shared + (part * N + j) * COLUMNS + column + q * 32 + lane * VEC;
            if (lane < 4) store_floats(to, sums[q][j]);
        }
    reduce_parts<THREADS, PARTS, N, COLUMNS>(shared, partials, tickets, columns, finish);
}

// A block works on 128 columns and walks over tiles of 64 rows. It has four warpgroups, in one team or in two. Teams
// have their own tiles and do not wait for each other: one team can multiply while the other finishes its tile. A team
// has STAGES slots: one slot for the current tile, the other slots for tiles being loaded. A warpgroup computes
// QUARTERS * 32 of the columns.
template <int K_, bool ADD_, bool PAIR_> struct Shape {
    static constexpr int K = K_, ADD = ADD_, PAIR = PAIR_, COLUMNS = 128, ROWS = 64, WARPS_M = 4;
    // The numbers that fit into shared memory: two stages for each of two teams, or two or three stages for one team.
    // Four stages for K = 64 were no faster on an H200.
    static constexpr int TEAMS = K == 128 && !PAIR ? 2 : 1, STAGES = TEAMS == 1 && K <= 128 ? 3 : 2;
    static constexpr int WARPS_N = 4 / TEAMS, QUARTERS = TEAMS, TEAM_THREADS = WARPS_M * WARPS_N * WARP;
    static constexpr int CHUNKS = K / 64, COLUMN_CHUNKS = COLUMNS / 64, THREADS = TEAMS * TEAM_THREADS;
    static constexpr int ROWS_AT_ONCE = TEAM_THREADS / 8;  // rows of a chunk that a team copies at once
    static_assert(ROWS % ROWS_AT_ONCE == 0 && ROWS_AT_ONCE % 8 == 0, "a thread's rows have equal swizzles");
};

// Operands of one tile, in chunks of 64 channels; warpgroup.cuh has the layout.
template <class S> struct Stage {
    uint4 dy[S::CHUNKS][S::ROWS * 8];
    uint4 inputs[1 + S::ADD + S::PAIR][S::COLUMN_CHUNKS][S::ROWS * 8];  // x, addend, x_2
};

template <class S> struct Shared {
    uint4 weights[S::CHUNKS][S::COLUMNS * 8];
    Stage<S> stages[S::TEAMS][S::STAGES];
};

// dz = dy * w, plus `addend` unless SECOND is NONE, masked by ReLU's bits in `mask`. Also computes the sums of
// batch_norm_backward_reduce, or with PAIR of batch_norm_pair_backward_reduce. DROP has the same meaning as in these
// kernels. The weights are (K, C), which is OHWI.
// Shapes: dy (rows, K); w (K, C); x, x_2, dz (rows, C); addend (rows, C) or (rows of the grid, C); mask (rows, C / 8)
// bytes; saved (2, C), dgamma, dbeta (C) fp32, likewise the operands with _2; partials (gridDim.y, 2 + PAIR, or 4 with
// PAIR and DROP, C), factors fp32; tickets (gridDim.x). columns = C.
template <class T, int K, SecondGradient SECOND, bool PAIR, bool DROP>
__global__ void __launch_bounds__(Shape<K, SECOND != NONE, PAIR>::THREADS, 1)
dgrad_reduce(const Packed<T> *dy, const T *w, const Packed<T> *x, const Packed<T> *x_2, const Packed<T> *addend,
             const uint8 *mask, Packed<T> *dz, const float *saved, const float *saved_2, float *dgamma, float *dgamma_2,
             float *dbeta, float *dbeta_2, float *partials, uint32 *tickets, uint32 rows, int columns,
             const float *factors, uint32 first_factor, uint32 pixels, Grid grid) {
    constexpr bool ADD = SECOND != NONE;
    using S = Shape<K, ADD, PAIR>;
    constexpr int SUMS = 2 + PAIR + (PAIR && DROP), GAMMA_2 = PAIR ? 2 : 0, BETA_2 = DROP ? SUMS - 1 : 0;
    constexpr int STAGES = S::STAGES;
    extern __shared__ __align__(1024) uint4 memory[];
    Shared<S> &shared = *reinterpret_cast<Shared<S> *>(memory);
    const int lane = lane_index(), warp = warp_index();
    const int warp_m = warp % S::WARPS_M, group = warp / S::WARPS_M, team = group / S::WARPS_N;
    const int quarter = group % S::WARPS_N * S::QUARTERS;  // first quarter of this warpgroup
    const uint32 pitch = columns / VEC, tiles = (rows + S::ROWS - 1) / S::ROWS;
    const uint32 first_tile = blockIdx.y * S::TEAMS + team, step = gridDim.y * S::TEAMS;
    const int first_column = blockIdx.x * S::COLUMNS;
    Stage<S> *const stages = shared.stages[team];

    // A thread copies one vector of some rows of each chunk. It computes 8 columns of two rows in each of its quarters.
    const int in_team = threadIdx.x % S::TEAM_THREADS, copied_vector = in_team % 8;
    const auto column_of = [&](int q) { return first_column + (quarter + q) * 32 + lane % 4 * VEC; };

    const auto copy_tile = [&](uint32 tile, Stage<S> &stage) {
#pragma unroll
        for (int copied_row = in_team / 8; tile < tiles && copied_row < S::ROWS; copied_row += S::ROWS_AT_ONCE) {
            const int copied = swizzled(copied_row, copied_vector);
            const uint32 row = tile * S::ROWS + copied_row;
#pragma unroll
            for (int c = 0; c < S::CHUNKS; ++c)
                cp_async_zfill(&stage.dy[c][copied], dy + (row < rows ? row * (K / VEC) + c * 8 + copied_vector : 0), row < rows);
            const uint32 added_row = SECOND == COMPACT ? grid.row_of(row) : NOWHERE;
#pragma unroll
            for (int c = 0; c < S::COLUMN_CHUNKS; ++c) {
                const int at_column = first_column + c * 64 + copied_vector * VEC;
                const bool there = row < rows && at_column < columns;
                const uint32 at = there ? row * pitch + at_column / VEC : 0;
                cp_async_zfill(&stage.inputs[0][c][copied], x + at, there);
                if (SECOND == WHOLE) cp_async_zfill(&stage.inputs[S::ADD][c][copied], addend + at, there);
                if (SECOND == COMPACT) {
                    const bool added = there && added_row != NOWHERE;
                    cp_async_zfill(&stage.inputs[S::ADD][c][copied],
                                   addend + (added ? added_row * pitch + at_column / VEC : 0), added);
                }
                if (PAIR) cp_async_zfill(&stage.inputs[S::ADD + S::PAIR][c][copied], x_2 + at, there);
            }
        }
        cp_async_commit();
    };
    uint32 bits[S::QUARTERS][2];
    const auto load_bits = [&](uint32 tile) {
#pragma unroll
        for (int q = 0; q < S::QUARTERS; ++q)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32 row = tile * S::ROWS + warp_m * 16 + r * 8 + lane / 4;
                bits[q][r] = row < rows && column_of(q) < columns ? mask[row * pitch + column_of(q) / VEC] : 0;
            }
    };

#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) copy_tile(first_tile + s * step, stages[s]);
    load_bits(first_tile);
    load_weights<T, K, S::COLUMNS>(shared.weights, w, first_column, columns);
    float mean[S::QUARTERS][VEC] = {}, mean_2[S::QUARTERS][VEC] = {};
#pragma unroll
    for (int q = 0; q < S::QUARTERS; ++q)
        if (column_of(q) < columns) {
            load_floats(saved + column_of(q), mean[q]);
            if (PAIR) load_floats(saved_2 + column_of(q), mean_2[q]);
        }
    fence_view_async_shared();
    __syncthreads();  // the weights are in place

    float sums[S::QUARTERS][SUMS][VEC] = {};
    int now = 0;
    for (uint32 tile = first_tile; tile < tiles; tile += step, now = (now + 1) % STAGES) {
        const Stage<S> &stage = stages[now];
        cp_async_wait<STAGES - 2>();
        fence_view_async_shared();
        team_sync<S::TEAM_THREADS>(team);  // the tile has arrived, and the team has finished the previous one
        copy_tile(tile + (STAGES - 1) * step, stages[(now + STAGES - 1) % STAGES]);

        float products[S::QUARTERS * 4][4] = {};
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < K / 16; ++s)
            wgmma_k_k(products, smem_desc(stage.dy[s / 4] + s % 4 * 2),
                      smem_desc(shared.weights[s / 4] + quarter * 32 * 8 + s % 4 * 2), T{});
        wgmma_commit();
        wgmma_wait();
        wgmma_fence_operand(products);
#pragma unroll
        for (int q = 0; q < S::QUARTERS; ++q)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int in_tile = warp_m * 16 + r * 8 + lane / 4, column = column_of(q);
                const int chunk = (quarter + q) / 2, at = swizzled(in_tile, (quarter + q) % 2 * 4 + lane % 4);
                const uint32 row = tile * S::ROWS + in_tile;
                float g[VEC], g2[VEC], v[VEC], v_2[VEC];
                columns_of(products + q * 4, r, g);
                unpack(packed<T>(stage.inputs[0][chunk][at]), v);
                if (ADD) unpack(packed<T>(stage.inputs[S::ADD][chunk][at]), g2);
                if (PAIR) unpack(packed<T>(stage.inputs[S::ADD + S::PAIR][chunk][at]), v_2);
                const float factor = DROP ? drop_factor(row < rows ? row : 0, factors, first_factor, pixels) : 1;
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    if (ADD) g[k] += g2[k];
                    if (!(bits[q][r] >> k & 1)) g[k] = 0;  // bits are 0 for rows past the end, too
                    const float own = DROP ? g[k] * factor : g[k];
                    sums[q][0][k] += own;
                    sums[q][1][k] += own * (v[k] - mean[q][k]);
                    if (PAIR) sums[q][GAMMA_2][k] += g[k] * (v_2[k] - mean_2[q][k]);
                    if (PAIR && DROP) sums[q][BETA_2][k] += g[k];
                }
                if (row < rows && column < columns) dz[row * pitch + column / VEC] = pack<T>(g);
            }
        load_bits(tile + step);
    }
    reduce_columns<S::THREADS, S::TEAMS * S::WARPS_M, S::COLUMNS>(
        sums, team * S::WARPS_M + warp_m, quarter * 32, reinterpret_cast<float *>(memory), partials, tickets, columns,
        [=](int n, const float (&of)[SUMS]) {
        const float invstd = saved[columns + n], invstd_2 = PAIR ? saved_2[columns + n] : 0;
        dbeta[n] = of[0];
        dgamma[n] = of[1] * invstd;
        if (PAIR) dbeta_2[n] = of[BETA_2];
        if (PAIR) dgamma_2[n] = of[GAMMA_2] * invstd_2;
    });
}
