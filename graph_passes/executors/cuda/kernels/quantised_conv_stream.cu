// INT8 1x1 convolutions that are bound by memory, on Hopper: as conv1x1_forward.cu, in integers.
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

// At the start of shared memory. Behind it, in vectors: the weights, (chunks, COLUMNS * 8); `stages` tiles of each team's x;
// `results` parts of each multiplying warp's y. Multipliers, biases and weights are in the order of `streamed_filter`.
struct alignas(1024) Control {
    float multiplier[MAX_COLUMNS];
    int bias[MAX_COLUMNS];
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

// The maps are of these matrices: of x by tiles of `walk.rows` rows and 128 columns, of y and addend by those of 16 rows and 128
// columns. With stride 2 the map of x leaves pixels out, a tile of it is whole lines of an image, and a line of the map of y is
// a tile. gridDim.x blocks share the columns, gridDim.y the rows.
// Shapes: x (rows, C), weight (K, C), addend and y (rows, K) int8; multiplier (K) fp32; bias (K) int32. C and K are multiples of
// 16, filters = K; C fits into `chunks` of 128 channels.
template <int COLUMNS, bool ADD, bool RELU>
__global__ void __launch_bounds__(THREADS, MAX_COLUMNS / COLUMNS)
quantised_conv_stream(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap addend,
                      const __grid_constant__ TensorMap y, const uint4 *weight, const float *multiplier, const int *bias,
                      uint32 rows, TileWalk walk, int channels, int filters, float addend_share, int chunks, int stages,
                      int results) {
    constexpr int PARTS = COLUMNS / CHUNK;
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    uint4 *const weights = memory + sizeof(Control) / VECTOR_BYTES, *const tiles_of_x = weights + chunks * COLUMNS * CHUNK_VECTORS;
    uint4 *const all_results = tiles_of_x + TEAMS * stages * TILE_VECTORS;
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    const bool multiplies = warp < MULTIPLYING;
    const int team = multiplies ? warp / TEAM_WARPS : warp - MULTIPLYING;
    const int first_column = blockIdx.x * COLUMNS;
    const uint32 tiles = (rows + walk.rows - 1) / walk.rows, first_tile = blockIdx.y * TEAMS + team, step = gridDim.y * TEAMS;

    for (int i = threadIdx.x; i < chunks * COLUMNS * CHUNK_VECTORS; i += THREADS) {
        const int vector = i % CHUNK_VECTORS, column = i / CHUNK_VECTORS % COLUMNS, chunk = i / CHUNK_VECTORS / COLUMNS;
        const int filter = first_column + streamed_filter(column), at = chunk * CHUNK_VECTORS + vector;
        const bool there = filter < filters && at * VECTOR < channels;
        copy_ahead(weights + (chunk * COLUMNS * CHUNK_VECTORS + swizzled(column, vector)),
                   weight + (there ? filter * (channels / VECTOR) + at : 0), there);
    }
    close_copies();
    for (int n = threadIdx.x; n < COLUMNS; n += THREADS) {
        const int filter = first_column + streamed_filter(n);
        control.multiplier[n] = filter < filters ? Bytes<RELU>::scale(multiplier[filter]) : 0;
        control.bias[n] = filter < filters ? bias[filter] : 0;
    }
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

    uint4 *const own_tiles = tiles_of_x + team * stages * TILE_VECTORS;
    if (!multiplies) {
        if (lane != 0) return;
        fetch_map(y);
        Turn turn;
        for (uint32 tile = first_tile; tile < tiles; tile += step)
            for (int c = 0; c < chunks; ++c, turn.next(stages)) {
                wait_for_phase(control.empty[team][turn.place], turn.parity ^ 1);  // at once in the first turn
                uint64 &full = control.full[team][turn.place];
                arrive_expecting(full, walk.rows * CHUNK);
                load_tile(own_tiles + turn.place * TILE_VECTORS, x, c * CHUNK, tile * walk.x_row, tile * walk.x_line, full);
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
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            const int2 b = *reinterpret_cast<const int2 *>(&control.bias[j * 8 + lane % 4 * 2]);
            products[j][0] = products[j][2] = b.x;
            products[j][1] = products[j][3] = b.y;
        }
        int before = 0;  // the place of the chunk before
        for (int c = 0; c < chunks; ++c, turn.next(stages)) {
            wait_for_phase(control.full[team][turn.place], turn.parity);
            const uint4 *a = own_tiles + turn.place * TILE_VECTORS, *b = weights + c * COLUMNS * CHUNK_VECTORS;
            if (channels - c * CHUNK > CHUNK / 2)
                multiply_chunk<CHUNK / STEP>(products, a, b);
            else
                multiply_chunk<CHUNK / STEP / 2>(products, a, b);  // the rest is zeros
            wait_for_integers<1>();
            if (c > 0 && lane == 0) arrive(control.empty[team][before]);
            before = turn.place;
        }
        wait_for_integers();
        hold_integers(products);
        if (lane == 0) arrive(control.empty[team][before]);

#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            uint4 *const part = own_results + result.place * RESULT_VECTORS;
            if (ADD) {
                wait_for_phase(control.addend[warp][result.place], result.parity);
            } else {
                if (lane == 0) wait_for_stores<1>();  // of two results, the one before the last
                __syncwarp();
            }
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                alignas(16) uint32 added[2][4], out[2][4];
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (ADD)
                        *reinterpret_cast<uint4 *>(added[r]) = part[swizzled(lane / 4 + r * 8, lane % 4 * 2 + v)];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int j = p * 16 + v * 8 + i * 2;
                    const float2 left = *reinterpret_cast<const float2 *>(&control.multiplier[j * 8 + lane % 4 * 2]);
                    const float2 right = *reinterpret_cast<const float2 *>(&control.multiplier[j * 8 + 8 + lane % 4 * 2]);
                    const float scale[4] = {left.x, left.y, right.x, right.y};
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const int sums[4] = {products[j][r * 2], products[j][r * 2 + 1], products[j + 1][r * 2],
                                             products[j + 1][r * 2 + 1]};
                        out[r][i] = Bytes<RELU>::template of<ADD>(sums, scale, ADD ? added[r][i] : 0, addend_share);
                    }
                }
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
