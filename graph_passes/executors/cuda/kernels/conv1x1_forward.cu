// The forward pass of a 1x1 convolution, with what follows it: bias, sum and ReLU in inference, the sums of BatchNorm in
// training.
//
// As conv1x1.cuh has it, with C and K exchanged: y[row, k] = sum over c of x[row, c] * w[k, c]. These layers are bound by
// memory, and so is this kernel laid out. A block keeps the weights of COLUMNS outputs in shared memory. Two teams of four
// multiplying warps, each with a warp that starts the copies of what they read, walk over tiles of 64 rows, independent of
// each other: the products of one overlap with what the other does with its own. A warp has 16 rows, and from the products on
// it is on its own: it adds what is to be added, 64 columns at a time, in shared memory, whence the copy engine takes them.
#include "copy_engine.cuh"
#include "moments.cuh"
#include "warpgroup.cuh"

constexpr int TEAMS = 2, TEAM_WARPS = 4, MULTIPLYING = TEAMS * TEAM_WARPS, THREADS = (MULTIPLYING + TEAMS) * WARP;
constexpr int WARP_ROWS = 16, ROWS = TEAM_WARPS * WARP_ROWS;  // of a tile
constexpr int CHUNK = 64;                                     // channels of a tile of warpgroup.cuh: 128 bytes
constexpr int CHUNK_VECTORS = CHUNK / VEC, TILE_VECTORS = ROWS * CHUNK_VECTORS, RESULT_VECTORS = WARP_ROWS * CHUNK_VECTORS;
constexpr int VECTOR_BYTES = 16;
constexpr int MAX_COLUMNS = 256, MAX_STAGES = 12, MAX_RESULTS = 8;

// At the start of shared memory. Behind it, in vectors: the weights, (chunks, COLUMNS * 8); `stages` tiles of each team's x;
// `results` parts of each multiplying warp's y.
struct alignas(1024) Control {
    float bias[MAX_COLUMNS];
    uint64 weights, full[TEAMS][MAX_STAGES], empty[TEAMS][MAX_STAGES], addend[MULTIPLYING][MAX_RESULTS];
};

// --- 16 rows of 64 channels in shared memory, and two 8-column products of a warp ---

// Where this thread's row of the four 8x8 matrices of 16 columns, the `pair`-th such, lies in a result.
__device__ inline int matrix_row(int lane, int pair) { return swizzled(lane % 16, pair * 2 + lane / 16); }

__device__ inline void load_pair(uint32 (&m)[4], const uint4 *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address_of(at)) : "memory");
}
__device__ inline void store_pair(uint4 *at, const uint32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(address_of(at)), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}

template <class T> __device__ inline float2 unpack_two(uint32 bits) {
    const T *two = reinterpret_cast<const T *>(&bits);
    return make_float2(to_float(two[0]), to_float(two[1]));
}
template <class T> __device__ inline uint32 pack_two(float first, float second) {
    uint32 bits;
    from_floats(first, second, reinterpret_cast<T *>(&bits));
    return bits;
}

__device__ inline float relu(float v) {
    asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(v));  // NaN stays
    return v;
}

// --- the kernel ---

// y = x * w + bias (+ addend), then ReLU with RELU; a null `bias` is none. With SUMS, `sums` are those of y per column about
// its mean, in a fixed order. The maps are of these matrices: of x by tiles of `walk.rows` rows and 64 columns, of w by tiles
// of COLUMNS rows and 64 columns, of y and addend by those of 16 rows and 64 columns. With stride 2 the map of x leaves pixels
// out, a tile of it is whole lines of an image, and a line of the map of y is a tile. gridDim.x blocks share the columns,
// gridDim.y the rows.
// Shapes: x (rows, C), w (K, C), y and addend (rows, K); bias (K), sums (3, K), partials (gridDim.y, K, 3) fp32; tickets
// (gridDim.x). columns = K; C fits into `chunks` of 64 channels.
template <class T, int COLUMNS, bool ADD, bool RELU, bool SUMS>
__global__ void __launch_bounds__(THREADS, 1)
conv1x1_forward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                const __grid_constant__ TensorMap addend, const __grid_constant__ TensorMap y, const float *bias,
                float *sums, Moments *partials, uint32 *tickets, uint32 rows, TileWalk walk, int columns, int chunks,
                int stages, int results) {
    constexpr int PARTS = COLUMNS / CHUNK;
    static_assert(sizeof(Control) == 2048, "as lowering/conv1x1_forward.py counts");
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    uint4 *const weights = memory + sizeof(Control) / VECTOR_BYTES, *const tiles_of_x = weights + chunks * COLUMNS * CHUNK_VECTORS;
    uint4 *const all_results = tiles_of_x + TEAMS * stages * TILE_VECTORS;
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    const bool multiplies = warp < MULTIPLYING;
    const int team = multiplies ? warp / TEAM_WARPS : warp - MULTIPLYING;
    const int first_column = blockIdx.x * COLUMNS;
    const uint32 tiles = (rows + walk.rows - 1) / walk.rows, first_tile = blockIdx.y * TEAMS + team, step = gridDim.y * TEAMS;

    for (int n = threadIdx.x; n < COLUMNS; n += THREADS)
        control.bias[n] = bias && first_column + n < columns ? bias[first_column + n] : 0;
    if (threadIdx.x == 0) {
        init_barrier(control.weights, 1);
        for (int t = 0; t < TEAMS; ++t)
            for (int s = 0; s < stages; ++s) {
                init_barrier(control.full[t][s], 1);
                init_barrier(control.empty[t][s], TEAM_WARPS);
            }
        if (ADD)
            for (int i = 0; i < MULTIPLYING; ++i)
                for (int r = 0; r < results; ++r) init_barrier(control.addend[i][r], 1);
        show_barriers();
    }
    __syncthreads();

    uint4 *const own_tiles = tiles_of_x + team * stages * TILE_VECTORS;
    float near[PARTS][2] = {}, of_column[PARTS][2][2] = {};  // of the two columns of each part that a thread sums up
    uint32 counted = 0;                                 // rows
    if (!multiplies) {
        if (lane == 0) {
            if (team == 0) {
                fetch_map(y);
                arrive_expecting(control.weights, chunks * COLUMNS * CHUNK_VECTORS * VECTOR_BYTES);
                for (int c = 0; c < chunks; ++c)
                    load_tile(weights + c * COLUMNS * CHUNK_VECTORS, w, c * CHUNK, first_column, 0, control.weights);
            }
            Turn turn;
            for (uint32 tile = first_tile; tile < tiles; tile += step)
                for (int c = 0; c < chunks; ++c, turn.next(stages)) {
                    wait_for_phase(control.empty[team][turn.place], turn.parity ^ 1);  // at once in the first turn
                    uint64 &full = control.full[team][turn.place];
                    arrive_expecting(full, walk.rows * CHUNK_VECTORS * VECTOR_BYTES);
                    load_tile(own_tiles + turn.place * TILE_VECTORS, x, c * CHUNK, tile * walk.x_row, tile * walk.x_line,
                              full);
                }
        }
    } else {
        uint4 *const own_results = all_results + warp * results * RESULT_VECTORS;
        const int own_row = warp % TEAM_WARPS * WARP_ROWS;

        // What is added is on its way into all of the results but the one that is worked on.
        uint32 ahead_tile = first_tile;
        int ahead_part = 0;
        const auto load_addend = [&](int place) {
            if (ahead_tile >= tiles) return;
            uint64 &there = control.addend[warp][place];
            arrive_expecting(there, RESULT_VECTORS * VECTOR_BYTES);
            load_tile(own_results + place * RESULT_VECTORS, addend, first_column + ahead_part * CHUNK,
                      ahead_tile * walk.y_row + own_row, ahead_tile * walk.y_line, there);
            if (++ahead_part == PARTS) {
                ahead_part = 0;
                ahead_tile += step;
            }
        };
        if (ADD && lane == 0)
            for (int place = 0; place < results; ++place) load_addend(place);

        Turn turn, result;
        wait_for_phase(control.weights, 0);
        for (uint32 tile = first_tile; tile < tiles; tile += step) {
            float products[COLUMNS / 8][4];
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j) {
                const float2 b = *reinterpret_cast<const float2 *>(&control.bias[j * 8 + lane % 4 * 2]);
                products[j][0] = products[j][2] = b.x;
                products[j][1] = products[j][3] = b.y;
            }
            int before = 0;  // the place of the chunk before
            for (int c = 0; c < chunks; ++c, turn.next(stages)) {
                wait_for_phase(control.full[team][turn.place], turn.parity);
                const uint4 *a = own_tiles + turn.place * TILE_VECTORS, *b = weights + c * COLUMNS * CHUNK_VECTORS;
                open_products();
#pragma unroll
                for (int s = 0; s < CHUNK / 16; ++s) multiply_rows(products, matrix(a + s * 2), matrix(b + s * 2), T{});
                close_products();
                wait_for_products_before_last();
                if (c > 0 && lane == 0) arrive(control.empty[team][before]);
                before = turn.place;
            }
            wait_for_products();
            hold_products(products);
            if (lane == 0) arrive(control.empty[team][before]);

            const int rows_here = max(0, min(WARP_ROWS, min(walk.rows, int(rows - tile * walk.rows)) - own_row));
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                uint4 *const part = own_results + result.place * RESULT_VECTORS;
                if (ADD) {
                    wait_for_phase(control.addend[warp][result.place], result.parity);
                } else {
                    if (lane == 0) wait_for_stores<1>();  // of two results, the one before the last
                    __syncwarp();
                }
#pragma unroll
                for (int pair = 0; pair < CHUNK / 16; ++pair) {
                    const float(&left)[4] = products[p * 8 + pair * 2], (&right)[4] = products[p * 8 + pair * 2 + 1];
                    float v[8] = {left[0], left[1], left[2], left[3], right[0], right[1], right[2], right[3]};
                    uint4 *const at = part + matrix_row(lane, pair);
                    uint32 m[4];
                    if (ADD) load_pair(m, at);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if (ADD) {
                            const float2 more = unpack_two<T>(m[i]);
                            v[2 * i] += more.x;
                            v[2 * i + 1] += more.y;
                        }
                        m[i] = RELU ? pack_two<T>(relu(v[2 * i]), relu(v[2 * i + 1])) : pack_two<T>(v[2 * i], v[2 * i + 1]);
                    }
                    store_pair(at, m);
                }
                show_to_copies();
                __syncwarp();
                if (lane == 0) {
                    store_tile(y, first_column + p * CHUNK, tile * walk.y_row + own_row, tile * walk.y_line, part);
                    if (ADD && (p > 0 || tile != first_tile)) {
                        wait_for_stores<1>();
                        load_addend(result.place == 0 ? results - 1 : result.place - 1);
                    }
                }
                if (SUMS) {
                    const auto stored = [&](int r) {
                        const uint4 &vector = part[swizzled(r, lane / 4)];
                        return unpack_two<T>(reinterpret_cast<const uint32 *>(&vector)[lane % 4]);
                    };
                    if (counted == 0 && rows_here > 0) {
                        const float2 first = stored(0);
                        near[p][0] = first.x;
                        near[p][1] = first.y;
                    }
#pragma unroll 4
                    for (int r = 0; r < rows_here; ++r) {
                        const float2 v = stored(r);
                        const float from_near[2] = {v.x - near[p][0], v.y - near[p][1]};
#pragma unroll
                        for (int k = 0; k < 2; ++k) {
                            of_column[p][k][0] += from_near[k];
                            of_column[p][k][1] += from_near[k] * from_near[k];
                        }
                    }
                }
                result.next(results);
            }
            counted += rows_here;
        }
        if (lane == 0) wait_for_stores<0>();
    }
    if (!SUMS) return;

    // Over the warps, then over the blocks of the same columns.
    __syncthreads();  // the results were here
    Moments *const of_warps = reinterpret_cast<Moments *>(all_results);
    int &is_last = *reinterpret_cast<int *>(control.bias);
    if (multiplies)
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
            for (int k = 0; k < 2; ++k)
                of_warps[warp * COLUMNS + p * CHUNK + lane * 2 + k] =
                    Moments::about(near[p][k], counted, of_column[p][k][0], of_column[p][k][1]);
    __syncthreads();
    const int n = first_column + threadIdx.x;
    const bool has_column = threadIdx.x < COLUMNS && n < columns;
    if (has_column)
        partials[blockIdx.y * columns + n] =
            together(0, MULTIPLYING, 1, [&](int i) { return of_warps[i * COLUMNS + threadIdx.x]; });
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(&tickets[blockIdx.x], 1) == gridDim.y - 1;
        if (is_last) tickets[blockIdx.x] = 0;
    }
    __syncthreads();
    if (!is_last || !has_column) return;
    __threadfence();
    const Moments all = together(0, gridDim.y, 1, [&](int block) { return Moments::written(&partials[block * columns + n]); });
    sums[n] = 0;
    sums[columns + n] = all.squares;
    sums[2 * columns + n] = all.mean;
}
