// In training, the end of a residual block, BatchNorm + addition + ReLU, and the 1x1 convolution that begins the next
// block, in one launch. The tensor between the two is written because later nodes read it, but the convolution does not
// read it from memory.
//
// norm_stream.cuh explains the design; here each tile of x is loaded together with a tile of the addend. A block can
// keep the weights of 128 outputs. Weights of 256 outputs are too large for shared memory and are streamed.
#include "moments.cuh"
#include "norm_stream.cuh"

template <int COLUMNS> constexpr bool STREAMED = COLUMNS > 128;
// With streamed weights, setmaxnreg moves registers between whole warpgroups, so there are four producer warps.
template <int COLUMNS> constexpr int BLOCK = STREAMED<COLUMNS> ? STREAMING : THREADS;

// Called by one thread. Starts the loads of a team's tiles of x and of the addend, from the last rows on.
__device__ inline void load_both(const Stages &stages, int chunks, const TensorMap &x, const TensorMap &addend,
                                 const TileRange &range) {
    PipelineState pipe;
    for (uint32 n = range.first; n < range.end; n += range.step)
        for (int c = 0; c < chunks; ++c) {
            const Corner at{c * CHUNK, int(range.end - 1 - n) * ROWS};
            load_two(stages, pipe, x, at, addend, at);
        }
}

// Merges the bits of the four threads of a row. Each of the four threads returns one word, with the number lane % 4.
__device__ inline uint32 gathered(uint32 (&bits)[4], int lane) {
    const bool last_rows = lane & 2, last_channels = lane & 1;
#pragma unroll
    for (int w = 0; w < 4; ++w) bits[w] <<= lane % 4 * 2;
    uint32 own[2];
#pragma unroll
    for (int w = 0; w < 2; ++w)
        own[w] = (last_rows ? bits[2 + w] : bits[w]) | __shfl_xor_sync(0xffffffff, last_rows ? bits[w] : bits[2 + w], 2);
    return (last_channels ? own[1] : own[0]) | __shfl_xor_sync(0xffffffff, last_channels ? own[0] : own[1], 1);
}

// y = relu(norm(x) + addend), or with PAIR relu(norm(x) + norm_2(addend)). Also stores ReLU's bits in `mask`, and the
// values that `Forward` saves. z = y * w, with its sums about the mean, in a fixed order. Tiles of the tensor maps: x
// and addend 64 rows and columns, w COLUMNS rows and 64 columns, y and z 16 rows and 64 columns. gridDim.y blocks share
// the rows.
// Shapes: x, addend, y (rows, C), w (K, C), z (rows, K), mask (rows, C / 8) bytes; sums (2 or 3, C), saved (2, C),
// gamma, beta, running_mean, running_var (C) fp32, likewise the operands with _2; sums_of_z (3, K), partials (3 *
// gridDim.y * K) fp32; tickets (1). C = chunks * 64; columns = K is COLUMNS at most.
template <class T, int COLUMNS, bool PAIR>
__global__ void __launch_bounds__(BLOCK<COLUMNS>, 1)
norm_conv1x1(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap addend, const __grid_constant__ TensorMap w,
             const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap z, const float *sums,
             const float *sums_2, bool about_mean, bool about_mean_2, const float *gamma, const float *gamma_2,
             const float *beta, const float *beta_2, uint32 *mask, float *saved, float *saved_2, float *running_mean,
             float *running_mean_2, float *running_var, float *running_var_2, float eps, float momentum, float *sums_of_z,
             float *partials, uint32 *tickets, uint32 rows, int columns, int chunks, int stages) {
    constexpr int PARTS = COLUMNS / CHUNK;
    extern __shared__ __align__(1024) uint4 memory[];
    NormControl &all = *reinterpret_cast<NormControl *>(memory);
    Control &control = all.control;
    Affine *const affine = reinterpret_cast<Affine *>(memory + sizeof(NormControl) / VECTOR_BYTES);
    uint4 *const weights = memory + sizeof(NormControl) / VECTOR_BYTES + affine_vectors(chunks);
    uint4 *const all_tiles = weights + (STREAMED<COLUMNS> ? WEIGHT_STAGES : chunks) * COLUMNS * CHUNK_VECTORS;
    uint4 *const all_results = all_tiles + TEAMS * stages * 2 * TILE_VECTORS;
    const int lane = lane_index(), warp = warp_index();
    const WarpRole<TEAMS> role(warp);
    const TileRange range = tiles_of<TEAMS>(role.team, rows, ROWS);
    const uint32 rounds = (range.end - blockIdx.y * TEAMS + range.step - 1) / range.step;  // number of tiles of team 0

    if (threadIdx.x == 0) init_barriers(all, stages);
    __syncthreads();

    const Stages own(control, role.team, all_tiles, stages, 2 * TILE_VECTORS);
    if (!role.is_mma_warp) {
        if (STREAMED<COLUMNS>) setmaxnreg_dec<24>();
        if (STREAMED<COLUMNS> && lane == 0 && role.team == TEAMS)
            stream_weights<COLUMNS>(weights, all, chunks, rounds, [&](uint4 *to, int c, uint64 &full) {
                tma_load(to, w, c * CHUNK, 0, 0, full);
            });
        if (lane == 0 && role.team < TEAMS) {
            if (role.team == 0) {
                prefetch_tensormap(y);
                prefetch_tensormap(z);
                if (!STREAMED<COLUMNS>) {
                    arrive_expect_tx(control.weights, chunks * COLUMNS * CHUNK_VECTORS * VECTOR_BYTES);
                    load_weights<COLUMNS>(weights, w, chunks, 0, control.weights);
                }
            }
            load_both(own, chunks, x, addend, range);
        }
        return;
    }
    if (STREAMED<COLUMNS>) setmaxnreg_inc<240>();
    // Overlaps with the loads of the first tiles.
    for (int vector = threadIdx.x; vector < chunks * CHUNK_VECTORS; vector += MMA_WARPS * WARP) {
        const int channel = vector * VEC, channels = chunks * CHUNK, at = channel % CHUNK;
        Affine &to = affine[vector / CHUNK_VECTORS];
        const Forward of(sums, about_mean, gamma, beta, saved, running_mean, running_var, eps, momentum, rows, channel,
                         channels);
        float shift[VEC];
#pragma unroll
        for (int k = 0; k < VEC; ++k) shift[k] = of.shift[k];
        if (PAIR) {
            const Forward of_2(sums_2, about_mean_2, gamma_2, beta_2, saved_2, running_mean_2, running_var_2, eps,
                               momentum, rows, channel, channels);
#pragma unroll
            for (int k = 0; k < VEC; ++k) shift[k] += of_2.shift[k];
            store_floats(to.scale_2 + at, of_2.scale);
        }
        store_floats(to.scale + at, of.scale);
        store_floats(to.shift + at, shift);
    }
    sync_mma_warps();
    // pivots and sums of the two columns of each part that this thread sums
    float pivot[PARTS][2] = {}, of_column[PARTS][2][2] = {};
    uint32 counted = 0;                                      // rows summed so far
    uint4 *const result = all_results + warp * RESULT_VECTORS;
    const int own_row = warp % TEAM_WARPS * WARP_ROWS;
    PipelineState pipe, of_weights;
    uint32 round = 0;
    if (!STREAMED<COLUMNS>) mbarrier_wait(control.weights, 0);
    for (uint32 n = range.first; n < range.end; n += range.step, ++round) {
        const uint32 row = (range.end - 1 - n) * ROWS + own_row;
        const int rows_here = max(0, min(WARP_ROWS, int(rows - row)));
        float products[COLUMNS / 8][4] = {};
#pragma unroll 1
        for (int c = 0; c < chunks; ++c, pipe.advance(stages)) {
            const uint4 *const part_of_x = own.tiles + (pipe.index * 2 * ROWS + own_row) * CHUNK_VECTORS;
            uint32 m[CHUNK / 16][4], bits[4] = {};
            mbarrier_wait(own.full[pipe.index], pipe.phase);
#pragma unroll
            for (int pair = 0; pair < CHUNK / 16; ++pair)
                normalise<T, PAIR ? NORMALISED : PLAIN>(affine[c], part_of_x, part_of_x + TILE_VECTORS, pair, lane, m[pair], bits);
            __syncwarp();
            if (lane == 0) arrive(own.empty[pipe.index]);
            acquire_result(lane);
#pragma unroll
            for (int pair = 0; pair < CHUNK / 16; ++pair) stmatrix_x4(result + matrix_row(lane, pair), m[pair]);
            store_result(y, c * CHUNK, row, result, lane);
            if (STREAMED<COLUMNS>) mbarrier_wait(all.full[of_weights.index], of_weights.phase);
            const uint4 *const b = weights + (STREAMED<COLUMNS> ? of_weights.index : c) * COLUMNS * CHUNK_VECTORS;
            multiply_fragments<T>(products, m, b);
            const uint32 word = gathered(bits, lane);
            const int row_of_word = lane / 4 + (lane & 2) * 4;  // this thread's word belongs to this row of the warp
            if (row_of_word < rows_here) mask[((row + row_of_word) * chunks + c) * 2 + lane % 2] = word;
            wgmma_wait();
            wgmma_fence_operand(products);
            if (STREAMED<COLUMNS>) release_weights(all, of_weights, lane);
        }

#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            acquire_result(lane);
            finish_part<T, false, false>(products, p, result, lane);
            store_result(z, p * CHUNK, row, result, lane);
            if (counted == 0 && rows_here > 0) set_pivot<T>(pivot[p], result, lane);
            add_rows<T>(result, rows_here, lane, pivot[p], of_column[p]);
        }
        counted += rows_here;
    }
    if (STREAMED<COLUMNS>) skip_weights(all, of_weights, (rounds - round) * chunks, lane);
    if (lane == 0) tma_store_wait<0>();

    // Combines the moments of the warps, then the moments of all blocks.
    sync_mma_warps();  // reuses the memory of the tiles
    Moments *const of_warps = reinterpret_cast<Moments *>(all_tiles);
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int k = 0; k < 2; ++k)
            of_warps[warp * COLUMNS + p * CHUNK + lane * 2 + k] =
                Moments::from_sums(pivot[p][k], counted, of_column[p][k][0], of_column[p][k][1]);
    finish_column_moments<COLUMNS, MMA_WARPS * WARP>(of_warps, MMA_WARPS, 0, columns, partials, tickets, sums_of_z,
                                                     sync_mma_warps);
}
