// Two consecutive 1x1 convolutions in one launch: the last convolution of a residual block, with the addition, and the
// first convolution of the next block. The tensor between both convolutions is written, because the next addition reads
// it, but this kernel does not read it again. conv1x1_forward.cuh explains the first convolution.
//
// A warp has all columns of its rows. The values that it has rounded and stored are, in the same registers, the A operand of
// the second product: the accumulator layout of `mma.m16n8k16` equals its A fragment layout. So the second product needs no
// shared memory for A, and the four warps of a team synchronise only to start wgmma.
#include "conv1x1_forward.cuh"

// COLUMNS: columns of y; MAX_SECOND: most columns of z
constexpr int COLUMNS = MAX_COLUMNS, PARTS = COLUMNS / CHUNK, MAX_SECOND = 128;
// setmaxnreg works on whole warpgroups: two of the four producer warps have nothing else to do
constexpr int PAIR_THREADS = (MMA_WARPS + 4) * WARP;

// At the start of shared memory. Then follow, in vectors: the weights of both convolutions, (chunks, COLUMNS * 8) and (PARTS,
// SECOND * 8); `stages` tiles of x for each team; `results` parts of y for each MMA warp; z of each MMA warp.
struct alignas(1024) PairControl { Control control; float bias[MAX_SECOND]; };

// y = ReLU(x * w + bias + addend), rounded, and z = ReLU(y * w_2 + bias_2). The tensor maps are as for conv1x1_forward; w_2
// has tiles of SECOND rows and 64 columns, z of 16 rows and 64 columns. gridDim.y blocks share the rows.
// Shapes: x (rows, C), w (K, C), y and addend (rows, K), w_2 (K_2, K), z (rows, K_2); bias (K), bias_2 (K_2) fp32. columns =
// K <= COLUMNS, columns_2 = K_2 <= SECOND; C fits into `chunks` of 64 channels.
template <class T, int SECOND>
__global__ void __launch_bounds__(PAIR_THREADS, 1)
conv1x1_pair(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
             const __grid_constant__ TensorMap addend, const __grid_constant__ TensorMap y,
             const __grid_constant__ TensorMap w_2, const __grid_constant__ TensorMap z, const float *bias,
             const float *bias_2, uint32 rows, TileStep walk, int columns, int columns_2, int chunks, int stages, int results) {
    constexpr int SECOND_PARTS = SECOND / CHUNK;
    extern __shared__ __align__(1024) uint4 memory[];
    PairControl &both = *reinterpret_cast<PairControl *>(memory);
    Control &control = both.control;
    uint4 *const weights = memory + sizeof(PairControl) / VECTOR_BYTES;
    uint4 *const weights_2 = weights + chunks * COLUMNS * CHUNK_VECTORS;
    uint4 *const tiles_of_x = weights_2 + PARTS * SECOND * CHUNK_VECTORS;
    uint4 *const all_results = tiles_of_x + TEAMS * stages * TILE_VECTORS;
    const int lane = lane_index(), warp = warp_index();
    const WarpRole<TEAMS> role(warp);
    const TileRange range = tiles_of<TEAMS>(role.team, rows, walk.rows);

    for (int n = threadIdx.x; n < COLUMNS; n += PAIR_THREADS) control.bias[n] = n < columns ? bias[n] : 0;
    for (int n = threadIdx.x; n < SECOND; n += PAIR_THREADS) both.bias[n] = n < columns_2 ? bias_2[n] : 0;
    if (threadIdx.x == 0) init_barriers(control, stages, results);
    __syncthreads();

    const Stages own(control, role.team, tiles_of_x, stages);
    if (!role.is_mma_warp) {
        setmaxnreg_dec<24>();
        if (lane == 0 && role.team < TEAMS) {
            if (role.team == 0) {
                prefetch_tensormap(y);
                prefetch_tensormap(z);
                arrive_expect_tx(control.weights, (chunks * COLUMNS + PARTS * SECOND) * CHUNK_VECTORS * VECTOR_BYTES);
                load_weights<COLUMNS>(weights, w, chunks, 0, control.weights);
                load_weights<SECOND>(weights_2, w_2, PARTS, 0, control.weights);
            }
            load_tiles(own, x, chunks, range, walk);
        }
    } else {
        setmaxnreg_inc<240>();  // registers for the accumulators of both products, and for the fragments between them
        uint4 *const own_results = all_results + warp * results * RESULT_VECTORS;
        uint4 *const own_z = all_results + (MMA_WARPS * results + warp * SECOND_PARTS) * RESULT_VECTORS;
        const int own_row = warp % TEAM_WARPS * WARP_ROWS;
        Addends addends{addend, walk, control.addend[warp], own_results, range, 0, own_row, PARTS, results};
        if (lane == 0) addends.load_all();

        PipelineState pipe, result;
        mbarrier_wait(control.weights, 0);
        for (uint32 tile = range.first; tile < range.end; tile += range.step) {
            const int row = tile * walk.y_row + own_row;
            float products[COLUMNS / 8][4], second[SECOND / 8][4];
            init_accumulators(products, control.bias, lane);
            init_accumulators(second, both.bias, lane);
            multiply_tile<T>(products, weights, chunks, own, pipe, lane);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                uint4 *const part = own_results + result.index * RESULT_VECTORS;
                uint32 m[CHUNK / 16][4];
                mbarrier_wait(control.addend[warp][result.index], result.phase);
#pragma unroll
                for (int pair = 0; pair < CHUNK / 16; ++pair)
                    finish<T, true, true>(products[p * 8 + pair * 2], products[p * 8 + pair * 2 + 1],
                                          part + matrix_row(lane, pair), m[pair]);
                tma_store_fence();
                __syncwarp();
                if (lane == 0) tma_store(y, p * CHUNK, row, 0, part);
                __syncwarp();
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < CHUNK / 16; ++s)
                    wgmma_k_k(second, m[s], smem_desc(weights_2 + p * SECOND * CHUNK_VECTORS + s * 2), T{});
                wgmma_commit();
                if (p > 0 && lane == 0) addends.refill_before<1>(result.index);
                result.advance(results);
            }
            wgmma_wait();
            wgmma_fence_operand(second);
            // The slots of z are free: this warp has waited for stores of y that it started after the previous stores
            // of z.
#pragma unroll
            for (int p = 0; p < SECOND_PARTS; ++p) finish_part<T, false, true>(second, p, own_z + p * RESULT_VECTORS, lane);
            tma_store_fence();
            __syncwarp();
            if (lane == 0) {
                for (int p = 0; p < SECOND_PARTS; ++p) tma_store(z, p * CHUNK, row, 0, own_z + p * RESULT_VECTORS);
                addends.refill_before<SECOND_PARTS>(result.index);
            }
        }
        if (lane == 0) tma_store_wait<0>();
    }
}
