// The forward pass of a 1x1 convolution, with what follows it: bias, sum and ReLU in inference, the sums of BatchNorm in
// training; or of two whose sum is wanted, as one product over the channels of both. conv1x1_forward.cuh says how it works.
#include "conv1x1_forward.cuh"
#include "moments.cuh"

// Of 8 columns of a warp's rows, of which a thread has two: the sums of what differs from `near`, and of its square.
template <class T> struct ColumnSums {
    uint32 near = 0;  // two values as they are stored, which takes fewer registers
    float sum[2] = {}, squares[2] = {};

    // `low` is stored in this thread's row below 8, and `high` in its other row. With `first`, row 0 is what is near.
    __device__ void add(uint32 low, uint32 high, bool first, int lane, int rows) {
        if (first) near = __shfl_sync(0xffffffff, low, lane % 4);
        const float2 n = unpack_two<T>(near), v[2] = {unpack_two<T>(low), unpack_two<T>(high)};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool there = r * 8 + lane / 4 < rows;
            const float from_near[2] = {there ? v[r].x - n.x : 0, there ? v[r].y - n.y : 0};
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                sum[k] += from_near[k];
                squares[k] += from_near[k] * from_near[k];
            }
        }
    }

    // What all threads have of the 8 columns, `count` rows.
    __device__ void write(Moments *to, uint32 count, int lane) {
        const float2 n = unpack_two<T>(near);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
            for (int distance = 4; distance < WARP; distance *= 2) {
                sum[k] += __shfl_xor_sync(0xffffffff, sum[k], distance);
                squares[k] += __shfl_xor_sync(0xffffffff, squares[k], distance);
            }
            if (lane < 4) to[lane * 2 + k] = Moments::about(k == 0 ? n.x : n.y, count, sum[k], squares[k]);
        }
    }
};

// y = x * w + bias (+ addend), then ReLU with RELU; a null `bias` is none. With TWO, also + x_2 * w_2 + bias_2. With SUMS,
// `sums` are those of y per column about its mean, in a fixed order. The maps are of these matrices: of x and x_2 by tiles of
// `walk.rows` rows and 64 columns, of w and w_2 by tiles of COLUMNS rows and 64 columns, of y and addend by those of 16 rows
// and 64 columns. With stride 2 the map of x leaves pixels out, a tile of it is whole lines of an image, and a line of the map
// of y is a tile; that of x_2 has the lines of y. gridDim.x blocks, in clusters of PEERS, share the columns, gridDim.y the rows.
// Shapes: x (rows, C), w (K, C), x_2 (rows, C_2), w_2 (K, C_2), y and addend (rows, K); bias and bias_2 (K), sums (3, K),
// partials (3 * gridDim.y * K) fp32; tickets (gridDim.x). columns = K; C fits into all but the last `chunks_2` of `chunks` of 64
// channels, and C_2 into these.
template <class T, int COLUMNS, int PEERS, bool ADD, bool RELU, bool SUMS, bool TWO>
__global__ void __cluster_dims__(PEERS, 1, 1) __launch_bounds__(THREADS, 1)
conv1x1_forward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                const __grid_constant__ TensorMap addend, const __grid_constant__ TensorMap y, const float *bias,
                float *sums, float *partials, uint32 *tickets, uint32 rows, TileWalk walk, int columns, int chunks,
                int stages, int results, const __grid_constant__ TensorMap x_2, const __grid_constant__ TensorMap w_2,
                const float *bias_2, int chunks_2) {
    constexpr int PARTS = COLUMNS / CHUNK;
    static_assert(sizeof(Control) == 2048, "as lowering/conv1x1_forward.py counts");
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    uint4 *const weights = memory + sizeof(Control) / VECTOR_BYTES, *const tiles_of_x = weights + chunks * COLUMNS * CHUNK_VECTORS;
    uint4 *const all_results = tiles_of_x + TEAMS * stages * TILE_VECTORS;
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    const bool multiplies = warp < MULTIPLYING;
    const int team = multiplies ? warp / TEAM_WARPS : warp - MULTIPLYING;
    const int first_column = blockIdx.x * COLUMNS, chunks_1 = TWO ? chunks - chunks_2 : chunks;
    const Share share{blockIdx.y * TEAMS + team, (rows + walk.rows - 1) / walk.rows, gridDim.y * TEAMS};

    for (int n = threadIdx.x; n < COLUMNS; n += THREADS) {
        const bool has_bias = bias && first_column + n < columns;
        control.bias[n] = has_bias ? bias[first_column + n] : 0;
        if (TWO && has_bias) control.bias[n] += bias_2[first_column + n];
    }
    if (threadIdx.x == 0) init_barriers<PEERS>(control, stages, ADD ? results : 0);
    if (PEERS > 1)
        meet_cluster();
    else
        __syncthreads();

    const Stages own{tiles_of_x + team * stages * TILE_VECTORS, control.full[team], control.empty[team], chunks, stages};
    if (!multiplies) {
        if (lane == 0) {
            if (team == 0) {
                fetch_map(y);
                arrive_expecting(control.weights, chunks * COLUMNS * CHUNK_VECTORS * VECTOR_BYTES);
                load_weights<COLUMNS>(weights, w, chunks_1, first_column, control.weights);
                if (TWO)
                    load_weights<COLUMNS>(weights + chunks_1 * COLUMNS * CHUNK_VECTORS, w_2, chunks_2, first_column,
                                          control.weights);
            }
            load_tiles<TWO, PEERS>(own, x, share, walk, &x_2, chunks_2);
        }
        __syncwarp();
        if (PEERS > 1) meet_cluster();
        return;
    }
    uint4 *const own_results = all_results + warp * results * RESULT_VECTORS;
    const int own_row = warp % TEAM_WARPS * WARP_ROWS;

    Addends addends{addend, walk, control.addend[warp], own_results, share, first_column, own_row, PARTS};
    if (ADD && lane == 0)
        for (int place = 0; place < results; ++place) addends.load(place);

    ColumnSums<T> columns_seen[SUMS ? COLUMNS / 8 : 1];
    uint32 counted = 0;  // rows
    Turn turn, result;
    wait_for_phase(control.weights, 0);
    for (uint32 tile = share.first; tile < share.end; tile += share.step) {
        float products[COLUMNS / 8][4];
        begin_with(products, control.bias, lane);
        multiply_tile<T, false, PEERS>(products, weights, own, turn, lane);

        const int rows_here = max(0, min(WARP_ROWS, min(walk.rows, int(rows - tile * walk.rows)) - own_row));
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            uint4 *const part = own_results + result.place * RESULT_VECTORS;
            if (ADD) {
                wait_for_phase(control.addend[warp][result.place], result.parity);
            } else {
                if (lane == 0) wait_for_stores<1>();  // of two results, the one before the last
                __syncwarp();
            }
            uint32 m[CHUNK / 16][4];
#pragma unroll
            for (int pair = 0; pair < CHUNK / 16; ++pair)
                finish<T, ADD, RELU>(products[p * 8 + pair * 2], products[p * 8 + pair * 2 + 1],
                                     part + matrix_row(lane, pair), m[pair]);
            show_to_copies();
            __syncwarp();
            if (lane == 0) {
                store_tile(y, first_column + p * CHUNK, tile * walk.y_row + own_row, tile * walk.y_line, part);
                if (ADD && (p > 0 || tile != share.first)) {
                    wait_for_stores<1>();
                    addends.load(result.place == 0 ? results - 1 : result.place - 1);
                }
            }
            if (SUMS)
#pragma unroll
                for (int j = 0; j < CHUNK / 8; ++j)
                    columns_seen[p * 8 + j].add(m[j / 2][j % 2 * 2], m[j / 2][j % 2 * 2 + 1], counted == 0 && rows_here > 0,
                                                lane, rows_here);
            result.next(results);
        }
        counted += rows_here;
    }
    if (lane == 0) wait_for_stores<0>();
    __syncwarp();
    if (PEERS > 1) meet_cluster();  // before that, a peer may still be told of a free place
    if (!SUMS) return;

    // Over the warps, then over the blocks of the same columns.
    meet_multiplying();  // the tiles were here
    Moments *const of_warps = reinterpret_cast<Moments *>(tiles_of_x);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) columns_seen[SUMS ? j : 0].write(of_warps + warp * COLUMNS + j * 8, counted, lane);
    write_sums_of_columns<COLUMNS, MULTIPLYING * WARP>(of_warps, MULTIPLYING, first_column, columns, partials, tickets,
                                                       reinterpret_cast<int &>(control.bias), sums, [] { meet_multiplying(); });
}
