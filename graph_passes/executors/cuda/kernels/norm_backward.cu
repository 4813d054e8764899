// The backward pass from one BatchNorm through the 1x1 convolution before it to the BatchNorm before that: one launch, in
// which the gradient between BatchNorm and convolution is made on the way and never stored.
#include "conv1x1.cuh"

// All threads of the block meet, wherever in the code they are.
__device__ inline void meet() { asm volatile("barrier.sync 0;" ::: "memory"); }

// How the work is shared. The convolution makes K channels of COLUMNS; a tile is 64 rows. All 16 warps prepare a tile, then
// two groups of four (`data`) make the gradient of the convolution's input, 32 columns each, and the other two (`weight`) add
// up that of its weights, every second chunk of 64 channels each. STAGES tiles have a place in shared memory, and the next is
// copied to a place as soon as nobody reads what is there: x when it is prepared; dz when it is multiplied, if all wait for that,
// else with the next tile; the rest with the next tile.
template <int K_> struct Shape {
    static constexpr int K = K_, COLUMNS = 64, ROWS = 64, CHUNKS = K / 64, WARPS = 16, THREADS = WARPS * WARP;
    static constexpr int DATA_WARPS_M = 4, DATA_WARPS_N = 2, DATA_WARPS = DATA_WARPS_M * DATA_WARPS_N;
    // A warp prepares 4 rows of a chunk at once, which in a swizzled tile lie alike.
    static constexpr int ROWS_AT_ONCE = WARPS / CHUNKS * 4, TIMES = ROWS / ROWS_AT_ONCE;
    static constexpr int CHUNKS_PER_GROUP = (CHUNKS + 1) / 2;
    static constexpr int STAGES = K > 128 ? 2 : 3;  // what fits; with four for K = 64 an H200 was slower
    static constexpr bool WAITS = STAGES == 2;      // for the products of a tile, with the copies of all but one under way
    static_assert(WARPS % CHUNKS == 0 && ROWS % ROWS_AT_ONCE == 0 && ROWS_AT_ONCE % 8 == 0 && THREADS * VEC == ROWS * COLUMNS, "shares");
};

// Of one tile: tiles as in warpgroup.cuh, by chunks of 64 channels.
template <class S> struct Stage {
    uint4 dz[S::CHUNKS][S::ROWS * 8];  // becomes the gradient of the BatchNorm's input, in place
    uint4 x[S::CHUNKS][S::ROWS * 8];
    uint4 behind[S::ROWS * 8];         // what the earlier BatchNorm has read, or else the input itself
    uint4 input[S::ROWS * 8];          // of the convolution
};

template <class S> struct Shared {
    uint4 weights[S::CHUNKS][S::COLUMNS * 8];
    Stage<S> stages[S::STAGES];
    float scale[S::K], shift[S::K], b[S::K], c[S::K];  // of the later BatchNorm, and of the earlier one:
    float behind_mean[S::COLUMNS], behind_scale[S::COLUMNS], behind_shift[S::COLUMNS];
};

// For each channel of the later BatchNorm: dx = scale * dz + b * x + c; with RELU, dz counts where x * scale + shift > 0; with
// DROP, it is multiplied by the image's factor.
// REDUCE: the convolution has read relu(BatchNorm(behind)). Stored are that BatchNorm's dz, which is the gradient where ReLU
// let it through, as `out`, and the sums that batch_norm_backward_reduce makes of it. Else `behind` is what the convolution
// has read, and the gradient of that is stored.
// The gradient of the weights (K, C), which is OHWI, is left in gridDim.y parts for `sum_parts`.
// Shapes: dz, x (rows, K); saved (2, K), gamma, beta, dgamma, dbeta (K) fp32; w (K, C) with C = COLUMNS; behind, out (rows,
// C); behind_saved (2, C), behind_gamma, behind_beta, behind_dgamma, behind_dbeta (C), dw_parts (gridDim.y, K, C), partials
// (gridDim.y, 2, C), factors fp32; tickets (1).
template <class T, int K, bool RELU, bool REDUCE, bool DROP>
__global__ void __launch_bounds__(Shape<K>::THREADS, 1)
norm_backward(const Packed<T> *dz, const Packed<T> *x, const float *saved, const float *gamma, const float *beta,
              const float *dgamma, const float *dbeta, const T *w, const Packed<T> *behind, Packed<T> *out,
              const float *behind_saved, const float *behind_gamma, const float *behind_beta, float *behind_dgamma,
              float *behind_dbeta, float *dw_parts, float *partials, uint32 *tickets, uint32 rows, const float *factors,
              uint32 first_factor, uint32 pixels) {
    using S = Shape<K>;
    constexpr int STAGES = S::STAGES;
    extern __shared__ __align__(1024) uint4 memory[];
    Shared<S> &shared = *reinterpret_cast<Shared<S> *>(memory);
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    const uint32 tiles = (rows + S::ROWS - 1) / S::ROWS;

    // A thread prepares one vector of channels of some rows, and one vector of the convolution's input.
    const int chunk = warp % S::CHUNKS, first_row = warp / S::CHUNKS * 4 + lane / 8, vector = lane % 8;
    const int channel = chunk * 64 + vector * VEC, own_at = swizzled(first_row, vector);
    const int input_row = threadIdx.x / 8, input_at = swizzled(input_row, vector);
    const int warp_m = warp % S::DATA_WARPS_M, warp_n = warp / S::DATA_WARPS_M;  // the group, and the place in it

    const auto copy_rows = [&](uint32 tile, uint4 (&to)[S::CHUNKS][S::ROWS * 8], const Packed<T> *from) {
        if (tile >= tiles) return;
        const uint32 row = tile * S::ROWS + first_row;
        const Packed<T> *const own = from + (row * (K / VEC) + channel / VEC);
#pragma unroll
        for (int i = 0; i < S::TIMES; ++i) {
            const bool there = row + i * S::ROWS_AT_ONCE < rows;
            copy_ahead(to[chunk] + own_at + i * S::ROWS_AT_ONCE * 8, there ? own + i * S::ROWS_AT_ONCE * (K / VEC) : from, there);
        }
    };
    const auto copy_behind = [&](uint32 tile, Stage<S> &stage) {
        if (tile >= tiles) return;
        const uint32 row = tile * S::ROWS + input_row;
        copy_ahead(&stage.behind[input_at], behind + (row < rows ? row * (S::COLUMNS / VEC) + vector : 0), row < rows);
    };

#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        const uint32 tile = blockIdx.y + s * gridDim.y;
        const bool is_last = s == STAGES - 1;
        if (!is_last || S::WAITS) copy_rows(tile, shared.stages[s].dz, dz);
        copy_rows(tile, shared.stages[s].x, x);
        if (!is_last) copy_behind(tile, shared.stages[s]);
        if (!is_last || S::WAITS) close_copies();
    }
    load_weights<T, K, S::COLUMNS>(shared.weights, w, 0, S::COLUMNS);
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
    show_to_products();
    __syncthreads();

    // Waits for a tile, prepares it with all others and starts copies of the next ones. Each thread changes what it has copied.
    const auto prepare = [&](uint32 tile, int now) -> Stage<S> & {
        Stage<S> &stage = shared.stages[now];
        wait_for_copies<S::WAITS ? 1 : STAGES - 2>();
        float scale[VEC], shift[VEC], b[VEC], c[VEC];
        load_floats(shared.scale + channel, scale);
        if (RELU) load_floats(shared.shift + channel, shift);
        load_floats(shared.b + channel, b);
        load_floats(shared.c + channel, c);
#pragma unroll
        for (int i = 0; i < S::TIMES; ++i) {
            const int at = own_at + i * S::ROWS_AT_ONCE * 8;
            const uint32 row = tile * S::ROWS + first_row + i * S::ROWS_AT_ONCE;
            uint4 &to = stage.dz[chunk][at];
            float g[VEC], v[VEC];
            unpack(packed<T>(to), g);
            unpack(packed<T>(stage.x[chunk][at]), v);
            const bool there = row < rows;
            const float factor = DROP ? factor_of(there ? row : 0, factors, first_factor, pixels) : 1;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                if (RELU && !(v[k] * scale[k] + shift[k] > 0)) g[k] = 0;
                if (DROP) g[k] *= factor;
                v[k] = scale[k] * g[k] + b[k] * v[k] + c[k];
            }
            to = there ? words(pack<T>(v)) : uint4{};
        }
        copy_rows(tile + STAGES * gridDim.y, stage.x, x);
        if (REDUCE) {
            float v[VEC];
            load_floats(shared.behind_scale + vector * VEC, scale);
            load_floats(shared.behind_shift + vector * VEC, shift);
            unpack(packed<T>(stage.behind[input_at]), v);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                v[k] = v[k] * scale[k] + shift[k];
                v[k] = v[k] > 0 || v[k] != v[k] ? v[k] : 0;  // NaN stays visible
            }
            stage.input[input_at] = words(pack<T>(v));
        }
        wait_for_products();
        show_to_products();
        meet();  // the tile is prepared, and everybody is done with the one before
        const uint32 next = tile + (STAGES - 1) * gridDim.y;
        Stage<S> &free = shared.stages[(now + STAGES - 1) % STAGES];
        if (!S::WAITS) copy_rows(next, free.dz, dz);
        copy_behind(next, free);
        close_copies();
        return stage;
    };
    // Behind a tile's products.
    const auto end_products = [&](uint32 tile, Stage<S> &stage) {
        if (!S::WAITS) return;
        wait_for_products();
        meet();  // nobody multiplies the tile any more
        copy_rows(tile + STAGES * gridDim.y, stage.dz, dz);
        close_copies();
    };

    float sums[2][VEC] = {};  // per column
    int now = 0;
    if (warp < S::DATA_WARPS) {
        const int column = warp_n * 32 + lane % 4 * VEC;
        for (uint32 tile = blockIdx.y; tile < tiles; tile += gridDim.y, now = (now + 1) % STAGES) {
            Stage<S> &stage = prepare(tile, now);
            float products[4][4] = {};
            open_products();
#pragma unroll
            for (int s = 0; s < K / 16; ++s)
                multiply_rows(products, matrix(stage.dz[s / 4] + s % 4 * 2),
                              matrix(shared.weights[s / 4] + warp_n * 32 * 8 + s % 4 * 2), T{});
            close_products();
            wait_for_products();
            end_products(tile, stage);
#pragma unroll
            for (int r = 0; r < 2; ++r) {  // a thread has 8 columns of two rows
                const int in_tile = warp_m * 16 + r * 8 + lane / 4;
                const uint32 row = tile * S::ROWS + in_tile;
                float g[VEC], v[VEC];
                columns_of(products, r, g);
                if (REDUCE) {
                    float mean[VEC], scale[VEC], shift[VEC];
                    load_floats(shared.behind_mean + column, mean);
                    load_floats(shared.behind_scale + column, scale);
                    load_floats(shared.behind_shift + column, shift);
                    unpack(packed<T>(stage.behind[swizzled(in_tile, column / VEC)]), v);
#pragma unroll
                    for (int k = 0; k < VEC; ++k) {
                        if (!(v[k] * scale[k] + shift[k] > 0)) g[k] = 0;
                        sums[0][k] += g[k];  // rows that are not there have a g of 0
                        sums[1][k] += g[k] * (v[k] - mean[k]);
                    }
                }
                if (row < rows) out[row * (S::COLUMNS / VEC) + column / VEC] = pack<T>(g);
            }
        }
    } else {
        const int part = warp_n - S::DATA_WARPS_N;
        float dw[S::CHUNKS_PER_GROUP][8][4] = {};
        for (uint32 tile = blockIdx.y; tile < tiles; tile += gridDim.y, now = (now + 1) % STAGES) {
            Stage<S> &stage = prepare(tile, now);
            const uint4 *const input = REDUCE ? stage.input : stage.behind;
            open_products();
#pragma unroll
            for (int s = 0; s < S::ROWS / 16; ++s)
#pragma unroll
                for (int m = 0; m < S::CHUNKS_PER_GROUP; ++m)
                    multiply_columns(dw[m], matrix(stage.dz[(part + m * 2) % S::CHUNKS] + s * 16 * 8), matrix(input + s * 16 * 8), T{});
            close_products();
            end_products(tile, stage);
        }
        wait_for_products();
#pragma unroll
        for (int m = 0; m < S::CHUNKS_PER_GROUP; ++m) {
            const int k = (part + m * 2) * 64 + warp_m * 16 + lane / 4;
            float *const to = dw_parts + (size_t(blockIdx.y) * K + k) * S::COLUMNS + lane % 4 * 2;
            if (k >= K) continue;
#pragma unroll
            for (int n = 0; n < 8; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    *reinterpret_cast<float2 *>(to + r * 8 * S::COLUMNS + n * 8) = float2{dw[m][n][r * 2], dw[m][n][r * 2 + 1]};
        }
    }
    if (REDUCE)
        reduce_columns<S::THREADS, S::DATA_WARPS_M, S::DATA_WARPS_N>(
            sums, warp_m, warp_n, reinterpret_cast<float *>(memory), partials, tickets, S::COLUMNS,
            [=](int n, const float (&of)[2]) {
            behind_dgamma[n] = of[1] * behind_saved[S::COLUMNS + n];
            behind_dbeta[n] = of[0];
        });
}

// sum[i] = sum over `parts` of part[i], always in the same order; 8 neighbours a thread, and 16 threads for each sum,
// each with AT_ONCE parts under way.
// Shapes: parts (num_parts, K, C) fp32, sum (K, C). vectors = K * C / 8.
template <class T>
__global__ void __launch_bounds__(256, 1)  // more registers than a thread has otherwise
sum_parts(const float *parts, Packed<T> *sum, int num_parts, uint32 vectors) {
    constexpr int GROUPS = 16, AT_ONCE = 9;  // H200: 132 parts
    const uint32 i = (blockIdx.x * blockDim.x + threadIdx.x) / GROUPS;
    float total[VEC] = {};
    for (int next = threadIdx.x % GROUPS; i < vectors && next < num_parts; next += AT_ONCE * GROUPS) {
        float v[AT_ONCE][VEC] = {};
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const int part = next + j * GROUPS;
            if (part < num_parts) load_floats(parts + (size_t(part) * vectors + i) * VEC, v[j]);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
            for (int k = 0; k < VEC; ++k) total[k] += v[j][k];
    }
#pragma unroll
    for (int k = 0; k < VEC; ++k)
#pragma unroll
        for (int distance = 1; distance < GROUPS; distance *= 2) total[k] += __shfl_xor_sync(0xffffffff, total[k], distance);
    if (i < vectors && threadIdx.x % GROUPS == 0) sum[i] = pack<T>(total);
}
