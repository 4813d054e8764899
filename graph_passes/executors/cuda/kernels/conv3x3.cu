// 3x3 convolutions of 64 channels with 64 filters, at stride 1 and padding 1, forward and the gradient of their data, on Hopper:
// those of ResNet's stage 1.
//
// As a matrix product, y[filter, pixel] = sum over taps and channels of w[filter, tap, channel] * x[pixel + tap, channel]. A tile
// is some rows of an image, with those above and below and a column of zeros on each side, in shared memory: a pixel has 64
// channels there, which are one row of 128 bytes. A tap of all pixels of the tile is so many rows from one place on, and wgmma
// takes them from there as its second operand: no window is ever copied. At the columns of zeros, too, products are made, 2 for a
// row, which nobody reads. The gradient of the data is the same convolution with the taps in reverse order, and filters for
// channels: wgmma reads the weights as they are, transposed.
//
// At batch 256 and 56x56 pixels an H200 reads and writes 206 MB for it (0.05 ms at 4.1 TB/s) and multiplies 59 GFLOP (0.065 ms at
// the highest rate). So the tensor cores never wait: a block keeps all weights, one warp starts the copies of its tiles, and
// of two teams of four warps one multiplies a tile while the other rounds its own, leaves it where it has read it, for the copy
// engine to take away, and adds up.
#include "copy_engine.cuh"
#include "moments.cuh"
#include "warpgroup.cuh"

constexpr int CHANNELS = 64, TAPS = 9, PIXEL_VECTORS = CHANNELS / VEC, TAP_VECTORS = CHANNELS * PIXEL_VECTORS;
constexpr int GROUPS = 29;  // of 8 pixels, that one product makes: at 56x56 four rows of an image
constexpr int TEAMS = 2, TEAM_WARPS = 4, TEAM_THREADS = TEAM_WARPS * WARP, MULTIPLYING = TEAMS * TEAM_THREADS;
constexpr int THREADS = MULTIPLYING + WARP;
constexpr int MAX_PLACES = 3;  // of tiles in shared memory
constexpr int VECTOR_BYTES = 16;

// At the start of shared memory. Behind it lie the tiles, then the weights, tap by tap.
struct alignas(1024) Control {
    Moments of_part[MULTIPLYING / CHANNELS][CHANNELS];
    uint64 weights, full[MAX_PLACES], empty[MAX_PLACES], turn[TEAMS];
    int is_last;
};

// Images of height x width pixels, `rows` of them in a tile, which starts at each row of a map of all images' rows that is a
// multiple of `rows` in its image. Shared memory has `places` for tiles, each of so many vectors.
struct TiledImages {
    int images, height, width, rows, places, place_vectors;

    __device__ int pitch() const { return width + 2; }
    __device__ uint32 in_image() const { return (height + rows - 1) / rows; }
    __device__ uint32 tiles() const { return images * in_image(); }
};

// A tile: its first row in the image, and in the map of all rows; how many of its rows are in the image.
struct Strip {
    int row, line, rows;

    __device__ Strip(const TiledImages &of, uint32 tile) {
        const int image = tile / of.in_image();
        row = (tile - image * of.in_image()) * of.rows;
        line = image * of.height + row;
        rows = min(of.rows, of.height - row);
    }
};

// For one thread: starts the copies of the weights, and of the block's tiles as places become free.
template <class At>
__device__ inline void load(const TensorMap &x, const TensorMap &w, Control &control, uint4 *tiles, uint4 *weights,
                            const TiledImages &images, At at) {
    arrive_expecting(control.weights, TAPS * TAP_VECTORS * VECTOR_BYTES);
    for (int tap = 0; tap < TAPS; ++tap) load_tile(weights + tap * TAP_VECTORS, w, tap * CHANNELS, 0, 0, control.weights);
    const int row_vectors = images.pitch() * PIXEL_VECTORS;
    Turn turn;
    for (uint32 i = blockIdx.y; i < images.tiles(); i += gridDim.y, turn.next(images.places)) {
        const Strip strip(images, at(i));
        uint4 *const tile = tiles + turn.place * images.place_vectors;
        wait_for_phase(control.empty[turn.place], turn.parity ^ 1);  // at once in the first turn
        arrive_expecting(control.full[turn.place], (images.rows + 2) * row_vectors * VECTOR_BYTES);
        for (int r = 0; r < images.rows + 2; ++r) {
            const int row = strip.row + r - 1;
            const bool there = row >= 0 && row < images.height;  // else zeros, as from any line outside of the map
            load_tile(tile + r * row_vectors, x, 0, -1, there ? strip.line + r - 1 : -1, control.full[turn.place]);
        }
    }
}

// products += the convolution of a tile, or with BACKWARD what it is for the gradient of the data.
template <class T, bool BACKWARD>
__device__ inline void multiply_tile(float (&products)[GROUPS][4], const uint4 *weights, const uint4 *tile, int pitch) {
    open_products();
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        const uint64 pixels = matrix(tile + (tap / 3 * pitch + tap % 3) * PIXEL_VECTORS);
        const uint4 *const of_tap = weights + (BACKWARD ? TAPS - 1 - tap : tap) * TAP_VECTORS;
#pragma unroll
        for (int s = 0; s < CHANNELS / 16; ++s)
            if constexpr (BACKWARD)
                multiply_columns_by_rows(products, matrix(of_tap + s * 16 * PIXEL_VECTORS), pixels + s * 2, T{});
            else
                multiply_rows(products, matrix(of_tap + s * 2), pixels + s * 2, T{});
    }
    close_products();
}

// Which pixels of a tile, of those that a thread has, are in a column of the image: bit 2 * g + e is of pixel e of group g.
__device__ inline uint64 columns_inside(int lane, int width, int pitch) {
    uint64 inside = 0;
    for (int g = 0; g < GROUPS; ++g)
        for (int e = 0; e < 2; ++e) inside |= uint64((g * 8 + lane % 4 * 2 + e) % pitch < width) << (2 * g + e);
    return inside;
}
// Those bits of which the pixel is one of the first `pixels`.
__device__ inline uint64 first_pixels(int lane, int pixels) {
    const int from_own = max(0, pixels - lane % 4 * 2);  // from the thread's first on, which has bit 0
    return (1ull << (from_own / 8 * 2 + min(from_own % 8, 2))) - 1;
}

__device__ inline void meet_team(int team) {
    asm volatile("bar.sync %0, %1;" :: "r"(team + 1), "n"(TEAM_THREADS) : "memory");
}
__device__ inline void meet_multiplying() { asm volatile("bar.sync 3, %0;" :: "n"(MULTIPLYING) : "memory"); }

// A thread's sums over the pixels of its two filters: of what differs from a value near the mean, and of its square.
struct Sums {
    float near[2] = {}, acc[2][2] = {};
    uint32 counted = 0;  // pixels, of all threads of a filter

    // Those of a tile, which have these bits in `inside`; m as `convolve` has it. All threads of a filter take the same value.
    template <class T> __device__ void add(const uint32 (&m)[GROUPS][2], uint64 inside, uint32 pixels, int lane) {
        // Of bf16, which has few different values, thousands of sums in a row would all round the same way.
        float of_tile[2][2] = {};
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            if (counted == 0) near[f] = __shfl_sync(0xffffffff, unpack_two<T>(m[0][f]).x, lane & ~3);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const float2 v = unpack_two<T>(m[g][f]);
                const float from_near[2] = {v.x - near[f], v.y - near[f]};
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (inside >> (2 * g + e) & 1) {
                        of_tile[f][0] += from_near[e];
                        of_tile[f][1] += from_near[e] * from_near[e];
                    }
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) acc[f][j] += of_tile[f][j];
        }
        counted += pixels;
    }

    // Of all threads of the first (0) or second (1) filter.
    __device__ Moments moments(int f) const {
        float sums[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            sums[j] = acc[f][j];
#pragma unroll
            for (int distance = 1; distance < 4; distance *= 2) sums[j] += __shfl_xor_sync(0xffffffff, sums[j], distance);
        }
        return Moments::about(near[f], counted, sums[0], sums[1]);
    }
};

// What the kernels below have in common.
template <class T, bool SUMS, bool RELU, bool BACKWARD>
__device__ inline void convolve(const TensorMap &x, const TensorMap &w, const TensorMap &y, const float *bias, float *sums,
                                float *partials, uint32 *tickets, const TiledImages &images) {
    static_assert(sizeof(Control) == 4096, "as lowering/conv3x3.py counts");
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    uint4 *const tiles = memory + sizeof(Control) / VECTOR_BYTES, *const weights = tiles + images.places * images.place_vectors;
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    // From the end of the tensor in inference, and from its start in training: what the launch before has left in the L2 cache.
    const auto at = [&](uint32 i) { return RELU ? images.tiles() - 1 - i : i; };

    if (threadIdx.x == 0) {
        init_barrier(control.weights, 1);
        for (int place = 0; place < images.places; ++place) {
            init_barrier(control.full[place], 1);
            init_barrier(control.empty[place], 1);
        }
        for (int team = 0; team < TEAMS; ++team) init_barrier(control.turn[team], TEAM_WARPS);
        show_barriers();
    }
    __syncthreads();
    if (warp == MULTIPLYING / WARP) {
        if (lane == 0) load(x, w, control, tiles, weights, images, at);
        return;
    }

    const int team = warp / TEAM_WARPS, own = warp % TEAM_WARPS, in_team = threadIdx.x % TEAM_THREADS, pitch = images.pitch();
    const int filter = own * 16 + lane / 4;  // and 8 further down
    const int matrix_row = swizzled(lane / 16 * 8 + lane % 8, own * 2 + lane / 8 % 2);  // for `store_transposed`
    const float biases[2] = {RELU ? bias[filter] : 0, RELU ? bias[filter + 8] : 0};
    const uint64 inside = SUMS ? columns_inside(lane, images.width, pitch) : 0;
    Sums of_filters;
    Turn turn;
    uint32 round = 0;
    if (team > 0) turn.next(images.places);
    wait_for_phase(control.weights, 0);
    for (uint32 i = blockIdx.y + team * gridDim.y; i < images.tiles(); i += TEAMS * gridDim.y, ++round) {
        const Strip strip(images, at(i));
        uint4 *const tile = tiles + turn.place * images.place_vectors;
        float products[GROUPS][4];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) products[g][e] = biases[e / 2];

        // One team after the other. Only then for the tile: the other team has seen the one that was there before.
        wait_for_phase(control.turn[team], (round + 1 - team) & 1);
        wait_for_phase(control.full[turn.place], turn.parity);
        multiply_tile<T, BACKWARD>(products, weights, tile, pitch);
        if (lane == 0) arrive(control.turn[1 - team]);
        wait_for_products();
        hold_products(products);

        uint32 m[GROUPS][2];  // two pixels each, of both filters
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int f = 0; f < 2; ++f) {
                const float left = products[g][2 * f], right = products[g][2 * f + 1];
                m[g][f] = RELU ? pack_two<T>(relu(left), relu(right)) : pack_two<T>(left, right);
            }
        meet_team(team);  // all have read the tile
#pragma unroll
        for (int g = 0; g < GROUPS - 1; g += 2)
            store_transposed(tile + g * 8 * PIXEL_VECTORS + matrix_row, {m[g][0], m[g][1], m[g + 1][0], m[g + 1][1]});
        store_transposed(tile + (GROUPS - 1) * 8 * PIXEL_VECTORS + matrix_row, m[GROUPS - 1]);
        show_to_copies();
        meet_team(team);
        if (in_team == 0)
            for (int r = 0; r < strip.rows; ++r) store_tile(y, 0, 0, strip.line + r, tile + r * pitch * PIXEL_VECTORS);

        if (SUMS)
            of_filters.add<T>(m, inside & first_pixels(lane, strip.rows * pitch), strip.rows * images.width, lane);
        if (in_team == 0) {
            wait_for_stores<0>();
            arrive(control.empty[turn.place]);
        }
        __syncwarp();  // products are started by whole warps
        for (int t = 0; t < TEAMS; ++t) turn.next(images.places);
    }
    if constexpr (SUMS) {
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            const Moments of_filter = of_filters.moments(f);
            if (lane % 4 == 0) control.of_part[team][filter + f * 8] = of_filter;
        }
        write_sums_of_columns<CHANNELS, MULTIPLYING>(&control.of_part[0][0], TEAMS, 0, CHANNELS, partials, tickets,
                                                     control.is_last, sums, [] { meet_multiplying(); });
    }
}

// y = the convolution, with SUMS those of y per filter about its mean, in a fixed order; or with RELU y = relu(the convolution +
// bias). The map of x has lines of whole rows of images, in tiles of one line and two pixels more, 64 channels; that of y those
// without the two; that of w is a matrix of columns (3, 3, C) in tiles of 64 columns. gridDim.y blocks share the tiles.
// Shapes: x (N, H, W, C), w (K, 3, 3, C), y (N, H, W, K) with C = K = CHANNELS; bias (K), sums (3, K), partials
// (3 * gridDim.y * K) fp32; tickets (1).
template <class T, bool SUMS, bool RELU>
__global__ void __launch_bounds__(THREADS, 1)
conv3x3_forward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap y,
                const float *bias, float *sums, float *partials, uint32 *tickets, const __grid_constant__ TiledImages images) {
    convolve<T, SUMS, RELU, false>(x, w, y, bias, sums, partials, tickets, images);
}

// dx = the gradient of the data of such a convolution; the maps are as above, of dy for x, and of dx for y.
// Shapes: dy (N, H, W, K), w (K, 3, 3, C), dx (N, H, W, C) with C = K = CHANNELS.
template <class T>
__global__ void __launch_bounds__(THREADS, 1)
conv3x3_dgrad(const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap dx,
              const __grid_constant__ TiledImages images) {
    convolve<T, false, false, true>(dy, w, dx, nullptr, nullptr, nullptr, nullptr, images);
}
