// INT8 1x1 convolutions that are bound by memory, on Hopper. Optionally fused with the convolution of a projection shortcut,
// whose results are added and stay in registers. quantised_stream.cuh explains the design.
#include "quantised_stream.cuh"

template <int TEAMS> constexpr int THREADS = TEAMS * (TEAM_WARPS + 1) * WARP;
template <int TEAMS, int COLUMNS> constexpr int BLOCKS = 2 * MAX_COLUMNS / (TEAMS * COLUMNS);  // blocks per SM

// Tiles of the tensor maps: x `walk.rows` rows and 128 columns, y and addend 16 rows and 128 columns. With stride 2, the map
// of x skips pixels: a tile of x is whole lines of an image, and a line of the map of y is a tile. gridDim.x blocks share the
// columns, gridDim.y the rows.
//
// With TWO, x is the input of a projection shortcut, whose results are added to the convolution of x_2; the map of x_2
// has the same lines as the map of y. C and C_2 fit into `chunks` and `chunks_2` of 128 channels.
// Shapes: x (rows, C), weight (K, C), x_2 (rows, C_2), weight_2 (K, C_2), addend and y (rows, K) int8; multiplier and
// multiplier_2 (K) fp32; bias and bias_2 (K) int32. C, C_2 and K are multiples of 16, filters = K.
template <int TEAMS, int COLUMNS, bool ADD, bool RELU, bool TWO>
__global__ void __launch_bounds__(THREADS<TEAMS>, BLOCKS<TEAMS, COLUMNS>)
quantised_conv_stream(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap addend,
                      const __grid_constant__ TensorMap y, const uint4 *weight, const float *multiplier, const int *bias,
                      uint32 rows, TileStep walk, int channels, int filters, float addend_share, int chunks, int stages,
                      int results, const __grid_constant__ TensorMap x_2, const uint4 *weight_2, const float *multiplier_2,
                      const int *bias_2, int channels_2, int chunks_2) {
    static_assert(!(ADD && TWO), "either an addend or a second convolution");
    constexpr int PARTS = COLUMNS / CHUNK, CONVOLUTIONS = TWO ? 2 : 1, MMA_WARPS = TEAMS * TEAM_WARPS;
    extern __shared__ __align__(1024) uint4 memory[];
    auto &control = *reinterpret_cast<Control<TEAMS, COLUMNS, CONVOLUTIONS> *>(memory);
    // the same object unless TWO
    Factors<COLUMNS> &factors = control.factors[0], &factors_2 = control.factors[CONVOLUTIONS - 1];
    uint4 *const weights = memory + sizeof(control) / VECTOR_BYTES;
    uint4 *const weights_2 = weights + chunks * COLUMNS * CHUNK_VECTORS;
    uint4 *const tiles_of_x = weights_2 + (TWO ? chunks_2 * COLUMNS * CHUNK_VECTORS : 0);
    uint4 *const all_results = tiles_of_x + TEAMS * stages * TILE_VECTORS;
    const int lane = lane_index(), warp = warp_index();
    const WarpRole<TEAMS> role(warp);
    const int first_column = blockIdx.x * COLUMNS;
    const TileRange range = tiles_of<TEAMS>(role.team, rows, walk.rows);

    if (threadIdx.x == 0) init_tile_barriers<TEAMS>(control, stages, ADD ? results : 0);
    __syncthreads();

    const Stages own(control, role.team, tiles_of_x, stages);
    if (!role.is_mma_warp) {
        if (lane != 0) return;
        prefetch_tensormap(y);
        load_tiles<TWO>(own, x, chunks, range, walk, x_2, chunks_2);
        return;
    }

    uint4 *const own_results = all_results + warp * results * RESULT_VECTORS;
    const int own_row = warp % TEAM_WARPS * WARP_ROWS;

    Addends addends{addend, walk, control.addend[warp], own_results, range, first_column, own_row, PARTS, results};
    if (ADD && lane == 0) addends.load_all();

    load_weights<TEAMS, COLUMNS>(weights, weight, chunks, channels, first_column, filters);
    if (TWO) load_weights<TEAMS, COLUMNS>(weights_2, weight_2, chunks_2, channels_2, first_column, filters);
    cp_async_commit();
    load_factors<TEAMS>(factors, multiplier, bias, TWO ? ToShifted::UNIT : Bytes<RELU>::UNIT, first_column, filters);
    if (TWO) load_factors<TEAMS>(factors_2, multiplier_2, bias_2, Bytes<RELU>::UNIT, first_column, filters);
    cp_async_wait<0>();
    fence_view_async_shared();  // makes the weights visible to wgmma
    sync_mma_warps<TEAMS>();

    PipelineState pipe, result;
    for (uint32 tile = range.first; tile < range.end; tile += range.step) {
        int products[COLUMNS / 8][4];
        alignas(16) Words words[PARTS];
        multiply_tile(products, factors, weights, chunks, channels, own, pipe, lane);
        if constexpr (TWO) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) requantise(products, p, factors, words[p], lane, ToShifted{});
            multiply_tile(products, factors_2, weights_2, chunks_2, channels_2, own, pipe, lane);
        }
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            uint4 *const part = own_results + result.index * RESULT_VECTORS;
            acquire_slot<ADD, 1>(control.addend[warp][result.index], result, results, lane);
            if (ADD) load_words(words[p], part, lane);
            requantise(products, p, factors_2, words[p], lane, ToInt8<ADD || TWO, RELU, TWO>{addend_share});
            store_words(words[p], part, lane);
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
