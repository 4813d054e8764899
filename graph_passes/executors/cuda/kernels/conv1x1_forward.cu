// The forward pass of a 1x1 convolution, with what follows it: bias, sum and ReLU in inference, the sums of BatchNorm in
// training; or of two whose sum is wanted, as one product over the channels of both. conv1x1_forward.cuh says how it works.
#include "conv1x1_forward.cuh"
#include "moments.cuh"

// With SUMS, what each of two multiplying warps leaves for the copy engine is added up by a warp of its own, while they go on.
constexpr int SUMMING = MULTIPLYING / 2;
template <bool SUMS> constexpr int BLOCK = THREADS + (SUMS ? SUMMING * WARP : 0);

// Of the warps that multiply and of those that add up, at the same place of the program.
constexpr Meet<2, (MULTIPLYING + SUMMING) * WARP> meet_summing{};

// y = x * w + bias (+ addend), then ReLU with RELU; a null `bias` is none. With TWO, also + x_2 * w_2 + bias_2. With SUMS,
// `sums` are those of y per column about its mean, in a fixed order. The maps are of these matrices: of x and x_2 by tiles of
// `walk.rows` rows and 64 columns, of w and w_2 by tiles of COLUMNS rows and 64 columns, of y and addend by those of 16 rows
// and 64 columns. With stride 2 the map of x leaves pixels out, a tile of it is whole lines of an image, and a line of the map
// of y is a tile; that of x_2 has the lines of y. gridDim.x blocks, in clusters of PEERS, share the columns, gridDim.y the rows.
// Shapes: x (rows, C), w (K, C), x_2 (rows, C_2), w_2 (K, C_2), y and addend (rows, K); bias and bias_2 (K), sums (3, K),
// partials (3 * gridDim.y * K) fp32; tickets (gridDim.x). columns = K; C fits into all but the last `chunks_2` of `chunks` of 64
// channels, and C_2 into these.
template <class T, int COLUMNS, int PEERS, bool ADD, bool RELU, bool SUMS, bool TWO>
__global__ void __cluster_dims__(PEERS, 1, 1) __launch_bounds__(BLOCK<SUMS>, 1)
conv1x1_forward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                const __grid_constant__ TensorMap addend, const __grid_constant__ TensorMap y, const float *bias,
                float *sums, float *partials, uint32 *tickets, uint32 rows, TileWalk walk, int columns, int chunks,
                int stages, int results, const __grid_constant__ TensorMap x_2, const __grid_constant__ TensorMap w_2,
                const float *bias_2, int chunks_2) {
    constexpr int PARTS = COLUMNS / CHUNK;
    static_assert(sizeof(Control) == 2048, "as lowering/conv1x1_forward.py counts");
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    uint4 *const weights = memory + sizeof(Control) / VECTOR_BYTES;
    uint4 *const tiles_of_x = weights + chunks * COLUMNS * CHUNK_VECTORS;
    uint4 *const all_results = tiles_of_x + TEAMS * stages * TILE_VECTORS;
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    const bool multiplies = warp < MULTIPLYING, adds_up = SUMS && warp >= MULTIPLYING + TEAMS;
    const int pair = warp - MULTIPLYING - TEAMS;  // of multiplying warps, whose results are added up
    const int team = multiplies ? warp / TEAM_WARPS : adds_up ? pair * 2 / TEAM_WARPS : warp - MULTIPLYING;
    const int first_column = blockIdx.x * COLUMNS, chunks_1 = TWO ? chunks - chunks_2 : chunks;
    const Share share{blockIdx.y * TEAMS + team, (rows + walk.rows - 1) / walk.rows, gridDim.y * TEAMS};

    // A result is written, and then added up, where it is both.
    const auto written = [&](int warp, int place) -> uint64 & { return control.addend[warp][place]; };
    const auto added_up = [&](int warp, int place) -> uint64 & { return control.addend[warp][MAX_RESULTS / 2 + place]; };
    const auto rows_of = [&](uint32 tile, int own_row) {
        return max(0, min(WARP_ROWS, min(walk.rows, int(rows - tile * walk.rows)) - own_row));
    };

    for (int n = threadIdx.x; n < COLUMNS; n += BLOCK<SUMS>) {
        const bool has_bias = bias && first_column + n < columns;
        control.bias[n] = has_bias ? bias[first_column + n] : 0;
        if (TWO && has_bias) control.bias[n] += bias_2[first_column + n];
    }
    if (threadIdx.x == 0) init_barriers<PEERS>(control, stages, SUMS ? MAX_RESULTS : ADD ? results : 0);
    if (PEERS > 1)
        meet_cluster();
    else
        __syncthreads();

    const Stages own{tiles_of_x + team * stages * TILE_VECTORS, control.full[team], control.empty[team], chunks, stages};
    float near[PARTS][2] = {}, of_column[PARTS][2][2] = {};  // of the two columns of each part that a thread sums up
    uint32 counted = 0;                                      // rows
    if (adds_up) {
        Turn result;
        for (uint32 tile = share.first; tile < share.end; tile += share.step) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                for (int of_warp = pair * 2; of_warp < pair * 2 + 2; ++of_warp) {
                    const uint4 *const part = all_results + (of_warp * results + result.place) * RESULT_VECTORS;
                    const int rows_here = rows_of(tile, of_warp % TEAM_WARPS * WARP_ROWS);
                    wait_for_phase(written(of_warp, result.place), result.parity);
                    if (counted == 0 && of_warp == pair * 2 && rows_here > 0) {
                        const float2 first = unpack_two<T>(reinterpret_cast<const uint32 *>(part)[lane]);
                        near[p][0] = first.x;
                        near[p][1] = first.y;
                    }
                    add_rows<T>(part, rows_here, lane, near[p], of_column[p]);
                    __syncwarp();
                    if (lane == 0) arrive(added_up(of_warp, result.place));
                }
                result.next(results);
            }
            for (int of_warp = pair * 2; of_warp < pair * 2 + 2; ++of_warp)
                counted += rows_of(tile, of_warp % TEAM_WARPS * WARP_ROWS);
        }
    } else if (!multiplies) {
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
    } else {
        uint4 *const own_results = all_results + warp * results * RESULT_VECTORS;
        const int own_row = warp % TEAM_WARPS * WARP_ROWS;

        Addends addends{addend, walk, control.addend[warp], own_results, share, first_column, own_row, PARTS};
        if (ADD && lane == 0)
            for (int place = 0; place < results; ++place) addends.load(place);

        constexpr int UNDER_WAY = SUMS ? 2 : 1;  // of the results that are copied away
        Turn turn, result;
        wait_for_phase(control.weights, 0);
        for (uint32 tile = share.first; tile < share.end; tile += share.step) {
            float products[COLUMNS / 8][4];
            begin_with(products, control.bias, lane);
            multiply_tile<T, false, PEERS>(products, weights, own, turn, lane);

#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                uint4 *const part = own_results + result.place * RESULT_VECTORS;
                if (ADD) {
                    wait_for_phase(control.addend[warp][result.place], result.parity);
                } else {
                    if (SUMS) wait_for_phase(added_up(warp, result.place), result.parity ^ 1);  // at once in the first turn
                    if (lane == 0) wait_for_stores<UNDER_WAY>();
                    __syncwarp();
                }
                finish_part<T, ADD, RELU>(products, p, part, lane);
                show_to_copies();
                __syncwarp();
                if (lane == 0) {
                    store_tile(y, first_column + p * CHUNK, tile * walk.y_row + own_row, tile * walk.y_line, part);
                    if (SUMS) arrive(written(warp, result.place));
                    if (ADD && (p > 0 || tile != share.first)) {
                        wait_for_stores<1>();
                        addends.load(result.place == 0 ? results - 1 : result.place - 1);
                    }
                }
                result.next(results);
            }
        }
        if (lane == 0) wait_for_stores<0>();
    }
    __syncwarp();
    if (PEERS > 1) meet_cluster();  // before that, a peer may still be told of a free place
    if (!SUMS || (!multiplies && !adds_up)) return;

    // Over the warps that add up, then over the blocks of the same columns.
    meet_summing();  // the tiles were here
    if (adds_up) {
        Moments *const of_pair = reinterpret_cast<Moments *>(tiles_of_x) + pair * COLUMNS;
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int k = 0; k < 2; ++k)
                of_pair[p * CHUNK + lane * 2 + k] =
                    Moments::about(near[p][k], counted, of_column[p][k][0], of_column[p][k][1]);
    }
    meet_summing();
    if (adds_up) return;
    write_sums_of_columns<COLUMNS, MULTIPLYING * WARP>(reinterpret_cast<Moments *>(tiles_of_x), SUMMING, first_column, columns,
                                                       partials, tickets, sums, meet_multiplying);
}
