// Two INT8 1x1 convolutions after one another in one launch, on Hopper: the last of a residual block, with the sum, and the
// first of the next block. What is between them is written, for the next sum reads it too, but not read again.
// quantised_stream.cuh says how the first works.
//
// A warp has all columns of its rows. What it has requantised of them is, in the same registers, the first operand of the
// second product: in sums over K any order of K will do, so the weights are kept in the order that a thread has.
#include "quantised_stream.cuh"

constexpr int TEAMS = 2, MULTIPLYING = TEAMS * TEAM_WARPS;
constexpr int COLUMNS = MAX_COLUMNS, PARTS = COLUMNS / CHUNK;  // of y
constexpr int PAIR_THREADS = (MULTIPLYING + 4) * WARP;  // registers go from four warps to others, so two more start and end
constexpr int WORD = 4;                                 // channels

// At the start of shared memory. Behind it, in vectors: the weights of both, (chunks, COLUMNS * 8) and (PARTS, SECOND * 8);
// `stages` tiles of each team's x; `results` parts of each multiplying warp's y; a part of its z.
template <int SECOND> struct alignas(1024) PairControl {
    Control<TEAMS, COLUMNS, 1> first;
    Factors<SECOND> factors;
};

// The weights (K_2, K) of the second convolution. In tiles of 128 channels, of which a product takes 32: as thread t of a quad
// has them in `Words`, its words are those at t and t + 4.
template <int SECOND> __device__ inline void keep_second_weights(uint4 *to, const uint32 *weight, int channels, int filters) {
    for (int i = threadIdx.x; i < PARTS * SECOND * CHUNK_VECTORS; i += blockDim.x) {
        const int vector = i % CHUNK_VECTORS, column = i / CHUNK_VECTORS % SECOND, part = i / CHUNK_VECTORS / SECOND;
        const int filter = streamed_filter<SECOND>(column);
        alignas(16) uint32 words[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int channel = part * CHUNK + 2 * VECTOR * t + WORD * vector;
            words[t] = filter < filters && channel < channels ? weight[(filter * channels + channel) / WORD] : 0;
        }
        to[part * SECOND * CHUNK_VECTORS + swizzled(column, vector)] = *reinterpret_cast<const uint4 *>(words);
    }
}

// y as by quantised_conv_stream with an addend and ReLU, and z the convolution of y, requantised, then ReLU. The map of z is by
// tiles of 16 rows and 128 columns. gridDim.y blocks share the rows.
// Shapes: x (rows, C), weight (K, C), addend and y (rows, K), weight_2 (K_2, K), z (rows, K_2) int8; multiplier (K),
// multiplier_2 (K_2) fp32; bias (K), bias_2 (K_2) int32. C, K and K_2 are multiples of 16; filters = K is COLUMNS at most,
// filters_2 = K_2 is SECOND at most; C fits into `chunks` of 128 channels.
template <int SECOND>
__global__ void __launch_bounds__(PAIR_THREADS, 1)
quantised_pair(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap addend,
               const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap z, const uint4 *weight,
               const float *multiplier, const int *bias, const uint32 *weight_2, const float *multiplier_2, const int *bias_2,
               uint32 rows, TileWalk walk, int channels, int filters, int filters_2, float addend_share, int chunks,
               int stages, int results) {
    extern __shared__ __align__(1024) uint4 memory[];
    PairControl<SECOND> &both = *reinterpret_cast<PairControl<SECOND> *>(memory);
    auto &control = both.first;
    Factors<COLUMNS> &factors = control.factors[0];
    uint4 *const weights = memory + sizeof(both) / VECTOR_BYTES;
    uint4 *const weights_2 = weights + chunks * COLUMNS * CHUNK_VECTORS;
    uint4 *const tiles_of_x = weights_2 + PARTS * SECOND * CHUNK_VECTORS;
    uint4 *const all_results = tiles_of_x + TEAMS * stages * TILE_VECTORS;
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    const bool multiplies = warp < MULTIPLYING;
    const int team = multiplies ? warp / TEAM_WARPS : warp - MULTIPLYING;
    const Share share{blockIdx.y * TEAMS + team, (rows + walk.rows - 1) / walk.rows, gridDim.y * TEAMS};

    keep_weights<COLUMNS>(weights, weight, chunks, channels, 0, filters);
    close_copies();
    keep_second_weights<SECOND>(weights_2, weight_2, filters, filters_2);
    keep_factors(factors, multiplier, bias, Bytes<true>::UNIT, 0, filters);
    keep_factors(both.factors, multiplier_2, bias_2, Bytes<true>::UNIT, 0, filters_2);
    if (threadIdx.x == 0) init_barriers(control, stages, results);
    wait_for_copies<0>();
    show_to_products();  // the weights
    __syncthreads();

    const Stages own{tiles_of_x + team * stages * TILE_VECTORS, control.full[team], control.empty[team], stages};
    if (!multiplies) {
        leave_registers<24>();
        if (lane == 0 && team < TEAMS) {
            fetch_map(y);
            fetch_map(z);
            load_tiles<false>(own, x, chunks, share, walk, x, 0);
        }
    } else {
        take_registers<240>();  // products of both, and what is between them
        uint4 *const own_results = all_results + warp * results * RESULT_VECTORS;
        uint4 *const own_z = all_results + (MULTIPLYING * results + warp) * RESULT_VECTORS;
        const int own_row = warp % TEAM_WARPS * WARP_ROWS;
        Addends addends{addend, walk, control.addend[warp], own_results, share, 0, own_row, PARTS};
        if (lane == 0)
            for (int place = 0; place < results; ++place) addends.load(place);

        Turn turn, result;
        for (uint32 tile = share.first; tile < share.end; tile += share.step) {
            const int row = tile * walk.y_row + own_row;
            int products[COLUMNS / 8][4], second[SECOND / 8][4];
            alignas(16) Words words[PARTS];
            multiply_tile(products, factors, weights, chunks, channels, own, turn, lane);
            begin_with_bias(second, both.factors, lane);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                uint4 *const part = own_results + result.place * RESULT_VECTORS;
                wait_for_phase(control.addend[warp][result.place], result.parity);
                load_words(words[p], part, lane);
                requantise(products, p, factors, words[p], lane, ToInt8<true, true>{addend_share});
                store_words(words[p], part, lane);
                show_to_copies();
                __syncwarp();
                if (lane == 0) store_tile(y, p * CHUNK, row, 0, part);
                __syncwarp();
                open_integers();
#pragma unroll
                for (int s = 0; s < CHUNK / STEP; ++s) {
                    const uint32(&of)[2][4] = words[p][s / 2];
                    const int i = s % 2 * 2;
                    const uint32 rows_of_y[4] = {of[0][i], of[1][i], of[0][i + 1], of[1][i + 1]};
                    multiply_integers(second, rows_of_y, matrix(weights_2 + p * SECOND * CHUNK_VECTORS + s * 2));
                }
                close_integers();
                if (p > 0 && lane == 0) {
                    wait_for_stores<1>();
                    addends.load(result.place == 0 ? results - 1 : result.place - 1);
                }
                result.next(results);
            }
            wait_for_integers();
            hold_integers(second);
            __syncwarp();  // the place of z is free: stores of y that came after the last z have been waited for
            requantise(second, 0, both.factors, words[0], lane, ToInt8<false, true>{});
            store_words<SECOND / 64>(words[0], own_z, lane);
            show_to_copies();
            __syncwarp();
            if (lane == 0) {
                store_tile(z, 0, row, 0, own_z);
                wait_for_stores<1>();
                addends.load(result.place == 0 ? results - 1 : result.place - 1);
            }
        }
        if (lane == 0) wait_for_stores<0>();
    }
}
