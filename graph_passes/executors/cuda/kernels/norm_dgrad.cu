// Backward from a BatchNorm through the 1x1 convolution before it to the BatchNorm before that. Unlike
// norm_backward.cu, this kernel leaves the gradient of the weights to another kernel: dx, the gradient between
// BatchNorm and convolution, is written for that kernel. The gradient of the data is computed from dx while dx is still
// in registers.
//
// norm_stream.cuh explains the design; the weights are streamed. The tile of the earlier BatchNorm's input is needed
// only at the end of a tile's work. So it is loaded after the tiles of dz and x, into the stages of these tiles.
#include "norm_stream.cuh"

// At the start of shared memory: mean, scale and shift of the earlier BatchNorm. The means are in `bias` of
// NormControl, because this convolution has no bias.
struct alignas(1024) DgradControl { NormControl norm; float scale[MAX_COLUMNS], shift[MAX_COLUMNS]; };

// Called by one thread. Starts the loads of a team's tiles of dz and x, then of `prev`, from the last rows on.
template <int PARTS>
__device__ inline void load_rows(const Stages &stages, int chunks, const TensorMap &dz, const TensorMap &x, const TensorMap &prev,
                                 const TileRange &range) {
    PipelineState pipe;
    for (uint32 n = range.first; n < range.end; n += range.step) {
        const int row = (range.end - 1 - n) * ROWS;
        for (int c = 0; c < chunks; ++c) load_two(stages, pipe, dz, {c * CHUNK, row}, x, {c * CHUNK, row});
        for (int p = 0; p < PARTS; p += 2)
            load_two(stages, pipe, prev, {p * CHUNK, row}, prev, {(p + 1) * CHUNK, row});
    }
}

// m = the gradient of the BatchNorm's input, for 16 columns of a warp's rows, the `pair`-th such group.
template <class T>
__device__ inline void make_gradient(const Affine &of, const uint4 *dz, const uint4 *x, int pair, int lane, uint32 (&m)[4]) {
    make_fragment<true>(dz, x, pair, lane, m, [&](int, int first, uint32 of_dz, uint32 of_x) {
        const float2 scale = load_float2(of.scale, first), b = load_float2(of.scale_2, first), c = load_float2(of.shift, first);
        const float2 g = unpack_two<T>(of_dz), v = unpack_two<T>(of_x);
        return pack_two<T>(scale.x * g.x + (b.x * v.x + c.x), scale.y * g.y + (b.y * v.y + c.y));
    });
}

// dx = scale * dz + b * x + c by `InputGradient`. dz_prev = dx * w, masked where relu(BatchNorm(prev)) is 0, with the sums of
// batch_norm_backward_reduce.
// Tiles of the tensor maps: dz, x, prev and w (OHWI) 64 rows and columns, dx and dz_prev 16 rows and 64 columns. gridDim.y
// blocks share the rows.
// Shapes: dz, x, dx (rows, K); w (K, C); prev, dz_prev (rows, C); saved (2, K), gamma, dgamma, dbeta (K), prev_saved (2, C),
// prev_gamma, prev_beta, prev_dgamma, prev_dbeta (C), partials (gridDim.y, 2, C) fp32; tickets (1). K = chunks * 64; columns
// = C <= COLUMNS.
template <class T, int COLUMNS>
__global__ void __launch_bounds__(STREAMING, 1)
norm_dgrad(const __grid_constant__ TensorMap dz, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
           const __grid_constant__ TensorMap prev, const __grid_constant__ TensorMap dx,
           const __grid_constant__ TensorMap dz_prev, const float *saved, const float *gamma, const float *dgamma,
           const float *dbeta, const float *prev_saved, const float *prev_gamma, const float *prev_beta,
           float *prev_dgamma, float *prev_dbeta, float *partials, uint32 *tickets, uint32 rows, int columns, int chunks,
           int stages) {
    constexpr int PARTS = COLUMNS / CHUNK, SUMS = 2;
    static_assert(PARTS % 2 == 0, "two parts of `prev` are loaded at once");
    extern __shared__ __align__(1024) uint4 memory[];
    DgradControl &of_prev = *reinterpret_cast<DgradControl *>(memory);
    NormControl &all = of_prev.norm;
    Control &control = all.control;
    float *const mean = control.bias;
    Affine *const affine = reinterpret_cast<Affine *>(&of_prev + 1);
    uint4 *const weights = memory + sizeof(DgradControl) / VECTOR_BYTES + affine_vectors(chunks);
    uint4 *const all_tiles = weights + WEIGHT_STAGES * COLUMNS * CHUNK_VECTORS;
    uint4 *const all_results = all_tiles + TEAMS * stages * 2 * TILE_VECTORS;
    const int lane = lane_index(), warp = warp_index();
    const WarpRole<TEAMS> role(warp);
    const TileRange range = tiles_of<TEAMS>(role.team, rows, ROWS);
    const uint32 rounds = (range.end - blockIdx.y * TEAMS + range.step - 1) / range.step;  // number of tiles of team 0

    if (threadIdx.x == 0) init_barriers(all, stages);
    __syncthreads();

    const Stages own(control, role.team, all_tiles, stages, 2 * TILE_VECTORS);
    if (!role.is_mma_warp) {
        setmaxnreg_dec<24>();
        if (lane == 0 && role.team == TEAMS) {
            prefetch_tensormap(dx);
            prefetch_tensormap(dz_prev);
            stream_weights<COLUMNS>(weights, all, chunks, rounds, [&](uint4 *to, int c, uint64 &full) {
                for (int p = 0; p < PARTS; ++p) tma_load(to + p * TILE_VECTORS, w, p * CHUNK, c * CHUNK, 0, full);
            });
        }
        if (lane == 0 && role.team < TEAMS) load_rows<PARTS>(own, chunks, dz, x, prev, range);
        return;
    }
    setmaxnreg_inc<240>();
    // Overlaps with the loads of the first tiles.
    for (int vector = threadIdx.x; vector < chunks * CHUNK_VECTORS; vector += MMA_WARPS * WARP) {
        const int channel = vector * VEC, at = channel % CHUNK;
        const Backward of(saved, gamma, nullptr, channel, chunks * CHUNK);
        const InputGradient gradient(of, dgamma, dbeta, rows, channel);
        Affine &to = affine[vector / CHUNK_VECTORS];
        store_floats(to.scale + at, of.scale);
        store_floats(to.scale_2 + at, gradient.b);
        store_floats(to.shift + at, gradient.c);
    }
    for (int column = threadIdx.x * VEC; column < columns; column += MMA_WARPS * WARP * VEC) {
        Backward(prev_saved, prev_gamma, prev_beta, column, columns)
            .store(mean + column, of_prev.scale + column, of_prev.shift + column);
    }
    sync_mma_warps();
    ColumnSums<SUMS, PARTS> sums;
    uint4 *const result = all_results + warp * RESULT_VECTORS;
    const int own_row = warp % TEAM_WARPS * WARP_ROWS, quad_column = lane % 4 * 2;
    PipelineState pipe, of_weights;
    uint32 round = 0;
    for (uint32 n = range.first; n < range.end; n += range.step, ++round) {
        const uint32 row = (range.end - 1 - n) * ROWS + own_row;
        float products[COLUMNS / 8][4] = {};
#pragma unroll 1
        for (int c = 0; c < chunks; ++c, pipe.advance(stages)) {
            const uint4 *const part_of_dz = own.tiles + (pipe.index * 2 * ROWS + own_row) * CHUNK_VECTORS;
            uint32 m[CHUNK / 16][4];
            mbarrier_wait(own.full[pipe.index], pipe.phase);
#pragma unroll
            for (int pair = 0; pair < CHUNK / 16; ++pair)
                make_gradient<T>(affine[c], part_of_dz, part_of_dz + TILE_VECTORS, pair, lane, m[pair]);
            __syncwarp();
            if (lane == 0) arrive(own.empty[pipe.index]);
            store_fragments(dx, c * CHUNK, row, m, result, lane);
            mbarrier_wait(all.full[of_weights.index], of_weights.phase);
            const uint4 *const b = weights + of_weights.index * COLUMNS * CHUNK_VECTORS;
            multiply_fragments<T, true>(products, m, b);
            wgmma_wait();
            wgmma_fence_operand(products);
            release_weights(all, of_weights, lane);
        }

        // needed because dx is c, not 0, in rows past the end
        const bool there[2] = {row + lane / 4 < rows, row + lane / 4 + 8 < rows};
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            const uint4 *const part = own.tiles + ((pipe.index * 2 + p % 2) * ROWS + own_row) * CHUNK_VECTORS;
            if (p % 2 == 0) mbarrier_wait(own.full[pipe.index], pipe.phase);
            acquire_result(lane);
            float of_rows[SUMS][16];  // sums over this thread's two rows
#pragma unroll
            for (int pair = 0; pair < CHUNK / 16; ++pair) {
                uint32 x_bits[4], g_bits[4];
                ldmatrix_x4(x_bits, part + matrix_row(lane, pair));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int r = i % 2, j = pair * 2 + i / 2, n = p * CHUNK + j * 8 + quad_column;
                    const float2 v = unpack_two<T>(x_bits[i]), mu = load_float2(mean, n);
                    const float2 scale = load_float2(of_prev.scale, n), shift = load_float2(of_prev.shift, n);
                    float g[2] = {products[p * 8 + j][r * 2], products[p * 8 + j][r * 2 + 1]};
                    if (!there[r] || !(v.x * scale.x + shift.x > 0)) g[0] = 0;
                    if (!there[r] || !(v.y * scale.y + shift.y > 0)) g[1] = 0;
                    const float terms[SUMS][2] = {{g[0], g[1]}, {g[0] * (v.x - mu.x), g[1] * (v.y - mu.y)}};
#pragma unroll
                    for (int sum = 0; sum < SUMS; ++sum)
#pragma unroll
                        for (int k = 0; k < 2; ++k) {
                            float &of = of_rows[sum][2 * j + k];
                            of = r == 0 ? terms[sum][k] : of + terms[sum][k];
                        }
                    g_bits[i] = pack_two<T>(g[0], g[1]);
                }
                stmatrix_x4(result + matrix_row(lane, pair), g_bits);
            }
            store_result(dz_prev, p * CHUNK, row, result, lane);
            if (p % 2 == 1) {
                if (lane == 0) arrive(own.empty[pipe.index]);
                pipe.advance(stages);
            }
            sums.add(p, of_rows, lane);
        }
    }
    skip_weights(all, of_weights, (rounds - round) * chunks, lane);
    if (lane == 0) tma_store_wait<0>();

    sync_mma_warps();  // reuses the memory of the tiles
    float *const of_warps = reinterpret_cast<float *>(all_tiles);
    sums.store(of_warps, warp, lane);
    reduce_parts<MMA_WARPS * WARP, MMA_WARPS, SUMS, COLUMNS, 22>(
        of_warps, partials, tickets, columns, ParameterGradients{prev_saved, prev_dgamma, prev_dbeta, columns}, sync_mma_warps);
}
