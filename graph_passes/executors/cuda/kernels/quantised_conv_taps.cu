// INT8 convolutions on Hopper that are bound by the tensor cores: 3x3 with padding 1 and stride 1 or 2, and 1x1 with
// many filters.
//
//     y[filter, pixel] = sum over taps and channels of w[filter, tap, channel] * x[pixel + tap, channel], as in conv3x3.cu
//
// A tile in shared memory is some rows of one or several images, the row above and below them, and a column of zeros on
// the left. It consists of parts of up to 128 channels. In a part, a tap of all pixels is a contiguous range of rows,
// which wgmma reads as its B operand. The zero to the left of a row also serves as the zero to the right of the
// previous row. With several images, row 0 of all images comes first, then row 1 of all images, and so on: they share
// the zero rows above and below, and the distance between consecutive rows is constant. For 1x1, a tile is consecutive
// pixels. With stride 2, the same channels give four parts: the pixels in even or odd rows and even or odd columns.
// Each part serves 1, 2 or 4 taps, which read the part as with stride 1.
//
// Two teams of four warps alternate: one team multiplies by 64 filters while the other team requantises. Weights come
// in pieces: 64 filters of one part of one tap. Weights stay in shared memory if all weights of a block fit; otherwise
// they are streamed. The two blocks of a cluster need the same weights at the same time, so each block loads one half
// from the L2 cache, for both blocks. The addend is loaded ahead, into the slot where the result will be written.
#include "integer_products.cuh"
#include "pipeline.cuh"

constexpr int FILTERS = 64, VECTOR_BYTES = 16;
constexpr int TEAMS = 2, TEAM_THREADS = TEAM_WARPS * WARP, MMA_THREADS = TEAMS * TEAM_THREADS;
constexpr int THREADS = MMA_THREADS + 3 * WARP;   // three producer warps: for weights, pixels and addends
constexpr int PEERS = 2;                          // blocks of a cluster
constexpr int MAX_PLACES = 16, MAX_STAGES = 40;   // slots for parts of tiles; stages of weights
// most result slots, with an addend; without an addend there is one slot for each team, or one for both
constexpr int MAX_RESULTS = 4;
constexpr int RESULT_VECTORS = FILTERS / VECTOR;  // vectors of a pixel's results

// At the start of shared memory. Then follow, in vectors: `stages` of weights, `places` slots for parts of tiles, `results`
// slots of 64 filters.
struct alignas(1024) Control {
    uint64 full[MAX_PLACES], empty[MAX_PLACES], weights_full[MAX_STAGES], weights_empty[MAX_STAGES];
    uint64 order[TEAMS], result_order[TEAMS], addend_full[MAX_RESULTS], addend_empty[MAX_RESULTS];
};

// Sizes of the convolution. The output has `height` x `width` pixels. A tile gives `rows` output rows of `together` images;
// its input consists of `parts` parts (see the top of this file), each of `rows` + `more` rows. Windows reach `pad` pixels, 1
// or 0, in each direction. A part takes `part_vectors` vectors of shared memory; TMA writes the first of them. `places`,
// `stages` and `results` are numbers of slots (see Control). A block computes `groups` of the `all_groups` groups of 64
// filters.
struct TappedImages {
    int images, height, width, pad, rows, more, together, parts, places, part_vectors, stages, results, groups, all_groups;

    __device__ int pitch() const { return width + pad; }
    __device__ int strips() const { return (height + rows - 1) / rows; }
    __device__ int result_pixels() const { return rows * together * pitch(); }
    __device__ int copied_pixels() const { return (rows + more) * together * pitch(); }
    // Pairs of tiles: each block of a cluster computes one. The last tile may have no images.
    __device__ uint32 pairs() const { return (uint32((images + together - 1) / together) * strips() + PEERS - 1) / PEERS; }
};

// The work of a block: `rounds` tiles. For each tile the block computes `groups` groups of filters, from `first_group`
// on.
struct WorkRange {
    uint32 rank, rounds;
    int first_group, groups;

    __device__ WorkRange(const TappedImages &of)
        : rank(blockIdx.x), rounds((of.pairs() - blockIdx.y + gridDim.y - 1) / gridDim.y), first_group(blockIdx.z * of.groups),
          groups(min(of.groups, of.all_groups - first_group)) {}
    __device__ uint32 items() const { return rounds * groups; }
};

// First image and first row of a tile.
struct Strip {
    int image, row;

    __device__ Strip(const TappedImages &of, const WorkRange &range, uint32 round) {
        const uint32 tile = (blockIdx.y + round * gridDim.y) * PEERS + range.rank, strips = of.strips();
        image = tile / strips * of.together;
        row = tile % strips * of.rows;
    }
};

// A part: its channels and, with STRIDE 2, whether it has odd or even rows and columns. Determines the taps that the
// part serves.
template <int STRIDE> struct Part {
    int channels, odd_row, odd_column;

    __device__ explicit Part(int part)
        : channels(part / (STRIDE * STRIDE)), odd_row(part / STRIDE % STRIDE), odd_column(part % STRIDE) {}
    // Calls `f` with row and column of each tap in the window.
    template <int SIZE, class F> __device__ void for_taps(F f) const {
        for (int h = (STRIDE - 1) ^ odd_row; h < SIZE; h += STRIDE)
            for (int w = (STRIDE - 1) ^ odd_column; w < SIZE; w += STRIDE) f(h, w);
    }
};

// State of the circular buffer of `places` slots at piece `number`.
__device__ inline PipelineState state_at(uint32 number, int places) {
    PipelineState pipe;
    pipe.index = number % places;
    pipe.phase = number / places & 1;
    return pipe;
}

// Descriptor of a K-major operand as TMA writes it: swizzled over 128 bytes for 128 channels, else over 64.
template <int CHANNELS> __device__ inline uint64 smem_desc_of(const uint4 *at) {
    return CHANNELS == 128 ? smem_desc(at)
                           : (__cvta_generic_to_shared(at) & 0x3ffff) >> 4 | 32ull << 16 | 32ull << 32 | 2ull << 62;
}

// --- called by one thread ---

// Starts the loads of the weights, in the order of use. They are loaded only once if they stay in shared memory.
template <int SIZE, int STRIDE, int CHANNELS>
__device__ inline void load_weights(const TensorMap &w, Control &control, uint4 *weights, const TappedImages &images,
                                    const WorkRange &range, bool stay) {
    // OWN: groups of 16 filters that this block loads
    constexpr int VECTORS = FILTERS * CHANNELS / VECTOR, OWN = FILTERS / PEERS / VECTOR;
    const int of_tap = images.parts / (STRIDE * STRIDE);
    PipelineState pipe;
    for (uint32 item = 0; item < (stay ? range.groups : range.items()); ++item)
        for (int i = 0; i < images.parts; ++i) {
            const Part<STRIDE> part(i);
            part.template for_taps<SIZE>([&](int h, int v) {
                mbarrier_wait(control.weights_empty[pipe.index], pipe.phase ^ 1);  // the first round does not wait
                uint64 &full = control.weights_full[pipe.index];
                arrive_expect_tx(full, VECTORS * VECTOR_BYTES);
                tma_load_multicast<PEERS>(weights + pipe.index * VECTORS + range.rank * (VECTORS / PEERS), w,
                                          ((h * SIZE + v) * of_tap + part.channels) * CHANNELS, 0, 0,
                                          ((range.first_group + item % range.groups) * PEERS + range.rank) * OWN, full);
                pipe.advance(images.stages);
            });
        }
}

template <int STRIDE, int CHANNELS>
__device__ inline void load_pixels(const TensorMap &x, Control &control, uint4 *pixels, const TappedImages &images,
                                   const WorkRange &range) {
    PipelineState pipe;
    for (uint32 round = 0; round < range.rounds; ++round) {
        const Strip strip(images, range, round);
        for (int i = 0; i < images.parts; ++i, pipe.advance(images.places)) {
            const Part<STRIDE> part(i);
            mbarrier_wait(control.empty[pipe.index], pipe.phase ^ 1);
            uint64 &full = control.full[pipe.index];
            arrive_expect_tx(full, images.copied_pixels() * CHANNELS);
            tma_load(pixels + pipe.index * images.part_vectors, x,
                     (part.odd_column * (images.parts / (STRIDE * STRIDE)) + part.channels) * CHANNELS, -images.pad,
                     strip.image, strip.row - images.pad, part.odd_row, full);
        }
    }
}

__device__ inline void load_addends(const TensorMap &addend, Control &control, uint4 *results, int result_vectors,
                                    const TappedImages &images, const WorkRange &range) {
    PipelineState pipe;
    for (uint32 item = 0; item < range.items(); ++item, pipe.advance(images.results)) {
        const Strip strip(images, range, item / range.groups);
        mbarrier_wait(control.addend_empty[pipe.index], pipe.phase ^ 1);
        uint64 &full = control.addend_full[pipe.index];
        arrive_expect_tx(full, images.result_pixels() * FILTERS);
        tma_load(results + pipe.index * result_vectors, addend, (range.first_group + item % range.groups) * FILTERS, 0,
                 strip.image, strip.row, full);
    }
}

// --- called by a team ---

// products += the convolution of one item: one tile and one group of filters.
template <int SIZE, int STRIDE, int CHANNELS, int EIGHTS>
__device__ inline void multiply_item(int (&products)[EIGHTS][4], Control &control, const uint4 *weights, const uint4 *pixels,
                                     const TappedImages &images, uint32 round, PipelineState stage, bool stay, int lane) {
    constexpr int VECTORS = CHANNELS / VECTOR;
    const int pitch = images.pitch(), down = images.together * pitch;
    PipelineState tile = state_at(round * images.parts, images.places);
    int before = -1, left = -1;  // before: previous stage of weights; left: part whose last use has been issued
    for (int i = 0; i < images.parts; ++i, tile.advance(images.places)) {
        mbarrier_wait(control.full[tile.index], tile.phase);
        const uint4 *const part = pixels + tile.index * images.part_vectors;
        Part<STRIDE>(i).template for_taps<SIZE>([&](int h, int v) {
            mbarrier_wait(control.weights_full[stage.index], stage.phase);
            const uint64 a = smem_desc_of<CHANNELS>(weights + stage.index * FILTERS * VECTORS);
            const int row = (h + STRIDE - 1) / STRIDE, column = (v + STRIDE - 1) / STRIDE;
            const uint64 b = smem_desc_of<CHANNELS>(part + (row * down + column) * VECTORS);
            int8_mma_fence();
#pragma unroll
            for (int k = 0; k < CHANNELS / 32; ++k) int8_mma(products, a + k * 2, b + k * 2);
            int8_mma_commit();
            int8_mma_wait<1>();
            if (!stay && before >= 0 && lane < PEERS) arrive_remote(lane, control.weights_empty[before]);
            if (left >= 0 && lane == 0) arrive(control.empty[left]);
            before = stage.index;
            left = -1;
            stage.advance(images.stages);
        });
        left = tile.index;
    }
}

// Tensor maps:
//   x          (STRIDE, OH, N, OW, STRIDE * C), rows and columns by their remainders; tiles (1, rows + more, together,
//              OW + pad, CHANNELS)
//   w          filters by sixteen (K / 16, 2, 8, SIZE * SIZE * C), the even ones before the odd ones; tiles (2, 2, 8, CHANNELS)
//   addend, y  (OH, N, OW, K); tiles (rows, together, OW + pad, 64)
// EIGHTS * 8 pixels are multiplied at once; the first of them are the tile. gridDim.y clusters share the tiles, gridDim.z the
// filters. With SIZE 1 the images are one column of all pixels.
// Shapes: x (N, H, W, C), w (K, SIZE, SIZE, C), addend and y (N, OH, OW, K) int8 with H = STRIDE * OH, W = STRIDE * OW;
// multiplier (K) fp32; bias (K) int32. C is CHANNELS, or with 128 a multiple of it, K a multiple of 16, filters = K.
template <int SIZE, int STRIDE, int CHANNELS, int EIGHTS, bool ADD, bool RELU>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
quantised_conv_taps(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                    const __grid_constant__ TensorMap addend, const __grid_constant__ TensorMap y, const float *multiplier,
                    const int *bias, const __grid_constant__ TappedImages images, int filters, float addend_share) {
    constexpr int FOURS = (EIGHTS + 3) / 4, RESULT = FOURS * 4 * 8 * RESULT_VECTORS;
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    uint4 *const weights = memory + sizeof(Control) / VECTOR_BYTES;
    uint4 *const pixels = weights + images.stages * FILTERS * CHANNELS / VECTOR;
    uint4 *const results = pixels + images.places * images.part_vectors;
    const int lane = lane_index(), warp = warp_index();
    const WorkRange range(images);
    const int chunks = images.parts * SIZE * SIZE / (STRIDE * STRIDE);  // stages of weights per item
    const bool stay = images.stages == images.groups * chunks;

    if (threadIdx.x == 0) {
        for (int place = 0; place < images.places; ++place) {
            mbarrier_init(control.full[place], 1);
            mbarrier_init(control.empty[place], TEAM_WARPS * range.groups);
        }
        for (int stage = 0; stage < images.stages; ++stage) {
            mbarrier_init(control.weights_full[stage], 1);
            mbarrier_init(control.weights_empty[stage], TEAM_WARPS * PEERS);
        }
        for (int team = 0; team < TEAMS; ++team) {
            mbarrier_init(control.order[team], TEAM_WARPS);
            mbarrier_init(control.result_order[team], 1);
        }
        for (int place = 0; place < (ADD ? images.results : 0); ++place) {
            mbarrier_init(control.addend_full[place], 1);
            mbarrier_init(control.addend_empty[place], 1);
        }
        fence_barrier_init();
    }
    // Writes the zero to the right of the last row. The memory after this zero may have any content.
    const int copied = images.copied_pixels() * CHANNELS / VECTOR;
    for (int i = threadIdx.x; SIZE > 1 && STRIDE == 1 && i < images.places * CHANNELS / VECTOR; i += THREADS)
        pixels[i * VECTOR / CHANNELS * images.part_vectors + copied + i % (CHANNELS / VECTOR)] = uint4{};
    fence_view_async_shared();
    __syncthreads();
    cluster_sync();  // the mbarriers of both blocks are initialised

    if (warp == MMA_THREADS / WARP) {
        if (lane == 0) load_weights<SIZE, STRIDE, CHANNELS>(w, control, weights, images, range, stay);
    } else if (warp == MMA_THREADS / WARP + 1) {
        if (lane == 0) load_pixels<STRIDE, CHANNELS>(x, control, pixels, images, range);
    } else if (warp > MMA_THREADS / WARP) {
        if (ADD && lane == 0) load_addends(addend, control, results, RESULT, images, range);
    } else {
        const int team = warp / TEAM_WARPS, own = warp % TEAM_WARPS;
        const int result_row = lane * RESULT_VECTORS + (own ^ lane / 2 % 4);  // of 32 pixels, swizzled over 64 bytes
        uint32 before = 0;                                                    // items that this team has finished
        for (uint32 item = team; item < range.items(); item += TEAMS, ++before) {
            const uint32 round = item / range.groups;
            const int group = range.first_group + item % range.groups, filter = group * FILTERS + own * 16 + lane / 4 * 2;
            int2 start{};
            float2 scale{};
            if (filter < filters) {
                start = *reinterpret_cast<const int2 *>(bias + filter);
                scale = *reinterpret_cast<const float2 *>(multiplier + filter);
            }
            int products[EIGHTS][4];
#pragma unroll
            for (int j = 0; j < EIGHTS; ++j) {
                products[j][0] = products[j][1] = start.x;
                products[j][2] = products[j][3] = start.y;
            }

            // The teams take turns. The wait for weights and pixels comes after the wait for the turn: by then the
            // other team has seen the end of the previous phases.
            const uint32 parity = (before + 1 - team) & 1;
            mbarrier_wait(control.order[team], parity);
            PipelineState stage = state_at(stay ? item % range.groups * chunks : item * chunks, images.stages);
            multiply_item<SIZE, STRIDE, CHANNELS>(products, control, weights, pixels, images, round, stage, stay, lane);
            if (lane == 0) arrive(control.order[1 - team]);
            int8_mma_wait();
            int8_mma_fence_operand(products);
            if (!stay && lane < PEERS)
                arrive_remote(lane, control.weights_empty[state_at(item * chunks + chunks - 1, images.stages).index]);
            if (lane == 0) arrive(control.empty[state_at(round * images.parts + images.parts - 1, images.places).index]);

            const float unit[2] = {Bytes<RELU>::scale(scale.x), Bytes<RELU>::scale(scale.y)};
            const float scales[4] = {unit[0], unit[1], unit[0], unit[1]};
            const PipelineState own_result = state_at(item, images.results);
            const int next_user = images.results > 1 ? team : 1 - team;  // team that uses this slot next, if there is no addend
            uint4 *const result = results + own_result.index * RESULT, *const at = result + result_row;
            if (ADD)
                mbarrier_wait(control.addend_full[own_result.index], own_result.phase);
            else
                mbarrier_wait(control.result_order[team], images.results > 1 ? (before + 1) & 1 : parity);
            // pairs[i]: pairs of filters, for two pixels each, of the first 32 pixels (i = 0) and of the next 32 pixels
            // (i = 1)
            uint32 pairs[2][4] = {};
            if (ADD) ldmatrix_trans(pairs[0], at);
#pragma unroll
            for (int four = 0; four < FOURS; ++four) {
                uint32(&now)[4] = pairs[four % 2];
                if (ADD && four + 1 < FOURS) ldmatrix_trans(pairs[(four + 1) % 2], at + (four + 1) * 32 * RESULT_VECTORS);
#pragma unroll
                for (int i = 0; i < min(4, EIGHTS - four * 4); ++i) {
                    const int(&of)[4] = products[four * 4 + i];
                    now[i] = Bytes<RELU>::template of<ADD>({of[0], of[2], of[1], of[3]}, scales, now[i], addend_share);
                }
                stmatrix_trans(at + four * 32 * RESULT_VECTORS, now);
            }
            tma_store_fence();
            team_sync<TEAM_THREADS>(team);
            if (threadIdx.x % TEAM_THREADS == 0) {
                const Strip strip(images, range, round);
                tma_store(y, group * FILTERS, 0, strip.image, strip.row, result);
                tma_store_wait<0>();
                arrive(ADD ? control.addend_empty[own_result.index] : control.result_order[next_user]);
            }
            __syncwarp();  // reconverge, because wgmma needs whole warps
        }
    }
    __syncwarp();
    cluster_sync();  // the other block may still signal or send weights until here
}
