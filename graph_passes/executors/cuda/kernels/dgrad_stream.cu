// The gradient of a 1x1 convolution's input, with the sums of the BatchNorm backward pass that reads it. The kernel
// computes the same outputs as dgrad_reduce.cu, with the design of conv1x1_forward.cuh: dy replaces x, and dz replaces
// y.
#include "batch_norm.cuh"
#include "conv1x1_forward.cuh"

constexpr int COLUMNS = 128, PARTS = COLUMNS / CHUNK;  // columns of dz per block

// Prefetched ReLU bits of a thread's two rows, for 16 of a part's columns: two bytes per row.
struct Bits {
    uint32 bytes[4];

    __device__ void load(const uint8 *mask, uint32 row, uint32 rows, int column, int columns) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32 its_row = row + i / 2 * 8;
            const int its_column = column + i % 2 * VEC;
            bytes[i] = its_row < rows && its_column < columns ? mask[its_row * (columns / VEC) + its_column / VEC] : 0;
        }
    }
    __device__ uint32 packed_bits() const { return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | bytes[3] << 24; }
};

// Like `Addends`, for a compact addend, which has only the rows of a `Grid`. All threads of the warp copy; missing rows
// become zeros.
template <class T> struct CompactAddends {
    const Packed<T> *from;
    const Grid &grid;
    uint64 *arrived;
    uint4 *results;
    TileRange range;
    int first_column, own_row, parts;
    uint32 rows;
    int columns, lane, part = 0;
    uint32 its_row = NOWHERE;  // row of the compact gradient for row `lane % WARP_ROWS` of the tile

    __device__ void load(int slot) {
        if (range.first >= range.end) return;
        if (part == 0) {
            const uint32 row = range.first * ROWS + own_row + lane % WARP_ROWS;
            its_row = row < rows ? grid.row_of(row) : NOWHERE;
        }
        const int vector = lane % CHUNK_VECTORS, column = first_column + part * CHUNK + vector * VEC;
#pragma unroll
        for (int i = 0; i < WARP_ROWS; i += WARP / CHUNK_VECTORS) {
            const int in_part = i + lane / CHUNK_VECTORS;
            const uint32 from_row = __shfl_sync(0xffffffff, its_row, in_part);
            const bool there = from_row != NOWHERE && column < columns;
            cp_async_zfill(results + slot * RESULT_VECTORS + swizzled(in_part, vector),
                           from + (there ? from_row * (columns / VEC) + column / VEC : 0), there);
        }
        cp_async_arrive_noinc(arrived[slot]);
        if (++part == parts) {
            part = 0;
            range.first += range.step;
        }
    }
};

// dz = dy * w, plus `addend` unless SECOND is NONE, masked by ReLU's bits in `mask`. Also computes the sums of
// batch_norm_backward_reduce. DROP has the same meaning as there. With COMPACT the addend is `compact`. Tiles of the
// tensor maps: dy and w (OHWI) 64 rows and 64 columns, all other tensors 16 rows and 64 columns. gridDim.x blocks share
// the columns, gridDim.y the rows. After `Control`, shared memory has, in vectors: the weights, (chunks, PARTS) tiles;
// `stages` tiles of dy for each team; for each MMA warp two parts of dz, `ahead` parts of x and `ahead` parts of the
// addend.
// Shapes: dy (rows, K); w (K, C); x, addend, dz (rows, C); compact (rows of the grid, C); mask (rows, C / 8) bytes;
// saved (2, C), dgamma, dbeta (C), partials (gridDim.y, 2, C), factors fp32; tickets (gridDim.x). columns = C; K fits
// into `chunks` of 64 channels.
template <class T, SecondGradient SECOND, bool DROP>
__global__ void __launch_bounds__(THREADS, 1)
dgrad_stream(const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,
             const __grid_constant__ TensorMap addend, const __grid_constant__ TensorMap dz, const Packed<T> *compact,
             const uint8 *mask, const float *saved, float *dgamma, float *dbeta, float *partials, uint32 *tickets, uint32 rows,
             TileStep walk, int columns, int chunks, int stages, int ahead, const float *factors, uint32 first_factor,
             uint32 pixels, const __grid_constant__ Grid grid) {
    constexpr bool ADD = SECOND != NONE;
    constexpr int READ = 1 + ADD, SUMS = 2, ARRIVALS = 1 + (SECOND == WHOLE ? 1 : SECOND == COMPACT ? WARP : 0);
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    float *const mean = control.bias;  // the place of the bias is free, because this convolution has no bias
    uint4 *const weights = memory + sizeof(Control) / VECTOR_BYTES;
    uint4 *const tiles_of_dy = weights + chunks * PARTS * TILE_VECTORS;
    uint4 *const all_results = tiles_of_dy + TEAMS * stages * TILE_VECTORS;
    const int lane = lane_index(), warp = warp_index();
    const WarpRole<TEAMS> role(warp);
    const int first_column = blockIdx.x * COLUMNS;
    const TileRange range = tiles_of<TEAMS>(role.team, rows, walk.rows);

    for (int n = threadIdx.x; n < COLUMNS; n += THREADS)
        mean[n] = first_column + n < columns ? saved[first_column + n] : 0;
    if (threadIdx.x == 0) {
        init_barriers(control, stages, 0);
        for (int i = 0; i < MMA_WARPS; ++i)
            for (int slot = 0; slot < ahead; ++slot) mbarrier_init(control.addend[i][slot], ARRIVALS);
        fence_barrier_init();
    }
    __syncthreads();

    const Stages own(control, role.team, tiles_of_dy, stages);
    ColumnSums<SUMS, PARTS> sums;
    if (!role.is_mma_warp) {
        if (lane == 0) {
            if (role.team == 0) {
                prefetch_tensormap(dz);
                arrive_expect_tx(control.weights, chunks * PARTS * TILE_VECTORS * VECTOR_BYTES);
                for (int i = 0; i < chunks * PARTS; ++i)
                    tma_load(weights + i * TILE_VECTORS, w, first_column + i % PARTS * CHUNK, i / PARTS * CHUNK, 0,
                             control.weights);
            }
            load_tiles(own, dy, chunks, range, walk);
        }
    } else {
        uint4 *const own_results = all_results + warp * (2 + READ * ahead) * RESULT_VECTORS;
        uint4 *const own_x = own_results + 2 * RESULT_VECTORS, *const own_addend = own_x + ahead * RESULT_VECTORS;
        const int own_row = warp % TEAM_WARPS * WARP_ROWS, quad_column = lane % 4 * 2;

        // All operands of a part arrive at one barrier.
        uint64 *const arrived = control.addend[warp];
        Addends parts_of_x{x, walk, arrived, own_x, range, first_column, own_row, PARTS, ahead};
        Addends parts_of_addend{addend, walk, arrived, own_addend, range, first_column, own_row, PARTS, ahead};
        CompactAddends<T> parts_of_compact{compact, grid, arrived, own_addend, range, first_column, own_row, PARTS,
                                           rows, columns, lane};
        const auto load_part = [&](int slot) {
            parts_of_x.load(slot);
            if (SECOND == WHOLE) parts_of_addend.load(slot);
        };
        if (lane == 0)
            for (int slot = 0; slot < ahead; ++slot) load_part(slot);
        if (SECOND == COMPACT)
            for (int slot = 0; slot < ahead; ++slot) parts_of_compact.load(slot);
        Bits bits;
        const auto load_bits = [&](uint32 tile, int part) {
            bits.load(mask, tile * ROWS + own_row + lane / 4, rows, first_column + part * CHUNK + quad_column * VEC, columns);
        };
        load_bits(range.first, 0);

        PipelineState pipe, part, result;
        mbarrier_wait(control.weights, 0);
        for (uint32 tile = range.first; tile < range.end; tile += range.step) {
            float products[COLUMNS / 8][4] = {}, factor[2];
            multiply_tile<T, true>(products, weights, chunks, own, pipe, lane);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32 row = tile * ROWS + own_row + r * 8 + lane / 4;
                factor[r] = DROP ? drop_factor(row < rows ? row : 0, factors, first_factor, pixels) : 1;
            }
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                const uint32 own_bits = bits.packed_bits();
                load_bits(p + 1 < PARTS ? tile : tile + range.step, (p + 1) % PARTS);
                uint4 *const dz_part = own_results + result.index * RESULT_VECTORS;
                const int from = part.index * RESULT_VECTORS;
                mbarrier_wait(arrived[part.index], part.phase);
                // wait for the store from this buffer, which is the last store but one
                if (lane == 0) tma_store_wait<1>();
                __syncwarp();
                float of_rows[SUMS][16];  // sums over this thread's two rows
#pragma unroll
                for (int pair = 0; pair < CHUNK / 16; ++pair) {
                    const int at = matrix_row(lane, pair);
                    const uint32 open = __shfl_sync(0xffffffff, own_bits, lane / 4 * 4 + pair) >> quad_column;
                    uint32 g_bits[4], x_bits[4];
                    ldmatrix_x4(x_bits, own_x + from + at);
                    if (ADD) ldmatrix_x4(g_bits, own_addend + from + at);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int r = i % 2, j = pair * 2 + i / 2, n = p * CHUNK + j * 8 + quad_column;
                        const float2 more = ADD ? unpack_two<T>(g_bits[i]) : make_float2(0, 0);
                        const float2 v = unpack_two<T>(x_bits[i]), mu = *reinterpret_cast<const float2 *>(&mean[n]);
                        const float from_mean[2] = {v.x - mu.x, v.y - mu.y};
                        float g[2] = {products[p * 8 + j][r * 2], products[p * 8 + j][r * 2 + 1]};
                        if (ADD) {
                            g[0] += more.x;
                            g[1] += more.y;
                        }
#pragma unroll
                        for (int k = 0; k < 2; ++k) {
                            // In rows past the end both the bits and dy are 0.
                            if (!(open >> (r * 16 + i / 2 * 8 + k) & 1)) g[k] = 0;
                            const float own_g = DROP ? g[k] * factor[r] : g[k];
                            const auto add = [&](int sum, float term) {
                                float &of = of_rows[sum][2 * j + k];
                                of = r == 0 ? term : of + term;
                            };
                            add(0, own_g);
                            add(1, own_g * from_mean[k]);
                        }
                        g_bits[i] = pack_two<T>(g[0], g[1]);
                    }
                    stmatrix_x4(dz_part + at, g_bits);
                }
                tma_store_fence();
                __syncwarp();
                if (lane == 0) {
                    tma_store(dz, first_column + p * CHUNK, tile * walk.y_row + own_row, tile * walk.y_line, dz_part);
                    load_part(part.index);
                }
                if (SECOND == COMPACT) parts_of_compact.load(part.index);
                sums.add(p, of_rows, lane);
                part.advance(ahead);
                result.advance(2);
            }
        }
        if (lane == 0) tma_store_wait<0>();
    }

    __syncthreads();  // reuses the memory of the results
    float *const of_warps = reinterpret_cast<float *>(all_results);
    if (role.is_mma_warp) sums.store(of_warps, warp, lane);
    reduce_parts<THREADS, MMA_WARPS, SUMS, COLUMNS>(of_warps, partials, tickets, columns,
                                                    ParameterGradients{saved, dgamma, dbeta, columns});
}
