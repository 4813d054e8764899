// The forward pass of a 1x1 convolution in training, with the sums of the BatchNorm that follows; and with the BatchNorm + ReLU
// before it, within a residual block. conv1x1_forward.cuh says how it works.
//
// What each of two multiplying warps leaves for the copy engine is added up by a warp of its own, while they go on.
//
// What BatchNorm + ReLU give, a warp makes of its rows as norm_stream.cuh says: in the registers from which they are multiplied.
// It is written where others read it: the blocks that make other columns of the same rows take turns, tile by tile.
#include "moments.cuh"
#include "norm_stream.cuh"

constexpr int SUMMING = MULTIPLYING / 2, BLOCK = THREADS + SUMMING * WARP;

// Of the warps that multiply and of those that add up, at the same place of the program.
constexpr Meet<2, (MULTIPLYING + SUMMING) * WARP> meet_summing{};

// `m` is what BatchNorm + ReLU make of 16 columns of a warp's rows, the `pair`-th such; as in batch_norm.cu, to the bit.
template <class T> __device__ inline void normalise(const Affine &of, const uint4 *x, int pair, int lane, uint32 (&m)[4]) {
    load_pair(m, x + matrix_row(lane, pair));
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows below 8 and others, of 8 columns, then of the next 8
        const int first = pair * 16 + i / 2 * 8 + lane % 4 * 2;
        const float2 scale = two_of(of.scale, first), shift = two_of(of.shift, first), v = unpack_two<T>(m[i]);
        m[i] = pack_two<T>(relu(v.x * scale.x + shift.x), relu(v.y * scale.y + shift.y));
    }
}

// products += relu(norm(x)) * w for the next tile of x. `keep` gets a chunk of what is multiplied.
template <class T, int PEERS, int N, class Keep>
__device__ inline void multiply_normalised(float (&products)[N][4], const uint4 *weights, const Affine *affine,
                                           const Stages &stages, Turn &turn, int own_row, int lane, Keep keep) {
#pragma unroll 1
    for (int c = 0; c < stages.chunks; ++c, turn.next(stages.number)) {
        const uint4 *const part_of_x = stages.tiles + turn.place * TILE_VECTORS + own_row * CHUNK_VECTORS;
        uint32 m[CHUNK / 16][4];
        wait_for_phase(stages.full[turn.place], turn.parity);
#pragma unroll
        for (int pair = 0; pair < CHUNK / 16; ++pair) normalise<T>(affine[c], part_of_x, pair, lane, m[pair]);
        __syncwarp();
        leave<PEERS>(stages.empty[turn.place], lane);
        keep(c, m);
        const uint4 *const b = weights + c * N * 8 * CHUNK_VECTORS;
        open_products();
#pragma unroll
        for (int s = 0; s < CHUNK / 16; ++s) multiply_rows(products, m[s], matrix(b + s * 2), T{});
        close_products();
        wait_for_products();  // `m` is free, too
        hold_products(products);
    }
}

// What the kernels below have in common. `made`: the map of what BatchNorm + ReLU give, null where nobody reads it.
template <class T, int COLUMNS, int PEERS, bool NORM>
__device__ inline void convolve(const TensorMap &x, const TensorMap &w, const TensorMap &y, const Before &before,
                                const TensorMap *made, float *sums, float *partials, uint32 *tickets, uint32 rows,
                                const TileWalk &walk, int columns, int chunks, int stages, int results) {
    constexpr int PARTS = COLUMNS / CHUNK, UNDER_WAY = 2;  // of the results that are copied away
    static_assert(sizeof(Control) == 2048 && sizeof(Affine) == 768, "as lowering/conv1x1_forward.py counts");
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    Affine *const affine = reinterpret_cast<Affine *>(memory + sizeof(Control) / VECTOR_BYTES);
    uint4 *const weights = memory + sizeof(Control) / VECTOR_BYTES + (NORM ? affine_vectors(chunks) : 0);
    uint4 *const tiles_of_x = weights + chunks * COLUMNS * CHUNK_VECTORS;
    uint4 *const all_results = tiles_of_x + TEAMS * stages * TILE_VECTORS;
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    const bool multiplies = warp < MULTIPLYING, adds_up = warp >= MULTIPLYING + TEAMS;
    const int pair = warp - MULTIPLYING - TEAMS;  // of multiplying warps, whose results are added up
    const int team = multiplies ? warp / TEAM_WARPS : adds_up ? pair * 2 / TEAM_WARPS : warp - MULTIPLYING;
    const int first_column = blockIdx.x * COLUMNS;
    const Share share{blockIdx.y * TEAMS + team, (rows + walk.rows - 1) / walk.rows, gridDim.y * TEAMS};

    // A result is written, and then added up, where it is both.
    const auto written = [&](int warp, int place) -> uint64 & { return control.addend[warp][place]; };
    const auto added_up = [&](int warp, int place) -> uint64 & { return control.addend[warp][MAX_RESULTS / 2 + place]; };
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
                load_weights<COLUMNS>(weights, w, chunks, first_column, control.weights);
            }
            load_tiles<false, PEERS>(own, x, share, walk);
        }
    } else {
        uint4 *const own_results = all_results + warp * results * RESULT_VECTORS;
        uint4 *const own_made = all_results + (MULTIPLYING * results + warp) * RESULT_VECTORS;
        const int own_row = warp % TEAM_WARPS * WARP_ROWS;
        Turn turn, result, of_blocks;
        wait_for_phase(control.weights, 0);
        for (uint32 tile = share.first; tile < share.end; tile += share.step) {
            float products[COLUMNS / 8][4] = {};
            if constexpr (NORM) {
                const bool keeps = made && of_blocks.place == blockIdx.x;
                multiply_normalised<T, PEERS>(products, weights, affine, own, turn, own_row, lane,
                                              [&](int c, const uint32 (&m)[CHUNK / 16][4]) {
                    if (!keeps) return;
                    free_result(lane);
#pragma unroll
                    for (int pair = 0; pair < CHUNK / 16; ++pair) store_pair(own_made + matrix_row(lane, pair), m[pair]);
                    store_result(*made, c * CHUNK, tile * ROWS + own_row, own_made, lane);
                });
                of_blocks.next(gridDim.x);
            } else {
                multiply_tile<T, false, PEERS>(products, weights, own, turn, lane);
            }

#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                uint4 *const part = own_results + result.place * RESULT_VECTORS;
                wait_for_phase(added_up(warp, result.place), result.parity ^ 1);  // at once in the first turn
                if (lane == 0) wait_for_stores<UNDER_WAY>();
                __syncwarp();
                finish_part<T, false, false>(products, p, part, lane);
                show_to_copies();
                __syncwarp();
                if (lane == 0) {
                    store_tile(y, first_column + p * CHUNK, tile * walk.y_row + own_row, tile * walk.y_line, part);
                    arrive(written(warp, result.place));
                }
                result.next(results);
            }
        }
        if (lane == 0) wait_for_stores<0>();
    }
    __syncwarp();
    if (PEERS > 1) meet_cluster();  // before that, a peer may still be told of a free place
    if (!multiplies && !adds_up) return;

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

// y = x * w; `sums` are those of y per column about its mean, in a fixed order. The maps are of these matrices: of x by tiles of
// `walk.rows` rows and 64 columns, of w by tiles of COLUMNS rows and 64 columns, of y by those of 16 rows and 64 columns. With
// stride 2 the map of x leaves pixels out, a tile of it is whole lines of an image, and a line of the map of y is a tile.
// gridDim.x blocks, in clusters of PEERS, share the columns, gridDim.y the rows.
// Shapes: x (rows, C), w (K, C), y (rows, K); sums (3, K), partials (3 * gridDim.y * K) fp32; tickets (gridDim.x). columns = K; C
// fits into `chunks` of 64 channels.
template <class T, int COLUMNS, int PEERS>
__global__ void __cluster_dims__(PEERS, 1, 1) __launch_bounds__(BLOCK, 1)
conv1x1_statistics(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap y,
                   float *sums, float *partials, uint32 *tickets, uint32 rows, TileWalk walk, int columns, int chunks, int stages,
                   int results) {
    convolve<T, COLUMNS, PEERS, false>(x, w, y, {}, nullptr, sums, partials, tickets, rows, walk, columns, chunks, stages,
                                       results);
}

// y = relu(BatchNorm(x)), with what `Forward` keeps, and z = y * w, with its sums; the maps are as above, of y by tiles as those
// of z. y is written if `is_read`.
// Shapes: x, y (rows, C), w (K, C), z (rows, K); sums (2 or 3, C), saved (2, C), gamma, beta, running_mean, running_var (C),
// sums_of_z (3, K), partials (3 * gridDim.y * K) fp32; tickets (gridDim.x). columns = K, C = chunks * 64.
template <class T, int COLUMNS, int PEERS>
__global__ void __cluster_dims__(PEERS, 1, 1) __launch_bounds__(BLOCK, 1)
norm_relu_conv1x1(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap y,
                  const __grid_constant__ TensorMap z, bool is_read, const float *sums, bool about_mean, const float *gamma,
                  const float *beta, float *saved, float *running_mean, float *running_var, float eps, float momentum,
                  float *sums_of_z, float *partials, uint32 *tickets, uint32 rows, TileWalk walk, int columns, int chunks,
                  int stages, int results) {
    const Before before{sums, about_mean, gamma, beta, saved, running_mean, running_var, eps, momentum};
    convolve<T, COLUMNS, PEERS, true>(x, w, z, before, is_read ? &y : nullptr, sums_of_z, partials, tickets, rows, walk, columns,
                                      chunks, stages, results);
}
