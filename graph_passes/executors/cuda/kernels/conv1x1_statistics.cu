// Forward pass of a 1x1 convolution in training, with the sums for the BatchNorm that follows. Within a residual block, the
// BatchNorm + ReLU before the convolution can be fused, too. conv1x1_forward.cuh explains the design.
//
// Separate warps compute the sums, one warp for each two MMA warps. They read the results in shared memory while the
// MMA warps continue.
//
// BatchNorm + ReLU are applied in registers, as in norm_stream.cuh, and the product reads these registers. The
// normalised tensor is written if other nodes read it. The blocks that compute different columns of the same rows take
// turns in writing it, tile by tile.
#include "moments.cuh"
#include "norm_stream.cuh"

constexpr int SUM_WARPS = MMA_WARPS / 2, BLOCK = THREADS + SUM_WARPS * WARP;

// Barrier of the MMA warps and the summing warps.
constexpr NamedBarrier<2, (MMA_WARPS + SUM_WARPS) * WARP> sync_mma_and_sum_warps{};

// products += relu(norm(x)) * w for the next tile of x. Calls `keep` with each chunk of relu(norm(x)).
template <class T, int PEERS, int N, class Keep>
__device__ inline void multiply_normalised(float (&products)[N][4], const uint4 *weights, const Affine *affine, int chunks,
                                           const Stages &stages, PipelineState &pipe, int own_row, int lane, Keep keep) {
#pragma unroll 1
    for (int c = 0; c < chunks; ++c, pipe.advance(stages.number)) {
        const uint4 *const part_of_x = stages.tiles + pipe.index * TILE_VECTORS + own_row * CHUNK_VECTORS;
        uint32 m[CHUNK / 16][4], unused[4];
        mbarrier_wait(stages.full[pipe.index], pipe.phase);
#pragma unroll
        for (int pair = 0; pair < CHUNK / 16; ++pair)
            normalise<T, NO_ADDEND>(affine[c], part_of_x, nullptr, pair, lane, m[pair], unused);
        __syncwarp();
        release<PEERS>(stages.empty[pipe.index], lane);
        keep(c, m);
        const uint4 *const b = weights + c * N * 8 * CHUNK_VECTORS;
        multiply_fragments<T>(products, m, b);
        wgmma_wait();
        wgmma_fence_operand(products);
    }
}

// The body of the kernels below. `norm_out` is the tensor map for the output of BatchNorm + ReLU, null if no other node
// reads this output.
template <class T, int COLUMNS, int PEERS, bool NORM>
__device__ inline void convolve(const TensorMap &x, const TensorMap &w, const TensorMap &y, const FusedNorm &before,
                                const TensorMap *norm_out, float *sums, float *partials, uint32 *tickets, uint32 rows,
                                const TileStep &walk, int columns, int chunks, int stages, int results) {
    constexpr int PARTS = COLUMNS / CHUNK, STORES_IN_FLIGHT = 2;  // TMA stores of results
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    Affine *const affine = reinterpret_cast<Affine *>(memory + sizeof(Control) / VECTOR_BYTES);
    uint4 *const weights = memory + sizeof(Control) / VECTOR_BYTES + (NORM ? affine_vectors(chunks) : 0);
    uint4 *const tiles_of_x = weights + chunks * COLUMNS * CHUNK_VECTORS;
    uint4 *const all_results = tiles_of_x + TEAMS * stages * TILE_VECTORS;
    const int lane = lane_index(), warp = warp_index();
    const bool is_mma_warp = warp < MMA_WARPS, is_sum_warp = warp >= MMA_WARPS + TEAMS;
    const int pair = warp - MMA_WARPS - TEAMS;  // index of the two MMA warps whose results this warp sums
    const int team = is_mma_warp ? warp / TEAM_WARPS : is_sum_warp ? pair * 2 / TEAM_WARPS : warp - MMA_WARPS;
    const int first_column = blockIdx.x * COLUMNS;
    const TileRange range = tiles_of<TEAMS>(team, rows, walk.rows);

    // result_full: the MMA warp has written the result. result_empty: the summing warp has read it.
    const auto result_full = [&](int warp, int slot) -> uint64 & { return control.addend[warp][slot]; };
    const auto result_empty = [&](int warp, int slot) -> uint64 & { return control.addend[warp][MAX_RESULTS / 2 + slot]; };
    const auto rows_of = [&](uint32 tile, int own_row) {
        return max(0, min(WARP_ROWS, min(walk.rows, int(rows - tile * walk.rows)) - own_row));
    };

    if (threadIdx.x == 0) init_barriers<PEERS>(control, stages, MAX_RESULTS);
    if (NORM && threadIdx.x < chunks * CHUNK_VECTORS) {
        const int channel = threadIdx.x * VEC, at = channel % CHUNK;
        const Forward of = before.forward(rows, channel, chunks * CHUNK, blockIdx.x == 0);
        store_floats(affine[channel / CHUNK].scale + at, of.scale);
        store_floats(affine[channel / CHUNK].shift + at, of.shift);
    }
    if (PEERS > 1)
        cluster_sync();
    else
        __syncthreads();

    const Stages own(control, team, tiles_of_x, stages);
    // pivots and sums of the two columns of each part that this thread sums
    float pivot[PARTS][2] = {}, of_column[PARTS][2][2] = {};
    uint32 counted = 0;                                      // rows summed so far
    if (is_sum_warp) {
        PipelineState result;
        for (uint32 tile = range.first; tile < range.end; tile += range.step) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                for (int of_warp = pair * 2; of_warp < pair * 2 + 2; ++of_warp) {
                    const uint4 *const part = all_results + (of_warp * results + result.index) * RESULT_VECTORS;
                    const int rows_here = rows_of(tile, of_warp % TEAM_WARPS * WARP_ROWS);
                    mbarrier_wait(result_full(of_warp, result.index), result.phase);
                    if (counted == 0 && of_warp == pair * 2 && rows_here > 0) set_pivot<T>(pivot[p], part, lane);
                    add_rows<T>(part, rows_here, lane, pivot[p], of_column[p]);
                    __syncwarp();
                    if (lane == 0) arrive(result_empty(of_warp, result.index));
                }
                result.advance(results);
            }
            for (int of_warp = pair * 2; of_warp < pair * 2 + 2; ++of_warp)
                counted += rows_of(tile, of_warp % TEAM_WARPS * WARP_ROWS);
        }
    } else if (!is_mma_warp) {
        if (lane == 0) {
            if (team == 0) {
                prefetch_tensormap(y);
                arrive_expect_tx(control.weights, chunks * COLUMNS * CHUNK_VECTORS * VECTOR_BYTES);
                load_weights<COLUMNS>(weights, w, chunks, first_column, control.weights);
            }
            load_tiles<false, PEERS>(own, x, chunks, range, walk);
        }
    } else {
        uint4 *const own_results = all_results + warp * results * RESULT_VECTORS;
        uint4 *const own_norm_out = all_results + (MMA_WARPS * results + warp) * RESULT_VECTORS;
        const int own_row = warp % TEAM_WARPS * WARP_ROWS;
        PipelineState pipe, result, of_blocks;
        mbarrier_wait(control.weights, 0);
        for (uint32 tile = range.first; tile < range.end; tile += range.step) {
            float products[COLUMNS / 8][4] = {};
            if constexpr (NORM) {
                const bool keeps = norm_out && of_blocks.index == blockIdx.x;
                multiply_normalised<T, PEERS>(products, weights, affine, chunks, own, pipe, own_row, lane,
                                              [&](int c, const uint32 (&m)[CHUNK / 16][4]) {
                    if (!keeps) return;
                    store_fragments(*norm_out, c * CHUNK, tile * ROWS + own_row, m, own_norm_out, lane);
                });
                of_blocks.advance(gridDim.x);
            } else {
                multiply_tile<T, false, PEERS>(products, weights, chunks, own, pipe, lane);
            }

#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                uint4 *const part = own_results + result.index * RESULT_VECTORS;
                mbarrier_wait(result_empty(warp, result.index), result.phase ^ 1);  // the first round does not wait
                if (lane == 0) tma_store_wait<STORES_IN_FLIGHT>();
                __syncwarp();
                finish_part<T, false, false>(products, p, part, lane);
                tma_store_fence();
                __syncwarp();
                if (lane == 0) {
                    tma_store(y, first_column + p * CHUNK, tile * walk.y_row + own_row, tile * walk.y_line, part);
                    arrive(result_full(warp, result.index));
                }
                result.advance(results);
            }
        }
        if (lane == 0) tma_store_wait<0>();
    }
    __syncwarp();
    if (PEERS > 1) cluster_sync();  // a peer may still signal an empty stage until here
    if (!is_mma_warp && !is_sum_warp) return;

    // Combines the moments of the summing warps, then the moments of all blocks of the same columns.
    sync_mma_and_sum_warps();  // reuses the memory of the tiles
    if (is_sum_warp) {
        Moments *const of_pair = reinterpret_cast<Moments *>(tiles_of_x) + pair * COLUMNS;
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int k = 0; k < 2; ++k)
                of_pair[p * CHUNK + lane * 2 + k] =
                    Moments::from_sums(pivot[p][k], counted, of_column[p][k][0], of_column[p][k][1]);
    }
    sync_mma_and_sum_warps();
    if (is_sum_warp) return;
    finish_column_moments<COLUMNS, MMA_WARPS * WARP>(reinterpret_cast<Moments *>(tiles_of_x), SUM_WARPS, first_column, columns,
                                                     partials, tickets, sums, sync_mma_warps);
}

// y = x * w. `sums` are the sums of y about the mean of each column, in a fixed order.
// Tiles of the tensor maps: x `walk.rows` rows and 64 columns, w COLUMNS rows and 64 columns, y 16 rows and 64 columns. With
// stride 2, the map of x skips pixels: a tile of x is whole lines of an image, and a line of the map of y is a tile.
// gridDim.x blocks, in clusters of PEERS, share the columns; gridDim.y the rows.
// Shapes: x (rows, C), w (K, C), y (rows, K); sums (3, K), partials (3 * gridDim.y * K) fp32; tickets (gridDim.x). columns =
// K; C fits into `chunks` of 64 channels.
template <class T, int COLUMNS, int PEERS>
__global__ void __cluster_dims__(PEERS, 1, 1) __launch_bounds__(BLOCK, 1)
conv1x1_statistics(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap y,
                   float *sums, float *partials, uint32 *tickets, uint32 rows, TileStep walk, int columns, int chunks, int stages,
                   int results) {
    convolve<T, COLUMNS, PEERS, false>(x, w, y, {}, nullptr, sums, partials, tickets, rows, walk, columns, chunks, stages,
                                       results);
}

// y = relu(BatchNorm(x)), with the values that `Forward` saves, and z = y * w, with the sums of z. The tensor maps are
// as above; y has tiles like z. y is written if `is_read`.
// Shapes: x, y (rows, C), w (K, C), z (rows, K); sums (2 or 3, C), saved (2, C), gamma, beta, running_mean, running_var
// (C), sums_of_z (3, K), partials (3 * gridDim.y * K) fp32; tickets (gridDim.x). columns = K, C = chunks * 64.
template <class T, int COLUMNS, int PEERS>
__global__ void __cluster_dims__(PEERS, 1, 1) __launch_bounds__(BLOCK, 1)
norm_relu_conv1x1(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap y,
                  const __grid_constant__ TensorMap z, bool is_read, const float *sums, bool about_mean, const float *gamma,
                  const float *beta, float *saved, float *running_mean, float *running_var, float eps, float momentum,
                  float *sums_of_z, float *partials, uint32 *tickets, uint32 rows, TileStep walk, int columns, int chunks,
                  int stages, int results) {
    const FusedNorm before{sums, about_mean, gamma, beta, saved, running_mean, running_var, eps, momentum};
    convolve<T, COLUMNS, PEERS, true>(x, w, z, before, is_read ? &y : nullptr, sums_of_z, partials, tickets, rows, walk, columns,
                                      chunks, stages, results);
}
