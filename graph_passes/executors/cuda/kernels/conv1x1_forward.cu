// Forward pass of a 1x1 convolution in inference, fused with bias, addition and ReLU. Optionally computes the sum of two
// convolutions, as one product over the channels of both. conv1x1_forward.cuh explains the design.
#include "conv1x1_forward.cuh"

// y = x * w + bias (+ addend), with RELU followed by ReLU; `bias` may be null. With TWO, x_2 * w_2 + bias_2 is added as
// well. Tiles of the tensor maps: x and x_2 `walk.rows` rows and 64 columns; w and w_2 COLUMNS rows and 64 columns; y
// and addend 16 rows and 64 columns. With stride 2, the map of x skips pixels: a tile of x is whole lines of an image,
// and a line of the map of y is a tile. The map of x_2 has the same lines as the map of y. gridDim.x blocks share the
// columns, gridDim.y the rows.
// Shapes: x (rows, C), w (K, C), x_2 (rows, C_2), w_2 (K, C_2), y and addend (rows, K); bias and bias_2 (K) fp32.
// columns = K. C_2 fits into the last `chunks_2` of `chunks` chunks of 64 channels, and C into the chunks before them.
template <class T, int COLUMNS, bool ADD, bool RELU, bool TWO>
__global__ void __launch_bounds__(THREADS, 1)
conv1x1_forward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                const __grid_constant__ TensorMap addend, const __grid_constant__ TensorMap y, const float *bias,
                uint32 rows, TileStep walk, int columns, int chunks, int stages, int results,
                const __grid_constant__ TensorMap x_2, const __grid_constant__ TensorMap w_2, const float *bias_2,
                int chunks_2) {
    constexpr int PARTS = COLUMNS / CHUNK;
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    uint4 *const weights = memory + sizeof(Control) / VECTOR_BYTES;
    uint4 *const tiles_of_x = weights + chunks * COLUMNS * CHUNK_VECTORS;
    uint4 *const all_results = tiles_of_x + TEAMS * stages * TILE_VECTORS;
    const int lane = lane_index(), warp = warp_index();
    const WarpRole<TEAMS> role(warp);
    const int first_column = blockIdx.x * COLUMNS, chunks_1 = TWO ? chunks - chunks_2 : chunks;
    const TileRange range = tiles_of<TEAMS>(role.team, rows, walk.rows);

    for (int n = threadIdx.x; n < COLUMNS; n += THREADS) {
        const bool has_bias = bias && first_column + n < columns;
        control.bias[n] = has_bias ? bias[first_column + n] : 0;
        if (TWO && has_bias) control.bias[n] += bias_2[first_column + n];
    }
    if (threadIdx.x == 0) init_barriers(control, stages, ADD ? results : 0);
    __syncthreads();

    const Stages own(control, role.team, tiles_of_x, stages);
    if (!role.is_mma_warp) {
        if (lane == 0) {
            if (role.team == 0) {
                prefetch_tensormap(y);
                arrive_expect_tx(control.weights, chunks * COLUMNS * CHUNK_VECTORS * VECTOR_BYTES);
                load_weights<COLUMNS>(weights, w, chunks_1, first_column, control.weights);
                if (TWO)
                    load_weights<COLUMNS>(weights + chunks_1 * COLUMNS * CHUNK_VECTORS, w_2, chunks_2, first_column,
                                          control.weights);
            }
            load_tiles<TWO>(own, x, chunks_1, range, walk, &x_2, chunks_2);
        }
    } else {
        uint4 *const own_results = all_results + warp * results * RESULT_VECTORS;
        const int own_row = warp % TEAM_WARPS * WARP_ROWS;

        Addends addends{addend, walk, control.addend[warp], own_results, range, first_column, own_row, PARTS, results};
        if (ADD && lane == 0) addends.load_all();

        PipelineState pipe, result;
        mbarrier_wait(control.weights, 0);
        for (uint32 tile = range.first; tile < range.end; tile += range.step) {
            float products[COLUMNS / 8][4];
            init_accumulators(products, control.bias, lane);
            multiply_tile<T>(products, weights, chunks, own, pipe, lane);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                uint4 *const part = own_results + result.index * RESULT_VECTORS;
                acquire_slot<ADD, 2>(control.addend[warp][result.index], result, results, lane);
                finish_part<T, ADD, RELU>(products, p, part, lane);
                tma_store_fence();
                __syncwarp();
                if (lane == 0) {
                    tma_store(y, first_column + p * CHUNK, tile * walk.y_row + own_row, tile * walk.y_line, part);
                    if (ADD && (p > 0 || tile != range.first)) addends.refill_before<1>(result.index);
                }
                result.advance(results);
            }
        }
        if (lane == 0) tma_store_wait<0>();
    }
}
