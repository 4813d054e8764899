// The backward pass from one BatchNorm through the 1x1 convolution before it to the BatchNorm before that: one launch, in
// which the gradient between BatchNorm and convolution is made on the way and never stored.
#include "tensor_cores.cuh"

// Copies to shared memory that nobody waits for; zeros where `there` is false.
__device__ inline void copy_ahead(uint4 *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(uint32(__cvta_generic_to_shared(to))), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Where a vector lies among 32 that are 8 rows of 4 vectors: such that the same vector of 8 rows (`load_transposed`) comes
// from different banks, and the 32 threads of a warp meet none twice.
__device__ inline int slot(int row, int vector) { return row * 4 + (vector ^ (row >> 1)); }

// How the work is shared. The convolution makes K channels of COLUMNS; a tile is 64 rows. Of 16 warps all prepare a tile,
// then 8 (`data`) make the gradient of the convolution's input, while the others (`weight`) add up that of its weights.
template <int K_> struct Shape {
    static constexpr int K = K_, COLUMNS = 64, ROWS = 64, STEPS = K / 32;
    static constexpr int DATA_WARPS_M = 4, DATA_WARPS_N = 2, WARPS = 16, THREADS = WARPS * WARP;
    static constexpr int DATA_THREADS = DATA_WARPS_M * DATA_WARPS_N * WARP;
    static constexpr int COLUMN_TILES = COLUMNS / 8 / DATA_WARPS_N;
    static constexpr int WARPS_PER_STEP = WARPS / STEPS, ROW_GROUPS = ROWS / 8;  // of 8 rows
    static constexpr int WEIGHT_WARPS_K = K / 16 < 8 ? K / 16 : 8, WEIGHT_WARPS_N = 8 / WEIGHT_WARPS_K;
    static constexpr int K_TILES = K / 16 / WEIGHT_WARPS_K, N_TILES = COLUMNS / 8 / WEIGHT_WARPS_N;
    static_assert(WARPS % STEPS == 0 && ROW_GROUPS % WARPS_PER_STEP == 0 && COLUMN_TILES == 4 && N_TILES >= 4, "shares");
};

// Of one tile. A vector of 8 channels c of row r is at [r / 8][c / 32][slot(r % 8, c / 8 % 4)].
template <class S> struct Stage {
    uint4 dz[S::ROW_GROUPS][S::STEPS][WARP];             // becomes the gradient of the BatchNorm's input, in place
    uint4 x[S::ROW_GROUPS][S::STEPS][WARP];
    uint4 behind[S::ROW_GROUPS][S::COLUMNS / 32][WARP];  // what the earlier BatchNorm has read, or else the input itself
    uint4 input[S::ROW_GROUPS][S::COLUMNS / 32][WARP];   // of the convolution
};

template <class S> struct Shared {
    uint4 weights[S::K / 8 * S::COLUMNS];
    Stage<S> stages[2];
    float scale[S::K], shift[S::K], b[S::K], c[S::K];  // of the later BatchNorm, and of the earlier one:
    float behind_mean[S::COLUMNS], behind_scale[S::COLUMNS], behind_shift[S::COLUMNS];
};

// For each channel of the later BatchNorm: dx = scale * dz + b * x + c; with RELU, dz counts where x * scale + shift > 0.
// REDUCE: the convolution has read relu(BatchNorm(behind)). Stored are that BatchNorm's dz, which is the gradient where ReLU
// let it through, as `out`, and the sums that batch_norm_backward_reduce makes of it. Else `behind` is what the convolution
// has read, and the gradient of that is stored.
// The gradient of the weights (k, n), which is OHWI, is left in gridDim.y parts for `sum_parts`.
template <class T, int K, bool RELU, bool REDUCE>
__global__ void __launch_bounds__(Shape<K>::THREADS, 1)
norm_backward(const Packed<T> *dz, const Packed<T> *x, const float *saved, const float *gamma, const float *beta,
              const float *dgamma, const float *dbeta, const T *w, const Packed<T> *behind, Packed<T> *out,
              const float *behind_saved, const float *behind_gamma, const float *behind_beta, float *behind_dgamma,
              float *behind_dbeta, float *dw_parts, float *partials, uint32 *tickets, uint32 rows) {
    using S = Shape<K>;
    extern __shared__ uint4 memory[];
    Shared<S> &shared = *reinterpret_cast<Shared<S> *>(memory);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, mine = slot(lane / 4, lane % 4);
    const uint32 tiles = (rows + S::ROWS - 1) / S::ROWS;

    // A thread prepares one vector of channels of some groups of rows.
    const int step = warp % S::STEPS, first_group = warp / S::STEPS;
    // A data thread makes 8 columns of two rows, which are in neighbouring groups.
    const bool makes_data = warp < S::DATA_THREADS / WARP;
    const int warp_m = warp / S::DATA_WARPS_N, warp_n = warp % S::DATA_WARPS_N;
    const int column = warp_n * 32 + lane % 4 * VEC;

    const auto copy_tile = [&](uint32 tile, Stage<S> &stage) {
        if (tile < tiles) {
#pragma unroll
            for (int group = first_group; group < S::ROW_GROUPS; group += S::WARPS_PER_STEP) {
                const uint32 row = tile * S::ROWS + group * 8 + lane / 4;
                const uint32 at = row < rows ? row * (K / VEC) + step * 4 + lane % 4 : 0;
                copy_ahead(&stage.dz[group][step][mine], dz + at, row < rows);
                copy_ahead(&stage.x[group][step][mine], x + at, row < rows);
            }
            if (makes_data)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const uint32 row = tile * S::ROWS + (warp_m * 2 + r) * 8 + lane / 4;
                    const uint32 at = row < rows ? (row * S::COLUMNS + column) / VEC : 0;
                    copy_ahead(&stage.behind[warp_m * 2 + r][warp_n][mine], behind + at, row < rows);
                }
        }
        close_copies();
    };

    copy_tile(blockIdx.y, shared.stages[0]);
    load_weights<T, K, S::COLUMNS>(shared.weights, w, 0, S::COLUMNS);
    const int channel = step * 32 + lane % 4 * VEC;
    if (threadIdx.x < K / VEC) {
        const int at = threadIdx.x * VEC;
        const Backward of(saved, gamma, RELU ? beta : nullptr, at, K);
        const InputGradient to(of, dgamma, dbeta, rows, at);
        store_floats(shared.scale + at, of.scale);
        if (RELU) store_floats(shared.shift + at, of.shift);
        store_floats(shared.b + at, to.b);
        store_floats(shared.c + at, to.c);
    }
    if (REDUCE && threadIdx.x < S::COLUMNS / VEC) {
        const int c = threadIdx.x * VEC;
        const Backward of_behind(behind_saved, behind_gamma, behind_beta, c, S::COLUMNS);
        store_floats(shared.behind_mean + c, of_behind.mean);
        store_floats(shared.behind_scale + c, of_behind.scale);
        store_floats(shared.behind_shift + c, of_behind.shift);
    }
    __syncthreads();

    // Of a weight warp the sums for dw; of a data warp, in the same registers, the two sums per column: `sum(j, k)`.
    float dw[S::K_TILES][S::N_TILES][4] = {};
    const auto sum = [&](int j, int k) -> float & { return dw[0][j * 2 + k / 4][k % 4]; };
    int now = 0;
    for (uint32 tile = blockIdx.y; tile < tiles; tile += gridDim.y, now ^= 1) {
        Stage<S> &stage = shared.stages[now];
        wait_for_copies();
        // Each thread changes what it has copied itself.
        float scale[VEC], shift[VEC], b[VEC], c[VEC];
        load_floats(shared.scale + channel, scale);
        if (RELU) load_floats(shared.shift + channel, shift);
        load_floats(shared.b + channel, b);
        load_floats(shared.c + channel, c);
#pragma unroll
        for (int group = first_group; group < S::ROW_GROUPS; group += S::WARPS_PER_STEP) {
            float g[VEC], v[VEC];
            unpack(packed<T>(stage.dz[group][step][mine]), g);
            unpack(packed<T>(stage.x[group][step][mine]), v);
            const bool there = tile * S::ROWS + group * 8 + lane / 4 < rows;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                if (RELU && !(v[k] * scale[k] + shift[k] > 0)) g[k] = 0;
                v[k] = there ? scale[k] * g[k] + b[k] * v[k] + c[k] : 0;
            }
            stage.dz[group][step][mine] = words(pack<T>(v));
        }
        if (REDUCE && makes_data) {
            load_floats(shared.behind_scale + column, scale);
            load_floats(shared.behind_shift + column, shift);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float v[VEC];
                unpack(packed<T>(stage.behind[warp_m * 2 + r][warp_n][mine]), v);
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    v[k] = v[k] * scale[k] + shift[k];
                    v[k] = v[k] > 0 || v[k] != v[k] ? v[k] : 0;  // NaN stays visible
                }
                stage.input[warp_m * 2 + r][warp_n][mine] = words(pack<T>(v));
            }
        }
        __syncthreads();  // the tile is prepared, and everybody is done with the one before
        copy_tile(tile + gridDim.y, shared.stages[now ^ 1]);

        if (makes_data) {
            float products[S::COLUMN_TILES][4] = {};
#pragma unroll 2
            for (int s = 0; s < S::STEPS; ++s) {
                const uint4 low = stage.dz[warp_m * 2][s][mine], high = stage.dz[warp_m * 2 + 1][s][mine];
#pragma unroll
                for (int n = 0; n < S::COLUMN_TILES; ++n)
                    multiply_add<T>(products[n], low, high,
                                    shared.weights[((s * S::DATA_WARPS_N + warp_n) * S::COLUMN_TILES + n) * WARP + lane]);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32 row = tile * S::ROWS + (warp_m * 2 + r) * 8 + lane / 4;
                float g[VEC], v[VEC];
                columns_of(products, 0, r, g);
                if (REDUCE) {
                    float mean[VEC], scale[VEC], shift[VEC];
                    load_floats(shared.behind_mean + column, mean);
                    load_floats(shared.behind_scale + column, scale);
                    load_floats(shared.behind_shift + column, shift);
                    unpack(packed<T>(stage.behind[warp_m * 2 + r][warp_n][mine]), v);
#pragma unroll
                    for (int k = 0; k < VEC; ++k) {
                        if (!(v[k] * scale[k] + shift[k] > 0)) g[k] = 0;
                        sum(0, k) += g[k];  // rows that are not there have a g of 0
                        sum(1, k) += g[k] * (v[k] - mean[k]);
                    }
                }
                if (row < rows) out[(row * S::COLUMNS + column) / VEC] = pack<T>(g);
            }
        } else {
            const auto &input = REDUCE ? stage.input : stage.behind;
            const int part = warp - S::DATA_THREADS / WARP, matrix = lane / 8, row = lane % 8;
            const int part_k = part / S::WEIGHT_WARPS_N * S::K_TILES * 2, part_n = part % S::WEIGHT_WARPS_N * S::N_TILES;
#pragma unroll 1
            for (int group = 0; group < S::ROW_GROUPS; group += 2) {
                uint4 of_k[S::K_TILES];
#pragma unroll
                for (int m = 0; m < S::K_TILES; ++m) {
                    const int vector = part_k + m * 2 + matrix % 2;
                    of_k[m] = load_transposed(&stage.dz[group + matrix / 2][vector / 4][slot(row, vector % 4)]);
                }
#pragma unroll
                for (int n = 0; n < S::N_TILES; n += 2) {
                    const int vector = part_n + n + matrix / 2;
                    const uint4 of_n = load_transposed(&input[group + matrix % 2][vector / 4][slot(row, vector % 4)]);
#pragma unroll
                    for (int m = 0; m < S::K_TILES; ++m) {
                        multiply_add(dw[m][n], of_k[m].x, of_k[m].y, of_k[m].z, of_k[m].w, of_n.x, of_n.y, T{});
                        multiply_add(dw[m][n + 1], of_k[m].x, of_k[m].y, of_k[m].z, of_k[m].w, of_n.z, of_n.w, T{});
                    }
                }
            }
        }
    }

    if (!makes_data) {
        const int part = warp - S::DATA_THREADS / WARP;
        float *const to_part = dw_parts + size_t(blockIdx.y) * K * S::COLUMNS;
#pragma unroll
        for (int m = 0; m < S::K_TILES; ++m)
#pragma unroll
            for (int n = 0; n < S::N_TILES; ++n)
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const int k = (part / S::WEIGHT_WARPS_N * S::K_TILES + m) * 16 + i / 2 * 8 + lane / 4;
                    const int first = (part % S::WEIGHT_WARPS_N * S::N_TILES + n) * 8 + lane % 4 * 2;
                    *reinterpret_cast<float2 *>(to_part + k * S::COLUMNS + first) = float2{dw[m][n][i], dw[m][n][i + 1]};
                }
    }
    if (REDUCE) {
        float sums[2][1][VEC];
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int k = 0; k < VEC; ++k) sums[j][0][k] = sum(j, k);
        reduce_columns<S::DATA_WARPS_M, S::DATA_WARPS_N>(sums, reinterpret_cast<float *>(memory), partials, tickets, S::COLUMNS,
                                                         [=](int n, const float (&of)[2]) {
            behind_dbeta[n] = of[0];
            behind_dgamma[n] = of[1] * behind_saved[S::COLUMNS + n];
        });
    }
}

// sum[i] = sum over `parts` of part[i], in order; 8 neighbours a thread.
template <class T>
__global__ void sum_parts(const float *parts, Packed<T> *sum, int num_parts, uint32 vectors) {
    const uint32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= vectors) return;
    float total[VEC] = {};
#pragma unroll 8
    for (int part = 0; part < num_parts; ++part) {
        float v[VEC];
        load_floats(parts + (size_t(part) * vectors + i) * VEC, v);
#pragma unroll
        for (int k = 0; k < VEC; ++k) total[k] += v[k];
    }
    sum[i] = pack<T>(total);
}
