// 3x3 convolutions of 64 channels with 64 filters, stride 1 and padding 1, on Hopper: the forward pass and the gradient
// of the data. ResNet's stage 1 has these convolutions.
//
//     y[filter, pixel] = sum over taps and channels of w[filter, tap, channel] * x[pixel + tap, channel]
//
// A tile in shared memory is some rows of an image, the row above and below them, and a column of zeros on each side. A
// pixel has 64 channels, which are one row of 128 bytes. So a tap of all pixels of the tile is a contiguous range of
// rows, shifted by the tap. wgmma takes it as its B operand directly, without im2col. The two zero columns of each row
// give results, too, which are never read. The gradient of the data is the same convolution with reversed taps, and
// with filters and channels exchanged: wgmma reads the weights transposed.
//
// At batch 256 and 56x56 pixels an H200 reads and writes 206 MB (0.05 ms at 4.1 TB/s) and multiplies 59 GFLOP (0.065 ms
// at the highest rate). So the tensor cores must never wait. A block keeps all weights, and one warp loads its tiles.
// Two teams of four warps alternate: one team multiplies a tile. The other team rounds its results, writes them over
// its tile, from where TMA stores them, and sums them.
//
// With BatchNorm + ReLU fused before the convolution, a team normalises its next tile in place while the other team
// multiplies. The padding stays zero. The rows that belong to the tile are stored as well.
//
// The fused gradient kernel also computes the sums for the preceding BatchNorm's backward pass, and masks the gradient by its
// ReLU. The mask is recomputed from x. A tile of x is loaded, and a warp replaces the values of its channels by the gradient.
// So the tile of dy is free as soon as it has been multiplied: two slots are enough.
#include "batch_norm.cuh"
#include "moments.cuh"
#include "pipeline.cuh"

constexpr int CHANNELS = 64, TAPS = 9, PIXEL_VECTORS = CHANNELS / VEC, TAP_VECTORS = CHANNELS * PIXEL_VECTORS;
constexpr int GROUPS = 29;  // groups of 8 pixels of one wgmma: at 56x56 these are four rows of an image
constexpr int TEAMS = 2, TEAM_THREADS = TEAM_WARPS * WARP, MMA_THREADS = TEAMS * TEAM_THREADS;
constexpr int THREADS = MMA_THREADS + WARP;
constexpr int MAX_PLACES = 3;  // most slots for tiles in shared memory
constexpr int VECTOR_BYTES = 16;
// vectors of a result slot, which holds first x, then the gradient
constexpr int RESULT_VECTORS = GROUPS * 8 * PIXEL_VECTORS;

// At the start of shared memory. Then follow the tiles; for the kernel with sums of a gradient, a result slot for each team;
// the weights, tap by tap.
struct alignas(1024) Control {
    Moments of_part[MMA_THREADS / CHANNELS][CHANNELS];
    float mean[CHANNELS], scale[CHANNELS], shift[CHANNELS];  // of the BatchNorm before the convolution
    uint64 weights, full[MAX_PLACES], empty[MAX_PLACES], order[TEAMS], x_full[TEAMS], x_empty[TEAMS];
};

// The BatchNorm + ReLU whose output is the convolution's data: its input x, its parameters, and the destinations of its
// backward sums.
struct Norm {
    const TensorMap *x;
    const float *saved, *gamma, *beta;
    float *dgamma, *dbeta;
};

// Images of height x width pixels. Each image is cut into tiles of `rows` rows; its last tile may have fewer. The tensor map
// has the rows of all images. Shared memory has `places` slots for tiles, `place_vectors` each.
struct TiledImages {
    int images, height, width, rows, places, place_vectors;

    __device__ int pitch() const { return width + 2; }
    __device__ uint32 pixels() const { return uint32(images) * height * width; }
    __device__ uint32 in_image() const { return (height + rows - 1) / rows; }
    __device__ uint32 tiles() const { return images * in_image(); }
};

// A tile: its first row within the image, its first line in the tensor map, and how many of its rows are in the image.
struct Strip {
    int row, line, rows;

    __device__ Strip(const TiledImages &of, uint32 tile) {
        const int image = tile / of.in_image();
        row = (tile - image * of.in_image()) * of.rows;
        line = image * of.height + row;
        rows = min(of.rows, of.height - row);
    }
};

// Called by one thread. Starts the loads of the weights, and of the block's tiles as slots become empty. With REDUCE also of
// the tiles of `norm_x`, into the result slots.
template <bool REDUCE, class At>
__device__ inline void load(const TensorMap &x, const TensorMap &w, const TensorMap *norm_x, Control &control, uint4 *tiles,
                            uint4 *results, uint4 *weights, const TiledImages &images, At at) {
    arrive_expect_tx(control.weights, TAPS * TAP_VECTORS * VECTOR_BYTES);
    for (int tap = 0; tap < TAPS; ++tap) tma_load(weights + tap * TAP_VECTORS, w, tap * CHANNELS, 0, 0, control.weights);
    const int row_vectors = images.pitch() * PIXEL_VECTORS;
    PipelineState pipe, team;
    for (uint32 i = blockIdx.y; i < images.tiles(); i += gridDim.y, pipe.advance(images.places), team.advance(TEAMS)) {
        const Strip strip(images, at(i));
        uint4 *const tile = tiles + pipe.index * images.place_vectors;
        mbarrier_wait(control.empty[pipe.index], pipe.phase ^ 1);  // the first round does not wait
        arrive_expect_tx(control.full[pipe.index], (images.rows + 2) * row_vectors * VECTOR_BYTES);
        for (int r = 0; r < images.rows + 2; ++r) {
            const int row = strip.row + r - 1;
            const bool there = row >= 0 && row < images.height;  // lines outside the map, such as -1, are read as zeros
            tma_load(tile + r * row_vectors, x, 0, -1, there ? strip.line + r - 1 : -1, control.full[pipe.index]);
        }
        if (!REDUCE) continue;
        uint4 *const result = results + team.index * RESULT_VECTORS;
        mbarrier_wait(control.x_empty[team.index], team.phase ^ 1);
        arrive_expect_tx(control.x_full[team.index], strip.rows * images.width * PIXEL_VECTORS * VECTOR_BYTES);
        for (int r = 0; r < strip.rows; ++r)
            tma_load(result + r * row_vectors, *norm_x, 0, 0, strip.line + r, control.x_full[team.index]);
    }
}

// Applies BatchNorm + ReLU to a team's tile, in place. A thread has 8 channels of every 16th pixel of a row, IN_FLIGHT pixels
// at a time.
template <class T>
__device__ inline void normalise(uint4 *tile, const Control &control, const TiledImages &images, const Strip &strip,
                                 int in_team) {
    constexpr int STEP = TEAM_THREADS / PIXEL_VECTORS, IN_FLIGHT = 4;
    static_assert(STEP % 8 == 0, "a thread's pixels have equal swizzles");
    const int pitch = images.pitch(), vector = in_team % PIXEL_VECTORS, own = in_team / PIXEL_VECTORS;
    float scale[VEC], shift[VEC];
    load_floats(control.scale + vector * VEC, scale);
    load_floats(control.shift + vector * VEC, shift);
    // rows that are in the image
    const int begin = max(0, 1 - strip.row), end = min(images.rows + 2, images.height + 1 - strip.row);
    for (int row = begin; row < end; ++row)
        for (int first = own; first < images.width; first += IN_FLIGHT * STEP) {
            uint4 *const at = tile + swizzled(row * pitch + 1 + first, vector);
            uint4 raw[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i)
                if (first + i * STEP < images.width) raw[i] = at[i * STEP * PIXEL_VECTORS];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i)
                if (first + i * STEP < images.width) at[i * STEP * PIXEL_VECTORS] = norm_relu<T>(raw[i], scale, shift);
        }
}

// products += the convolution of a tile. With BACKWARD, the convolution that gives the gradient of the data.
template <class T, bool BACKWARD>
__device__ inline void multiply_tile(float (&products)[GROUPS][4], const uint4 *weights, const uint4 *tile, int pitch) {
    wgmma_fence();
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
        const uint64 pixels = smem_desc(tile + (tap / 3 * pitch + tap % 3) * PIXEL_VECTORS);
        const uint4 *const of_tap = weights + (BACKWARD ? TAPS - 1 - tap : tap) * TAP_VECTORS;
#pragma unroll
        for (int s = 0; s < CHANNELS / 16; ++s)
            if constexpr (BACKWARD)
                wgmma_mn_k(products, smem_desc(of_tap + s * 16 * PIXEL_VECTORS), pixels + s * 2, T{});
            else
                wgmma_k_k(products, smem_desc(of_tap + s * 2), pixels + s * 2, T{});
    }
    wgmma_commit();
}

// Mask of this thread's pixels of a tile that lie in a column of the image. Bit 2 * g + e is pixel e of group g.
__device__ inline uint64 columns_inside(int lane, int width, int pitch) {
    uint64 inside = 0;
    for (int g = 0; g < GROUPS; ++g)
        for (int e = 0; e < 2; ++e) inside |= uint64((g * 8 + lane % 4 * 2 + e) % pitch < width) << (2 * g + e);
    return inside;
}
// Mask of this thread's pixels that are among the first `pixels` of the tile.
__device__ inline uint64 first_pixels(int lane, int pixels) {
    const int from_own = max(0, pixels - lane % 4 * 2);  // counted from this thread's first pixel, which has bit 0
    return (1ull << (from_own / 8 * 2 + min(from_own % 8, 2))) - 1;
}

constexpr NamedBarrier<3, MMA_THREADS> sync_mma_warps{};

// Sums over the four threads that share a filter.
__device__ inline float sum_over_pixels(float v) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) v += __shfl_xor_sync(0xffffffff, v, distance);
    return v;
}

// Sums over the pixels of a thread's two filters: of v - pivot and of (v - pivot)^2. The pivot is a value near the mean.
struct Sums {
    float pivot[2] = {}, acc[2][2] = {};
    uint32 counted = 0;  // pixels, over all threads of a filter

    // Adds the pixels of a tile that are set in `inside`. `m` has the layout of `convolve`. All threads of a filter use
    // one pivot.
    template <class T> __device__ void add(const uint32 (&m)[GROUPS][2], uint64 inside, uint32 pixels, int lane) {
        // Each tile is summed separately first: bf16 has few distinct values, so thousands of additions to one sum
        // would all round in one direction.
        float of_tile[2][2] = {};
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            if (counted == 0) pivot[f] = __shfl_sync(0xffffffff, unpack_two<T>(m[0][f]).x, lane & ~3);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const float2 v = unpack_two<T>(m[g][f]);
                const float deviation[2] = {v.x - pivot[f], v.y - pivot[f]};
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (inside >> (2 * g + e) & 1) {
                        of_tile[f][0] += deviation[e];
                        of_tile[f][1] += deviation[e] * deviation[e];
                    }
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) acc[f][j] += of_tile[f][j];
        }
        counted += pixels;
    }

    // Moments of the first (f = 0) or second (f = 1) filter, over all threads that share it.
    __device__ Moments moments(int f) const {
        return Moments::from_sums(pivot[f], counted, sum_over_pixels(acc[f][0]), sum_over_pixels(acc[f][1]));
    }
};

// BatchNorm's mean, scale and shift of a thread's two channels.
struct Channels {
    float mean[2], scale[2], shift[2];

    __device__ Channels(const Control &control, int channel) {
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            mean[f] = control.mean[channel + f * 8];
            scale[f] = control.scale[channel + f * 8];
            shift[f] = control.shift[channel + f * 8];
        }
    }
};

// On entry, `m` has x: for each group of pixels and each of two channels, two pixels. On exit, it has the products, masked by
// ReLU. The sums are of the rounded values: sums[f] has the gradient of channel f, and the gradient times x - mean. Bits of
// `inside` are numbered from the first of these groups.
template <class T, int N>
__device__ inline void mask_groups(uint32 (&m)[N], const float (*products)[4], uint32 inside, const Channels &of,
                                   float (&sums)[2][2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int g = i / 2, f = i % 2;
        const float2 both = unpack_two<T>(m[i]);
        const float v[2] = {both.x, both.y};
        bool open[2];
        float dz[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            open[e] = inside & 1u << (2 * g + e) && v[e] * of.scale[f] + of.shift[f] > 0;
            dz[e] = open[e] ? products[g][2 * f + e] : 0;
        }
        m[i] = pack_two<T>(dz[0], dz[1]);
        const float2 rounded = unpack_two<T>(m[i]);
        sums[f][0] += rounded.x + rounded.y;
        if (open[0]) sums[f][1] += rounded.x * (v[0] - of.mean[f]);  // v is undefined outside the image
        if (open[1]) sums[f][1] += rounded.y * (v[1] - of.mean[f]);
    }
}
// Masks a whole tile, in the slot that has x. x of the next groups is loaded ahead. `at` is this lane's matrix row in the
// first two groups.
template <class T>
__device__ inline void mask_tile(uint4 *at, const float (&products)[GROUPS][4], uint64 inside, const Channels &of,
                                 float (&sums)[2][2]) {
    constexpr int LAST = GROUPS - 1, STEP = 8 * PIXEL_VECTORS;
    float of_tile[2][2] = {};
    uint32 m[2][4], last[2];
    ldmatrix_trans(m[0], at);
#pragma unroll
    for (int g = 0; g < LAST; g += 2) {
        uint32 (&now)[4] = m[g / 2 % 2];
        if (g + 2 < LAST)
            ldmatrix_trans(m[(g / 2 + 1) % 2], at + (g + 2) * STEP);
        else
            ldmatrix_trans(last, at + LAST * STEP);
        mask_groups<T>(now, &products[g], inside >> 2 * g, of, of_tile);
        stmatrix_trans(at + g * STEP, now);
    }
    mask_groups<T>(last, &products[LAST], inside >> 2 * LAST, of, of_tile);
    stmatrix_trans(at + LAST * STEP, last);
#pragma unroll
    for (int f = 0; f < 2; ++f)
#pragma unroll
        for (int j = 0; j < 2; ++j) sums[f][j] += of_tile[f][j];
}

// The body of the kernels below. `norm_out` is the tensor map for the output of the fused BatchNorm.
template <class T, bool SUMS, bool RELU, bool BACKWARD, bool REDUCE, bool NORM>
__device__ inline void convolve(const TensorMap &x, const TensorMap &w, const TensorMap &y, const float *bias, float *sums,
                                const Norm &norm, const FusedNorm &before, const TensorMap *norm_out, float *partials,
                                uint32 *tickets, const TiledImages &images) {
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    uint4 *const tiles = memory + sizeof(Control) / VECTOR_BYTES, *const results = tiles + images.places * images.place_vectors;
    uint4 *const weights = results + (REDUCE ? TEAMS * RESULT_VECTORS : 0);
    const int lane = lane_index(), warp = warp_index();
    // Inference begins at the end of the tensor, training at the start, because the previous launch has left this part
    // of the data in the L2 cache.
    const auto at = [&](uint32 i) { return RELU ? images.tiles() - 1 - i : i; };

    if (threadIdx.x == 0) {
        mbarrier_init(control.weights, 1);
        for (int place = 0; place < images.places; ++place) {
            mbarrier_init(control.full[place], 1);
            mbarrier_init(control.empty[place], REDUCE ? TEAM_WARPS : 1);
        }
        for (int team = 0; team < TEAMS; ++team) {
            mbarrier_init(control.order[team], TEAM_WARPS);
            if (!REDUCE) continue;
            mbarrier_init(control.x_full[team], 1);
            mbarrier_init(control.x_empty[team], 1);
        }
        fence_barrier_init();
    }
    if (REDUCE && threadIdx.x < CHANNELS / VEC) {
        const int c = threadIdx.x * VEC;
        Backward(norm.saved, norm.gamma, norm.beta, c, CHANNELS).store(control.mean + c, control.scale + c, control.shift + c);
    }
    if (NORM && threadIdx.x < CHANNELS / VEC) {
        const int c = threadIdx.x * VEC;
        const Forward of = before.forward(images.pixels(), c, CHANNELS);
        store_floats(control.scale + c, of.scale);
        store_floats(control.shift + c, of.shift);
    }
    __syncthreads();
    const bool is_mma_warp = warp < MMA_THREADS / WARP;
    if (!is_mma_warp) {
        if (lane == 0) load<REDUCE>(x, w, norm.x, control, tiles, results, weights, images, at);
        if (!REDUCE) return;
        __syncwarp();
    }

    const int team = warp / TEAM_WARPS, own = warp % TEAM_WARPS, in_team = threadIdx.x % TEAM_THREADS, pitch = images.pitch();
    const int filter = own * 16 + lane / 4;  // the thread's second filter is filter + 8
    const int matrix_row = swizzled(lane / 16 * 8 + lane % 8, own * 2 + lane / 8 % 2);  // for ldmatrix_trans and stmatrix_trans
    const float biases[2] = {RELU ? bias[filter] : 0, RELU ? bias[filter + 8] : 0};
    const uint64 inside = SUMS || REDUCE ? columns_inside(lane, images.width, pitch) : 0;
    Sums of_filters;
    float of_gradient[2][2] = {};
    PipelineState pipe;
    uint32 round = 0;
    if (team > 0) pipe.advance(images.places);
    mbarrier_wait(control.weights, 0);
    for (uint32 i = blockIdx.y + team * gridDim.y; is_mma_warp && i < images.tiles(); i += TEAMS * gridDim.y, ++round) {
        const Strip strip(images, at(i));
        uint4 *const tile = tiles + pipe.index * images.place_vectors;
        uint4 *const result = REDUCE ? results + team * RESULT_VECTORS : tile;
        if constexpr (NORM) {
            // The slot's previous tile is no longer in use: the other team has finished with it before it passed the last
            // turn to this team.
            mbarrier_wait(control.full[pipe.index], pipe.phase);
            normalise<T>(tile, control, images, strip, in_team);
            tma_store_fence();  // also makes the tile visible to wgmma
            team_sync<TEAM_THREADS>(team);
            if (in_team == 0)
                for (int r = 0; r < strip.rows; ++r)
                    tma_store(*norm_out, 0, 0, strip.line + r, tile + ((r + 1) * pitch + 1) * PIXEL_VECTORS);
            __syncwarp();
        }
        float products[GROUPS][4];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) products[g][e] = biases[e / 2];

        // The teams take turns. The wait for the tile comes after the wait for the turn: by then the other team has
        // seen the end of the slot's previous phase.
        mbarrier_wait(control.order[team], (round + 1 - team) & 1);
        if (!NORM) mbarrier_wait(control.full[pipe.index], pipe.phase);
        multiply_tile<T, BACKWARD>(products, weights, tile, pitch);
        if (lane == 0) arrive(control.order[1 - team]);
        wgmma_wait();
        wgmma_fence_operand(products);

        const uint64 counted = inside & first_pixels(lane, strip.rows * pitch);
        uint32 m[GROUPS][2];  // two pixels of each filter
        if constexpr (REDUCE) {
            if (lane == 0) arrive(control.empty[pipe.index]);
            mbarrier_wait(control.x_full[team], round & 1);
            mask_tile<T>(result + matrix_row, products, counted, Channels(control, filter), of_gradient);
        } else {
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int f = 0; f < 2; ++f) {
                    const float left = products[g][2 * f], right = products[g][2 * f + 1];
                    m[g][f] = RELU ? pack_two<T>(relu(left), relu(right)) : pack_two<T>(left, right);
                }
            if (NORM && in_team == 0) tma_store_wait<0>();
            team_sync<TEAM_THREADS>(team);  // all warps of the team have read the tile
#pragma unroll
            for (int g = 0; g < GROUPS - 1; g += 2)
                stmatrix_trans(result + g * 8 * PIXEL_VECTORS + matrix_row, {m[g][0], m[g][1], m[g + 1][0], m[g + 1][1]});
            stmatrix_trans(result + (GROUPS - 1) * 8 * PIXEL_VECTORS + matrix_row, m[GROUPS - 1]);
        }
        tma_store_fence();
        team_sync<TEAM_THREADS>(team);
        if (in_team == 0)
            for (int r = 0; r < strip.rows; ++r) tma_store(y, 0, 0, strip.line + r, result + r * pitch * PIXEL_VECTORS);

        if (SUMS) of_filters.add<T>(m, counted, strip.rows * images.width, lane);
        if (in_team == 0) {
            tma_store_wait<0>();
            arrive(REDUCE ? control.x_empty[team] : control.empty[pipe.index]);
        }
        __syncwarp();  // reconverge, because wgmma needs whole warps
        for (int t = 0; t < TEAMS; ++t) pipe.advance(images.places);
    }
    if constexpr (SUMS) {
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            const Moments of_filter = of_filters.moments(f);
            if (lane % 4 == 0) control.of_part[team][filter + f * 8] = of_filter;
        }
        finish_column_moments<CHANNELS, MMA_THREADS>(&control.of_part[0][0], TEAMS, 0, CHANNELS, partials, tickets,
                                                     sums, sync_mma_warps);
    }
    if constexpr (REDUCE) {
        float *const of_teams = reinterpret_cast<float *>(tiles);
        __syncthreads();  // reuses the memory of dy
#pragma unroll
        for (int f = 0; f < 2; ++f)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float sum = sum_over_pixels(of_gradient[f][j]);
                if (is_mma_warp && lane % 4 == 0) of_teams[(team * 2 + j) * CHANNELS + filter + f * 8] = sum;
            }
        reduce_parts<THREADS, TEAMS, 2, CHANNELS>(of_teams, partials, tickets, CHANNELS, [=](int n, const float (&of)[2]) {
            norm.dbeta[n] = of[0];
            norm.dgamma[n] = of[1] * norm.saved[CHANNELS + n];
        });
    }
}

// y = the convolution. SUMS: `sums` are the sums of y about the mean of each filter, in a fixed order. RELU: y =
// relu(convolution + bias).
// Tensor maps: the lines of x are whole rows of images, in tiles of one line, two pixels more than a row, and 64 channels.
// The tiles of y lack the two pixels. w is a matrix with columns (3, 3, C), in tiles of 64 columns. gridDim.y blocks share
// the tiles.
// Shapes: x (N, H, W, C), w (K, 3, 3, C), y (N, H, W, K) with C = K = CHANNELS; bias (K), sums (3, K), partials (3 *
// gridDim.y * K) fp32; tickets (1).
template <class T, bool SUMS, bool RELU>
__global__ void __launch_bounds__(THREADS, 1)
conv3x3_forward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap y,
                const float *bias, float *sums, float *partials, uint32 *tickets, const __grid_constant__ TiledImages images) {
    convolve<T, SUMS, RELU, false, false, false>(x, w, y, bias, sums, {}, {}, nullptr, partials, tickets, images);
}

// y = relu(BatchNorm(x)), with the values that `Forward` saves, and z = the convolution of y, with the sums of z. The
// tensor maps of the loaded x and the stored y and z are as in the kernel above.
// Shapes: x, y (N, H, W, C), w (K, 3, 3, C), z (N, H, W, K) with C = K = CHANNELS; sums (2 or 3, C), saved (2, C),
// gamma, beta, running_mean, running_var (C), sums_of_z (3, K), partials (3 * gridDim.y * K) fp32; tickets (1).
template <class T>
__global__ void __launch_bounds__(THREADS, 1)
norm_conv3x3(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap y,
             const __grid_constant__ TensorMap z, const float *sums, bool about_mean, const float *gamma, const float *beta,
             float *saved, float *running_mean, float *running_var, float eps, float momentum, float *sums_of_z,
             float *partials, uint32 *tickets, const __grid_constant__ TiledImages images) {
    const FusedNorm before{sums, about_mean, gamma, beta, saved, running_mean, running_var, eps, momentum};
    convolve<T, true, false, false, false, true>(x, w, z, nullptr, sums_of_z, {}, before, &y, partials, tickets, images);
}

// dx = the gradient of the convolution's data. The tensor maps are as above, with dy for x and dx for y.
// Shapes: dy (N, H, W, K), w (K, 3, 3, C), dx (N, H, W, C) with C = K = CHANNELS.
template <class T>
__global__ void __launch_bounds__(THREADS, 1)
conv3x3_dgrad(const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap dx,
              const __grid_constant__ TiledImages images) {
    convolve<T, false, false, true, false, false>(dy, w, dx, nullptr, nullptr, {}, {}, nullptr, nullptr, nullptr, images);
}

// dz = the gradient of the convolution's data, masked by the ReLU that made the data, with the sums of
// batch_norm_backward_reduce. x is the input of that ReLU's BatchNorm; its tensor map is like that of dz.
// Shapes: as above, and x, dz (N, H, W, C); saved (2, C), gamma, beta, dgamma, dbeta (C), partials (gridDim.y, 2, C) fp32;
// tickets (1).
template <class T>
__global__ void __launch_bounds__(THREADS, 1)
conv3x3_dgrad_reduce(const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap w,
                     const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dz, const float *saved,
                     const float *gamma, const float *beta, float *dgamma, float *dbeta, float *partials, uint32 *tickets,
                     const __grid_constant__ TiledImages images) {
    const Norm norm{&x, saved, gamma, beta, dgamma, dbeta};
    convolve<T, false, false, true, true, false>(dy, w, dz, nullptr, nullptr, norm, {}, nullptr, partials, tickets, images);
}
