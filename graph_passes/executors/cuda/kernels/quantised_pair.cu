// Two consecutive INT8 1x1 convolutions in one launch, on Hopper: the last convolution of a residual block, with the
// addition, and the first convolution of the next block. The former can also be fused with the convolution of a
// projection shortcut. The tensor between both convolutions is written, because the next addition reads it, but this
// kernel does not read it again. quantised_stream.cuh explains the first convolution.
//
// A warp has all columns of its rows. The values that it has requantised are, in the same registers, the A operand of the
// second product. A sum over K may have any order of K, so the second convolution's weights are stored in the order of the
// registers.
#include "quantised_stream.cuh"

constexpr int TEAMS = 2, MMA_WARPS = TEAMS * TEAM_WARPS;
constexpr int COLUMNS = MAX_COLUMNS, PARTS = COLUMNS / CHUNK;  // columns of y
// setmaxnreg works on whole warpgroups: two of the four producer warps have nothing else to do
constexpr int PAIR_THREADS = (MMA_WARPS + 4) * WARP;
constexpr int WORD = 4;                                 // channels of a word

// At the start of shared memory. Then follow, in vectors: the weights (chunks, COLUMNS * 8), with a shortcut (chunks_2,
// COLUMNS * 8), and of the second convolution (PARTS, Z_COLUMNS * 8); `stages` tiles of x for each team; `results` parts of y
// for each MMA warp; a part of z for each MMA warp.
template <int Z_COLUMNS, bool TWO> struct alignas(1024) PairControl {
    Control<TEAMS, COLUMNS, TWO ? 2 : 1> of_y;
    Factors<Z_COLUMNS> of_z;
};

// Loads the second convolution's weights (K_Z, K), in tiles of 128 channels; one wgmma takes 32. The weights are in the
// register order of `Words`: the A fragment words t and t + 4 belong to thread t of a quad.
template <int Z_COLUMNS>
__device__ inline void load_second_weights(uint4 *to, const uint32 *weight, int channels, int filters) {
    for (int i = threadIdx.x; i < PARTS * Z_COLUMNS * CHUNK_VECTORS; i += MMA_THREADS<TEAMS>) {
        const int vector = i % CHUNK_VECTORS, column = i / CHUNK_VECTORS % Z_COLUMNS, part = i / CHUNK_VECTORS / Z_COLUMNS;
        const int filter = streamed_filter<Z_COLUMNS>(column);
        alignas(16) uint32 words[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int channel = part * CHUNK + 2 * VECTOR * t + WORD * vector;
            words[t] = filter < filters && channel < channels ? weight[(filter * channels + channel) / WORD] : 0;
        }
        to[part * Z_COLUMNS * CHUNK_VECTORS + swizzled(column, vector)] = *reinterpret_cast<const uint4 *>(words);
    }
}

// y = the result of quantised_conv_stream with ReLU and an addend, or with TWO convolutions. z = the convolution of y,
// requantised, then ReLU. The tensor map of z has tiles of 16 rows and 128 columns, and the lines of y. gridDim.y blocks
// share the rows.
// Shapes: x (rows, C), weight (K, C), x_2 (rows, C_2), weight_2 (K, C_2), addend and y (rows, K), weight_z (K_Z, K), z (rows,
// K_Z) int8; multiplier and multiplier_2 (K), multiplier_z (K_Z) fp32; bias and bias_2 (K), bias_z (K_Z) int32. C, C_2, K and
// K_Z are multiples of 16; filters = K <= COLUMNS, filters_z = K_Z <= Z_COLUMNS.
template <int Z_COLUMNS, bool TWO>
__global__ void __launch_bounds__(PAIR_THREADS, 1)
quantised_pair(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap addend,
               const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap z, const uint4 *weight,
               const float *multiplier, const int *bias, const uint32 *weight_z, const float *multiplier_z, const int *bias_z,
               uint32 rows, TileStep walk, int channels, int filters, int filters_z, float addend_share, int chunks,
               int stages, int results, const __grid_constant__ TensorMap x_2, const uint4 *weight_2,
               const float *multiplier_2, const int *bias_2, int channels_2, int chunks_2) {
    constexpr int CONVOLUTIONS = TWO ? 2 : 1;
    extern __shared__ __align__(1024) uint4 memory[];
    auto &both = *reinterpret_cast<PairControl<Z_COLUMNS, TWO> *>(memory);
    auto &control = both.of_y;
    // the same object unless TWO
    Factors<COLUMNS> &factors = control.factors[0], &factors_2 = control.factors[CONVOLUTIONS - 1];
    uint4 *const weights = memory + sizeof(both) / VECTOR_BYTES;
    uint4 *const weights_2 = weights + chunks * COLUMNS * CHUNK_VECTORS;
    uint4 *const weights_z = weights_2 + (TWO ? chunks_2 * COLUMNS * CHUNK_VECTORS : 0);
    uint4 *const tiles_of_x = weights_z + PARTS * Z_COLUMNS * CHUNK_VECTORS;
    uint4 *const all_results = tiles_of_x + TEAMS * stages * TILE_VECTORS;
    const int lane = lane_index(), warp = warp_index();
    const WarpRole<TEAMS> role(warp);
    const TileRange range = tiles_of<TEAMS>(role.team, rows, walk.rows);

    if (threadIdx.x == 0) init_tile_barriers<TEAMS>(control, stages, TWO ? 0 : results);
    __syncthreads();

    const Stages own(control, role.team, tiles_of_x, stages);
    if (!role.is_mma_warp) {
        setmaxnreg_dec<24>();
        if (lane == 0 && role.team < TEAMS) {
            prefetch_tensormap(y);
            prefetch_tensormap(z);
            load_tiles<TWO>(own, x, chunks, range, walk, x_2, chunks_2);
        }
    } else {
        setmaxnreg_inc<240>();  // registers for the accumulators of both products, and for the fragments between them
        uint4 *const own_results = all_results + warp * results * RESULT_VECTORS;
        uint4 *const own_z = all_results + (MMA_WARPS * results + warp) * RESULT_VECTORS;
        const int own_row = warp % TEAM_WARPS * WARP_ROWS;
        Addends addends{addend, walk, control.addend[warp], own_results, range, 0, own_row, PARTS, results};
        if (!TWO && lane == 0) addends.load_all();

        load_weights<TEAMS, COLUMNS>(weights, weight, chunks, channels, 0, filters);
        if (TWO) load_weights<TEAMS, COLUMNS>(weights_2, weight_2, chunks_2, channels_2, 0, filters);
        cp_async_commit();
        load_second_weights<Z_COLUMNS>(weights_z, weight_z, filters, filters_z);
        load_factors<TEAMS>(factors, multiplier, bias, TWO ? ToShifted::UNIT : Bytes<true>::UNIT, 0, filters);
        if (TWO) load_factors<TEAMS>(factors_2, multiplier_2, bias_2, Bytes<true>::UNIT, 0, filters);
        load_factors<TEAMS>(both.of_z, multiplier_z, bias_z, Bytes<true>::UNIT, 0, filters_z);
        cp_async_wait<0>();
        fence_view_async_shared();  // makes the weights visible to wgmma
        sync_mma_warps<TEAMS>();

        // Waits until the next slot is free. A tile has PARTS + 1 stores, PARTS of y and one of z; the slot's last store is older
        // than the latest PARTS stores.
        const auto wait_for_place = [&] {
            if (lane == 0) tma_store_wait<PARTS>();
            __syncwarp();
        };

        PipelineState pipe, result;
        for (uint32 tile = range.first; tile < range.end; tile += range.step) {
            const int row = tile * walk.y_row + own_row, line = tile * walk.y_line;
            int products[COLUMNS / 8][4], products_z[Z_COLUMNS / 8][4];
            alignas(16) Words words[PARTS];
            multiply_tile(products, factors, weights, chunks, channels, own, pipe, lane);
            if constexpr (TWO) {
#pragma unroll
                for (int p = 0; p < PARTS; ++p) requantise(products, p, factors, words[p], lane, ToShifted{});
                multiply_tile(products, factors_2, weights_2, chunks_2, channels_2, own, pipe, lane);
            }
            init_accumulators(products_z, both.of_z, lane);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                uint4 *const part = own_results + result.index * RESULT_VECTORS;
                if (TWO) {
                    wait_for_place();
                } else {
                    mbarrier_wait(control.addend[warp][result.index], result.phase);
                    load_words(words[p], part, lane);
                }
                requantise(products, p, factors_2, words[p], lane, ToInt8<true, true, TWO>{addend_share});
                store_words(words[p], part, lane);
                tma_store_fence();
                __syncwarp();
                if (lane == 0) tma_store(y, p * CHUNK, row, line, part);
                __syncwarp();
                int8_mma_fence();
#pragma unroll
                for (int s = 0; s < CHUNK / STEP; ++s) {
                    const uint32(&of)[2][4] = words[p][s / 2];
                    const int i = s % 2 * 2;
                    const uint32 rows_of_y[4] = {of[0][i], of[1][i], of[0][i + 1], of[1][i + 1]};
                    int8_mma(products_z, rows_of_y, smem_desc(weights_z + p * Z_COLUMNS * CHUNK_VECTORS + s * 2));
                }
                int8_mma_commit();
                if (!TWO && p > 0 && lane == 0) addends.refill_before<1>(result.index);
                result.advance(results);
            }
            int8_mma_wait();
            int8_mma_fence_operand(products_z);
            wait_for_place();
            requantise(products_z, 0, both.of_z, words[0], lane, ToInt8<false, true>{});
            store_words<Z_COLUMNS / 64>(words[0], own_z, lane);
            tma_store_fence();
            __syncwarp();
            if (lane == 0) {
                tma_store(z, 0, row, line, own_z);
                if (!TWO) addends.refill_before<1>(result.index);
            }
        }
        if (lane == 0) tma_store_wait<0>();
    }
}
