// INT8 1x1 convolutions that are bound by memory, on Hopper: as conv1x1_forward.cu, in integers; or one together with the
// convolution at a projection shortcut that is added to it, whose integers stay in registers.
//
// A block keeps the weights of COLUMNS filters in shared memory. Two teams of four multiplying warps, each with a warp that
// starts the copies of what they read, walk over tiles of 64 rows, independent of each other: while one multiplies, the other
// requantises, and the copy engine brings what comes next and takes away what is done. A warp has 16 rows, of which it works on
// 128 filters at a time, in shared memory: there the copy engine leaves the addend, and thence it takes the results.
#include "copy_engine.cuh"
#include "integer_products.cuh"

constexpr int TEAMS = 2, TEAM_WARPS = 4, MULTIPLYING = TEAMS * TEAM_WARPS, THREADS = (MULTIPLYING + TEAMS) * WARP;
constexpr int WARP_ROWS = 16, ROWS = TEAM_WARPS * WARP_ROWS;  // of a tile
constexpr int CHUNK = 128, STEP = 32;                         // channels of a tile of warpgroup.cuh, and of one product
constexpr int CHUNK_VECTORS = CHUNK / VECTOR, TILE_VECTORS = ROWS * CHUNK_VECTORS, RESULT_VECTORS = WARP_ROWS * CHUNK_VECTORS;
constexpr int VECTOR_BYTES = 16;
constexpr int MAX_COLUMNS = 256, MAX_STAGES = 12, MAX_RESULTS = 3;

// Of COLUMNS filters: what the products start from, and what they are multiplied by. As a thread of a quad takes them: of 8
// columns its two, for two rows; of 16 columns its four.
template <int COLUMNS> struct Factors {
    int4 bias[COLUMNS / 8][4];
    float4 multiplier[COLUMNS / 16][4];
};

// At the start of shared memory. Behind it, in vectors: the weights, (chunks, COLUMNS * 8); `stages` tiles of each team's x;
// `results` parts of each multiplying warp's y. Factors and weights are in the order of `streamed_filter`.
template <int COLUMNS, int CONVOLUTIONS> struct alignas(1024) Control {
    Factors<COLUMNS> factors[CONVOLUTIONS];
    uint64 full[TEAMS][MAX_STAGES], empty[TEAMS][MAX_STAGES], addend[MULTIPLYING][MAX_RESULTS];
};

// Which of the filters a column of the products is: of 128, those that thread t of a quad has are 32 neighbours, in two vectors
// of which either is 16 columns of 64. As 2t and 2t + 1 lie in a row, the eight threads of two rows find the first vectors in
// all banks of shared memory, and so the second.
__device__ inline int streamed_filter(int column) {
    return column / 128 * 128 + (column % 8 / 2 * 2 + column / 64 % 2) * VECTOR + column % 64 / 8 * 2 + column % 2;
}

// A series of products of the first STEPS * STEP channels of a chunk.
template <int STEPS, int EIGHTS> __device__ inline void multiply_chunk(int (&c)[EIGHTS][4], const uint4 *a, const uint4 *b) {
    open_integers();
#pragma unroll
    for (int s = 0; s < STEPS; ++s) multiply_integers(c, a + s * 2, b + s * 2);
    close_integers();
}

// Keeps the weights of COLUMNS filters from `first_column` on, in tiles of 128 channels; nobody waits for the copies.
template <int COLUMNS>
__device__ inline void keep_weights(uint4 *to, const uint4 *weight, int chunks, int channels, int first_column, int filters) {
    for (int i = threadIdx.x; i < chunks * COLUMNS * CHUNK_VECTORS; i += THREADS) {
        const int vector = i % CHUNK_VECTORS, column = i / CHUNK_VECTORS % COLUMNS, chunk = i / CHUNK_VECTORS / COLUMNS;
        const int filter = first_column + streamed_filter(column), at = chunk * CHUNK_VECTORS + vector;
        const bool there = filter < filters && at * VECTOR < channels;
        copy_ahead(to + (chunk * COLUMNS * CHUNK_VECTORS + swizzled(column, vector)),
                   weight + (there ? filter * (channels / VECTOR) + at : 0), there);
    }
}
template <bool RELU, int COLUMNS>
__device__ inline void keep_factors(Factors<COLUMNS> &to, const float *multiplier, const int *bias, int first_column,
                                    int filters) {
    for (int n = threadIdx.x; n < COLUMNS; n += THREADS) {
        const int filter = first_column + streamed_filter(n);
        const int thread = n % 8 / 2, k = n % 2;
        int *const sums = reinterpret_cast<int *>(&to.bias[n / 8][thread]);
        sums[k] = sums[2 + k] = filter < filters ? bias[filter] : 0;
        reinterpret_cast<float *>(&to.multiplier[n / 16][thread])[n % 16 / 8 * 2 + k] =
            filter < filters ? Bytes<RELU>::scale(multiplier[filter]) : 0;
    }
}

// The tiles of x of one team, of 128 channels each, in places that are used in turn.
struct Stages { uint4 *tiles; uint64 *full, *empty; int number; };

// products = bias + x * weight over the next `chunks` of the team's tiles.
template <int EIGHTS>
__device__ inline void multiply_tile(int (&products)[EIGHTS][4], const Factors<EIGHTS * 8> &factors, const uint4 *weights,
                                     int chunks, int channels, const Stages &stages, Turn &turn, int lane) {
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) {
        const int4 b = factors.bias[j][lane % 4];
        products[j][0] = b.x, products[j][1] = b.y, products[j][2] = b.z, products[j][3] = b.w;
    }
    int before = 0;  // the place of the chunk before
    for (int c = 0; c < chunks; ++c, turn.next(stages.number)) {
        wait_for_phase(stages.full[turn.place], turn.parity);
        const uint4 *a = stages.tiles + turn.place * TILE_VECTORS, *b = weights + c * EIGHTS * 8 * CHUNK_VECTORS;
        if (channels - c * CHUNK > CHUNK / 2)
            multiply_chunk<CHUNK / STEP>(products, a, b);
        else
            multiply_chunk<CHUNK / STEP / 2>(products, a, b);  // the rest is zeros
        wait_for_integers<1>();
        if (c > 0 && lane == 0) arrive(stages.empty[before]);
        before = turn.place;
    }
    wait_for_integers();
    hold_integers(products);
    if (lane == 0) arrive(stages.empty[before]);
}

// The vector `v` of 16 filters that a thread has of the part `p` of 128, in each of its two rows, requantised: `out[row]`.
template <bool ADD, bool RELU, int EIGHTS>
__device__ inline void requantise(const int (&products)[EIGHTS][4], int p, int v, const Factors<EIGHTS * 8> &factors,
                                  const uint32 (&added)[2][4], float addend_share, uint32 (&out)[2][4], int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int j = p * 16 + v * 8 + i * 2;
        const float4 four = factors.multiplier[j / 2][lane % 4];
        const float scale[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int sums[4] = {products[j][r * 2], products[j][r * 2 + 1], products[j + 1][r * 2],
                                 products[j + 1][r * 2 + 1]};
            out[r][i] = Bytes<RELU>::template of<ADD>(sums, scale, ADD ? added[r][i] : 0, addend_share);
        }
    }
}

// The maps are of these matrices: of x by tiles of `walk.rows` rows and 128 columns, of y and addend by those of 16 rows and
// 128 columns. With stride 2 the map of x leaves pixels out, a tile of it is whole lines of an image, and a line of the map of
// y is a tile. gridDim.x blocks share the columns, gridDim.y the rows.
//
// With TWO, x is that of a projection shortcut, whose integers are added to the convolution of x_2; the map of x_2 has the
// lines of y. C and C_2 fit into `chunks` and `chunks_2` of 128 channels.
// Shapes: x (rows, C), weight (K, C), x_2 (rows, C_2), weight_2 (K, C_2), addend and y (rows, K) int8; multiplier and
// multiplier_2 (K) fp32; bias and bias_2 (K) int32. C, C_2 and K are multiples of 16, filters = K.
template <int COLUMNS, bool ADD, bool RELU, bool TWO>
__global__ void __launch_bounds__(THREADS, MAX_COLUMNS / COLUMNS)
quantised_conv_stream(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap addend,
                      const __grid_constant__ TensorMap y, const uint4 *weight, const float *multiplier, const int *bias,
                      uint32 rows, TileWalk walk, int channels, int filters, float addend_share, int chunks, int stages,
                      int results, const __grid_constant__ TensorMap x_2, const uint4 *weight_2, const float *multiplier_2,
                      const int *bias_2, int channels_2, int chunks_2) {
    static_assert(!(ADD && TWO), "what is added is one or the other");
    constexpr int PARTS = COLUMNS / CHUNK, CONVOLUTIONS = TWO ? 2 : 1;
    extern __shared__ __align__(1024) uint4 memory[];
    Control<COLUMNS, CONVOLUTIONS> &control = *reinterpret_cast<Control<COLUMNS, CONVOLUTIONS> *>(memory);
    Factors<COLUMNS> &factors = control.factors[0], &factors_2 = control.factors[CONVOLUTIONS - 1];
    uint4 *const weights = memory + sizeof(control) / VECTOR_BYTES;
    uint4 *const weights_2 = weights + chunks * COLUMNS * CHUNK_VECTORS;
    uint4 *const tiles_of_x = weights_2 + (TWO ? chunks_2 * COLUMNS * CHUNK_VECTORS : 0);
    uint4 *const all_results = tiles_of_x + TEAMS * stages * TILE_VECTORS;
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    const bool multiplies = warp < MULTIPLYING;
    const int team = multiplies ? warp / TEAM_WARPS : warp - MULTIPLYING;
    const int first_column = blockIdx.x * COLUMNS;
    const uint32 tiles = (rows + walk.rows - 1) / walk.rows, first_tile = blockIdx.y * TEAMS + team, step = gridDim.y * TEAMS;

    keep_weights<COLUMNS>(weights, weight, chunks, channels, first_column, filters);
    if (TWO) keep_weights<COLUMNS>(weights_2, weight_2, chunks_2, channels_2, first_column, filters);
    close_copies();
    keep_factors<RELU && !TWO>(factors, multiplier, bias, first_column, filters);
    if (TWO) keep_factors<RELU>(factors_2, multiplier_2, bias_2, first_column, filters);
    if (threadIdx.x == 0) {
        for (int t = 0; t < TEAMS; ++t)
            for (int s = 0; s < stages; ++s) {
                init_barrier(control.full[t][s], 1);
                init_barrier(control.empty[t][s], TEAM_WARPS);
            }
        if (ADD)
            for (int i = 0; i < MULTIPLYING; ++i)
                for (int r = 0; r < results; ++r) init_barrier(control.addend[i][r], 1);
        show_barriers();
    }
    wait_for_copies<0>();
    show_to_products();  // the weights
    __syncthreads();

    const Stages own{tiles_of_x + team * stages * TILE_VECTORS, control.full[team], control.empty[team], stages};
    if (!multiplies) {
        if (lane != 0) return;
        fetch_map(y);
        Turn turn;
        for (uint32 tile = first_tile; tile < tiles; tile += step)
            for (int c = 0; c < chunks + (TWO ? chunks_2 : 0); ++c, turn.next(stages)) {
                wait_for_phase(own.empty[turn.place], turn.parity ^ 1);  // at once in the first turn
                uint64 &full = own.full[turn.place];
                uint4 *const to = own.tiles + turn.place * TILE_VECTORS;
                arrive_expecting(full, walk.rows * CHUNK);
                if (TWO && c >= chunks)
                    load_tile(to, x_2, (c - chunks) * CHUNK, tile * walk.y_row, tile * walk.y_line, full);
                else
                    load_tile(to, x, c * CHUNK, tile * walk.x_row, tile * walk.x_line, full);
            }
        return;
    }

    uint4 *const own_results = all_results + warp * results * RESULT_VECTORS;
    const int own_row = warp % TEAM_WARPS * WARP_ROWS;

    // What is added is on its way into all of the results but the one that is worked on.
    uint32 ahead_tile = first_tile;
    int ahead_part = 0;
    const auto load_addend = [&](int place) {
        if (ahead_tile >= tiles) return;
        uint64 &there = control.addend[warp][place];
        arrive_expecting(there, RESULT_VECTORS * VECTOR_BYTES);
        load_tile(own_results + place * RESULT_VECTORS, addend, first_column + ahead_part * CHUNK,
                  ahead_tile * walk.y_row + own_row, ahead_tile * walk.y_line, there);
        if (++ahead_part == PARTS) {
            ahead_part = 0;
            ahead_tile += step;
        }
    };
    if (ADD && lane == 0)
        for (int place = 0; place < results; ++place) load_addend(place);

    Turn turn, result;
    for (uint32 tile = first_tile; tile < tiles; tile += step) {
        int products[COLUMNS / 8][4];
        uint32 shortcut[TWO ? PARTS : 1][2][2][4];  // as `requantise` gives it
        multiply_tile(products, factors, weights, chunks, channels, own, turn, lane);
        if constexpr (TWO) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
#pragma unroll
                for (int v = 0; v < 2; ++v)
                    requantise<false, false>(products, p, v, factors, shortcut[p][v], 0, shortcut[p][v], lane);
            multiply_tile(products, factors_2, weights_2, chunks_2, channels_2, own, turn, lane);
        }

#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            uint4 *const part = own_results + result.place * RESULT_VECTORS;
            if (ADD) {
                wait_for_phase(control.addend[warp][result.place], result.parity);
            } else {
                if (lane == 0) wait_for_stores<TWO ? PARTS - 1 : 1>();  // those of this place: there are as many others
                __syncwarp();
            }
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                alignas(16) uint32 added[2][4], out[2][4];
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (ADD)
                        *reinterpret_cast<uint4 *>(added[r]) = part[swizzled(lane / 4 + r * 8, lane % 4 * 2 + v)];
                if constexpr (TWO)
                    requantise<true, RELU>(products, p, v, factors_2, shortcut[p][v], addend_share, out, lane);
                else
                    requantise<ADD, RELU>(products, p, v, factors, added, addend_share, out, lane);
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    part[swizzled(lane / 4 + r * 8, lane % 4 * 2 + v)] = *reinterpret_cast<const uint4 *>(out[r]);
            }
            show_to_copies();
            __syncwarp();
            if (lane == 0) {
                store_tile(y, first_column + p * CHUNK, tile * walk.y_row + own_row, tile * walk.y_line, part);
                if (ADD && (p > 0 || tile != first_tile)) {
                    wait_for_stores<1>();
                    load_addend(result.place == 0 ? results - 1 : result.place - 1);
                }
            }
            result.next(results);
        }
    }
    if (lane == 0) wait_for_stores<0>();
}
