// INT8 convolutions on Hopper, bound by its tensor cores: 3x3 at padding 1 and stride 1 or 2, and 1x1 with many filters.
//
// As in conv3x3.cu, y[filter, pixel] = sum over taps and channels of w[filter, tap, channel] * x[pixel + tap, channel]. A tile
// is some rows of one or several images, with those above and below and a column of zeros on the left, in shared memory, up to
// 128 channels in a part: of these a tap of all pixels is so many rows from one place on, which wgmma takes from there as its
// second operand. What is right of a row is the zero left of the next one. Of several images the first rows lie together, then
// the second ones: so they share the rows of zeros above and below, and from each row to the next one it is equally far. With
// one tap a tile is pixels that follow each other. With stride 2 there are four parts of the same channels, of the pixels in
// even or odd rows and columns; in each, 1, 2 or 4 of the taps lie as with stride 1.
//
// Two teams of four warps take turns: while the products of one, with 64 filters, are under way, the other requantises. Weights
// come by 64 filters of a part of a tap; they stay where there is room for all of a block, else they pass by. Two blocks, a
// cluster, need the same ones at the same time: either reads a half from the L2 cache, for both. What is added comes, ahead of
// time, to where the result will lie.
#include "tma.cuh"
#include "integer_products.cuh"

constexpr int FILTERS = 64, VECTOR_BYTES = 16;
constexpr int TEAMS = 2, TEAM_WARPS = 4, TEAM_THREADS = TEAM_WARPS * WARP, MMA_THREADS = TEAMS * TEAM_THREADS;
constexpr int THREADS = MMA_THREADS + 3 * WARP;   // a warp each starts the copies of weights, of pixels, of what is added
constexpr int PEERS = 2;                          // blocks of a cluster
constexpr int MAX_PLACES = 16, MAX_STAGES = 40;   // of parts of tiles, and of weights
constexpr int MAX_RESULTS = 4;                    // in which something is added; else each team has one, or both together
constexpr int RESULT_VECTORS = FILTERS / VECTOR;  // of a pixel

// At the start of shared memory. Behind it, in vectors: `stages` of weights, `places` for parts of tiles, `results` of 64
// filters.
struct alignas(1024) Control {
    uint64 full[MAX_PLACES], empty[MAX_PLACES], weights_full[MAX_STAGES], weights_empty[MAX_STAGES];
    uint64 order[TEAMS], result_order[TEAMS], addend_full[MAX_RESULTS], addend_empty[MAX_RESULTS];
};

// Results of height x width pixels, `rows` rows of `together` of them in a tile, of whose data there are `parts`: of so many rows
// and `more`. Windows reach `pad` pixels, 1 or 0, in each direction. A part has `part_vectors` of shared memory, of which the
// copy engine writes the first. Of the filters a block makes `groups` of 64.
struct TappedImages {
    int images, height, width, pad, rows, more, together, parts, places, part_vectors, stages, results, groups, all_groups;

    __device__ int pitch() const { return width + pad; }
    __device__ int strips() const { return (height + rows - 1) / rows; }
    __device__ int result_pixels() const { return rows * together * pitch(); }
    __device__ int copied_pixels() const { return (rows + more) * together * pitch(); }
    // Of which each block of a cluster makes one. The last may be of no images.
    __device__ uint32 pairs() const { return (uint32((images + together - 1) / together) * strips() + PEERS - 1) / PEERS; }
};

// What a block does: `rounds` tiles, of each `groups` of filters from `first_group` on.
struct WorkRange {
    uint32 rank, rounds;
    int first_group, groups;

    __device__ WorkRange(const TappedImages &of)
        : rank(blockIdx.x), rounds((of.pairs() - blockIdx.y + gridDim.y - 1) / gridDim.y), first_group(blockIdx.z * of.groups),
          groups(min(of.groups, of.all_groups - first_group)) {}
    __device__ uint32 items() const { return rounds * groups; }
};

// Where a tile lies: its first image and row.
struct Strip {
    int image, row;

    __device__ Strip(const TappedImages &of, const WorkRange &range, uint32 round) {
        const uint32 tile = (blockIdx.y + round * gridDim.y) * PEERS + range.rank, strips = of.strips();
        image = tile / strips * of.together;
        row = tile % strips * of.rows;
    }
};

// Of the channels of a part, and with STRIDE 2 of its rows and columns, odd or even ones: which they are, and its taps.
template <int STRIDE> struct Part {
    int channels, odd_row, odd_column;

    __device__ explicit Part(int part)
        : channels(part / (STRIDE * STRIDE)), odd_row(part / STRIDE % STRIDE), odd_column(part % STRIDE) {}
    // Calls `f` with each tap's row and column in the window.
    template <int SIZE, class F> __device__ void for_taps(F f) const {
        for (int h = (STRIDE - 1) ^ odd_row; h < SIZE; h += STRIDE)
            for (int w = (STRIDE - 1) ^ odd_column; w < SIZE; w += STRIDE) f(h, w);
    }
};

// The turn of the piece `number` of places that are used one after the other.
__device__ inline PipelineState state_at(uint32 number, int places) {
    PipelineState pipe;
    pipe.index = number % places;
    pipe.phase = number / places & 1;
    return pipe;
}

// Rows of k of so many channels, as the copy engine leaves them: swizzled over 128 bytes or 64.
template <int CHANNELS> __device__ inline uint64 smem_desc_of(const uint4 *at) {
    return CHANNELS == 128 ? smem_desc(at)
                           : (__cvta_generic_to_shared(at) & 0x3ffff) >> 4 | 32ull << 16 | 32ull << 32 | 2ull << 62;
}

// --- for one thread ---

// Starts the copies of the weights, in the order in which they are multiplied; once, if all have a stage.
template <int SIZE, int STRIDE, int CHANNELS>
__device__ inline void load_weights(const TensorMap &w, Control &control, uint4 *weights, const TappedImages &images,
                                    const WorkRange &range, bool stay) {
    constexpr int VECTORS = FILTERS * CHANNELS / VECTOR, OWN = FILTERS / PEERS / VECTOR;  // OWN: 16 filters each
    const int of_tap = images.parts / (STRIDE * STRIDE);
    PipelineState pipe;
    for (uint32 item = 0; item < (stay ? range.groups : range.items()); ++item)
        for (int i = 0; i < images.parts; ++i) {
            const Part<STRIDE> part(i);
            part.template for_taps<SIZE>([&](int h, int v) {
                mbarrier_wait(control.weights_empty[pipe.index], pipe.phase ^ 1);  // at once in the first turn
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

// --- for a team ---

// products += the convolution of one item.
template <int SIZE, int STRIDE, int CHANNELS, int EIGHTS>
__device__ inline void multiply_item(int (&products)[EIGHTS][4], Control &control, const uint4 *weights, const uint4 *pixels,
                                     const TappedImages &images, uint32 round, PipelineState stage, bool stay, int lane) {
    constexpr int VECTORS = CHANNELS / VECTOR;
    const int pitch = images.pitch(), down = images.together * pitch;
    PipelineState tile = state_at(round * images.parts, images.places);
    int before = -1, left = -1;  // the stage of the weights before, the place of the part before
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

// The maps: of x as (STRIDE, OH, N, OW, STRIDE * C), rows and columns by their remainders, by tiles of 1, rows + more,
// together, OW + pad, CHANNELS; of w as filters in sixteens, (K / 16, 2, 8, SIZE * SIZE * C), the even ones before the odd ones,
// by tiles of 2, 2, 8, CHANNELS; of addend and y as (OH, N, OW, K) by tiles of rows, together, OW + pad, 64. EIGHTS * 8 pixels
// are multiplied at once, of which the first are a tile. gridDim.y clusters share the tiles, gridDim.z the filters. With SIZE 1
// the images are a column of all pixels.
// Shapes: x (N, H, W, C), w (K, SIZE, SIZE, C), addend and y (N, OH, OW, K) int8 with H = STRIDE * OH, W = STRIDE * OW;
// multiplier (K) fp32; bias (K) int32. C is CHANNELS, or with 128 a multiple of it, K a multiple of 16, filters = K.
template <int SIZE, int STRIDE, int CHANNELS, int EIGHTS, bool ADD, bool RELU>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
quantised_conv_taps(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                    const __grid_constant__ TensorMap addend, const __grid_constant__ TensorMap y, const float *multiplier,
                    const int *bias, const __grid_constant__ TappedImages images, int filters, float addend_share) {
    constexpr int FOURS = (EIGHTS + 3) / 4, RESULT = FOURS * 4 * 8 * RESULT_VECTORS;
    static_assert(sizeof(Control) == 1024, "equals the size in lowering/quantised_taps.py");
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    uint4 *const weights = memory + sizeof(Control) / VECTOR_BYTES;
    uint4 *const pixels = weights + images.stages * FILTERS * CHANNELS / VECTOR;
    uint4 *const results = pixels + images.places * images.part_vectors;
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    const WorkRange range(images);
    const int chunks = images.parts * SIZE * SIZE / (STRIDE * STRIDE);  // of an item
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
    // The zero right of the last row; behind it anything may be.
    const int copied = images.copied_pixels() * CHANNELS / VECTOR;
    for (int i = threadIdx.x; SIZE > 1 && STRIDE == 1 && i < images.places * CHANNELS / VECTOR; i += THREADS)
        pixels[i * VECTOR / CHANNELS * images.part_vectors + copied + i % (CHANNELS / VECTOR)] = uint4{};
    fence_view_async_shared();
    __syncthreads();
    cluster_sync();  // barriers are there for both blocks

    if (warp == MMA_THREADS / WARP) {
        if (lane == 0) load_weights<SIZE, STRIDE, CHANNELS>(w, control, weights, images, range, stay);
    } else if (warp == MMA_THREADS / WARP + 1) {
        if (lane == 0) load_pixels<STRIDE, CHANNELS>(x, control, pixels, images, range);
    } else if (warp > MMA_THREADS / WARP) {
        if (ADD && lane == 0) load_addends(addend, control, results, RESULT, images, range);
    } else {
        const int team = warp / TEAM_WARPS, own = warp % TEAM_WARPS;
        const int result_row = lane * RESULT_VECTORS + (own ^ lane / 2 % 4);  // of 32 pixels, swizzled over 64 bytes
        uint32 before = 0;                                                    // items of this team
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

            // One team after the other. Only then for weights and pixels: the other team has seen what was there before.
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
            const int next_user = images.results > 1 ? team : 1 - team;  // of the same place, if nothing is added
            uint4 *const result = results + own_result.index * RESULT, *const at = result + result_row;
            if (ADD)
                mbarrier_wait(control.addend_full[own_result.index], own_result.phase);
            else
                mbarrier_wait(control.result_order[team], images.results > 1 ? (before + 1) & 1 : parity);
            uint32 pairs[2][4] = {};  // of filters, each of two pixels; of 32 pixels, and of the next 32
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
            __syncwarp();  // products are started by whole warps
        }
    }
    __syncwarp();
    cluster_sync();  // either may still be told of weights, or given some
}
