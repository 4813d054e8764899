// INT8 1x1 convolutions on Hopper, with the design of conv1x1_forward.cuh: shared by quantised_conv_stream.cu and
// quantised_pair.cu.
//
// A block keeps the weights of COLUMNS filters in shared memory. It has TEAMS teams of four MMA warps, and one TMA warp
// per team. Each team walks over tiles of 64 rows, independently of the other teams: one team can multiply while
// another requantises, and TMA loads the next tiles and stores results. In the epilogue a warp works on its 16 rows,
// 128 filters at a time, in shared memory: TMA loads the addend there and stores the result from there.
#pragma once
#include "conv1x1_tiles.cuh"
#include "integer_products.cuh"

constexpr int CHUNK = 128, STEP = 32, MAX_RESULTS = 3;  // channels of a tile, and of one wgmma; result slots of a warp

// Bias and multiplier of COLUMNS filters, in the order in which the threads of a quad read them. An element of `bias`
// has two of 8 columns, repeated for two rows. An element of `multiplier` has four of 16 columns.
template <int COLUMNS> struct Factors {
    int4 bias[COLUMNS / 8][4];
    float4 multiplier[COLUMNS / 16][4];
};

// At the start of shared memory. Then follow, in vectors: the weights (chunks, COLUMNS * 8); `stages` tiles of x for each
// team; `results` parts of y for each MMA warp. Factors and weights are in the order of `streamed_filter`.
template <int TEAMS, int COLUMNS, int CONVOLUTIONS> struct alignas(1024) Control {
    Factors<COLUMNS> factors[CONVOLUTIONS];
    uint64 full[TEAMS][MAX_STAGES], empty[TEAMS][MAX_STAGES], addend[TEAMS * TEAM_WARPS][MAX_RESULTS];
};

// The filter that belongs to a column of the accumulators. Among 128 columns, thread t of a quad has 32 neighbouring
// filters, as two vectors of 16: one from the first 64 columns, one from the last 64. The vectors 2t and 2t + 1 are
// neighbours in a row. So the eight threads of two rows access different banks of shared memory, first for their first
// vectors and then for their second vectors.
template <int COLUMNS> __device__ inline int streamed_filter(int column) {
    if (COLUMNS == 64) return filter_of(column);
    return column / 128 * 128 + (column % 8 / 2 * 2 + column / 64 % 2) * VECTOR + column % 64 / 8 * 2 + column % 2;
}

// One wgmma group: the first STEPS * STEP channels of a chunk.
template <int STEPS, int EIGHTS> __device__ inline void multiply_chunk(int (&c)[EIGHTS][4], const uint4 *a, const uint4 *b) {
    int8_mma_fence();
#pragma unroll
    for (int s = 0; s < STEPS; ++s) int8_mma(c, a + s * 2, b + s * 2);
    int8_mma_commit();
}

// The MMA warps load the weights while the other warps load the first tiles.
template <int TEAMS> constexpr int MMA_THREADS = TEAMS * TEAM_WARPS * WARP;
template <int TEAMS> __device__ inline void sync_mma_warps() {
    asm volatile("bar.sync 1, %0;" :: "n"(MMA_THREADS<TEAMS>) : "memory");
}

// Loads the weights of COLUMNS filters from `first_column` on, in tiles of 128 channels; does not wait for the copies.
template <int TEAMS, int COLUMNS>
__device__ inline void load_weights(uint4 *to, const uint4 *weight, int chunks, int channels, int first_column, int filters) {
    for (int i = threadIdx.x; i < chunks * COLUMNS * CHUNK_VECTORS; i += MMA_THREADS<TEAMS>) {
        const int vector = i % CHUNK_VECTORS, column = i / CHUNK_VECTORS % COLUMNS, chunk = i / CHUNK_VECTORS / COLUMNS;
        const int filter = first_column + streamed_filter<COLUMNS>(column), at = chunk * CHUNK_VECTORS + vector;
        const bool there = filter < filters && at * VECTOR < channels;
        cp_async_zfill(to + (chunk * COLUMNS * CHUNK_VECTORS + swizzled(column, vector)),
                       weight + (there ? filter * (channels / VECTOR) + at : 0), there);
    }
}

// Loads biases, and multipliers in `unit`, a power of 2.
template <int TEAMS, int COLUMNS>
__device__ inline void load_factors(Factors<COLUMNS> &to, const float *multiplier, const int *bias, float unit,
                                    int first_column, int filters) {
    for (int n = threadIdx.x; n < COLUMNS; n += MMA_THREADS<TEAMS>) {
        const int filter = first_column + streamed_filter<COLUMNS>(n);
        const int thread = n % 8 / 2, k = n % 2;
        int *const sums = reinterpret_cast<int *>(&to.bias[n / 8][thread]);
        sums[k] = sums[2 + k] = filter < filters ? bias[filter] : 0;
        reinterpret_cast<float *>(&to.multiplier[n / 16][thread])[n % 16 / 8 * 2 + k] =
            filter < filters ? __fmul_rn(multiplier[filter], 1 / unit) : 0;
    }
}

// Called by one thread. Starts the loads of the team's tiles, as stages become empty: for each tile `chunks` of x and,
// with TWO, `chunks_2` of x_2, which has the rows of y. This is `load_tiles` of conv1x1_forward.cuh without clusters;
// if both were one template, dgrad_stream or quantised_pair would be compiled to different machine code.
template <bool TWO>
__device__ inline void load_tiles(const Stages &stages, const TensorMap &x, int chunks, const TileRange &range,
                                  const TileStep &walk, const TensorMap &x_2, int chunks_2) {
    PipelineState pipe;
    for (uint32 tile = range.first; tile < range.end; tile += range.step)
        for (int c = 0; c < chunks + (TWO ? chunks_2 : 0); ++c, pipe.advance(stages.number)) {
            mbarrier_wait(stages.empty[pipe.index], pipe.phase ^ 1);  // the first round does not wait
            uint64 &full = stages.full[pipe.index];
            uint4 *const to = stages.tiles + pipe.index * TILE_VECTORS;
            arrive_expect_tx(full, walk.rows * CHUNK);
            if (TWO && c >= chunks)
                tma_load(to, x_2, (c - chunks) * CHUNK, tile * walk.y_row, tile * walk.y_line, full);
            else
                tma_load(to, x, c * CHUNK, tile * walk.x_row, tile * walk.x_line, full);
        }
}

using Addends = AddendsOf<CHUNK>;

// Initialises the accumulators with the bias.
template <int EIGHTS>
__device__ inline void init_accumulators(int (&products)[EIGHTS][4], const Factors<EIGHTS * 8> &factors, int lane) {
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) {
        const int4 b = factors.bias[j][lane % 4];
        products[j][0] = b.x, products[j][1] = b.y, products[j][2] = b.z, products[j][3] = b.w;
    }
}

// products = bias + x * weight, over the next `chunks` of the team's tiles.
template <int EIGHTS>
__device__ inline void multiply_tile(int (&products)[EIGHTS][4], const Factors<EIGHTS * 8> &factors, const uint4 *weights,
                                     int chunks, int channels, const Stages &stages, PipelineState &pipe, int lane) {
    init_accumulators(products, factors, lane);
    int before = 0;  // stage of the previous chunk
    for (int c = 0; c < chunks; ++c, pipe.advance(stages.number)) {
        mbarrier_wait(stages.full[pipe.index], pipe.phase);
        const uint4 *a = stages.tiles + pipe.index * TILE_VECTORS, *b = weights + c * EIGHTS * 8 * CHUNK_VECTORS;
        if (channels - c * CHUNK > CHUNK / 2)
            multiply_chunk<CHUNK / STEP>(products, a, b);
        else
            multiply_chunk<CHUNK / STEP / 2>(products, a, b);  // the other half of the chunk is zeros
        int8_mma_wait<1>();
        if (c > 0 && lane == 0) arrive(stages.empty[before]);
        before = pipe.index;
    }
    int8_mma_wait();
    int8_mma_fence_operand(products);
    if (lane == 0) arrive(stages.empty[before]);
}

// --- a thread's words of a part (128 filters of the warp's 16 rows): two vectors, two rows, four words each ---

using Words = uint32[2][2][4];

// With 64 filters, a thread has one of the four vectors of a row.
template <int VECTORS> __device__ inline uint4 &vector_of(uint4 *part, int v, int r, int lane) {
    return part[swizzled(lane / 4 + r * 8, lane % 4 * VECTORS + v)];
}
__device__ inline void load_words(Words &words, uint4 *part, int lane) {
#pragma unroll
    for (int v = 0; v < 2; ++v)
#pragma unroll
        for (int r = 0; r < 2; ++r) *reinterpret_cast<uint4 *>(words[v][r]) = vector_of<2>(part, v, r, lane);
}
template <int VECTORS = 2> __device__ inline void store_words(const Words &words, uint4 *part, int lane) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
#pragma unroll
        for (int r = 0; r < 2; ++r) vector_of<VECTORS>(part, v, r, lane) = *reinterpret_cast<const uint4 *>(words[v][r]);
}

// Computes the words of part `p`. `of` makes four bytes from four sums, their multipliers, and the previous word.
template <int EIGHTS, class Of>
__device__ inline void requantise(const int (&products)[EIGHTS][4], int p, const Factors<EIGHTS * 8> &factors, Words &words,
                                  int lane, Of of) {
#pragma unroll
    for (int j = p * 16; j < min(EIGHTS, p * 16 + 16); j += 2) {
        const float4 four = factors.multiplier[j / 2][lane % 4];
        const float scale[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int sums[4] = {products[j][r * 2], products[j][r * 2 + 1], products[j + 1][r * 2],
                                 products[j + 1][r * 2 + 1]};
            uint32 &word = words[j % 16 / 8][r][j % 8 / 2];
            word = of(sums, scale, word);
        }
    }
}

template <bool ADD, bool RELU, bool SHIFTED = false> struct ToInt8 {
    float addend_share;
    __device__ uint32 operator()(const int (&accumulator)[4], const float (&scale)[4], uint32 addends) const {
        return Bytes<RELU>::template of<ADD, SHIFTED>(accumulator, scale, addends, addend_share);
    }
};

// Converts results that will be used as addends, without ReLU, to bytes with an offset of LARGEST. Values are in units
// of 2^24 and are rounded as in `Bytes`. One instruction saturates them to the range of 23 bits, and one Hopper
// instruction then clamps to 0 ... 254.
struct ToShifted {
    static constexpr float UNIT = 1 << 24, MIDDLE = 0.75;  // between 0.5 and 1 the last bit is 1 / UNIT
    __device__ uint32 operator()(const int (&accumulator)[4], const float (&scale)[4], uint32) const {
        uint32 shifted[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float v = __saturatef(__fadd_rn(__fmul_rn(__int2float_rn(accumulator[k]), scale[k]), MIDDLE));
            shifted[k] = __viaddmin_s32_relu(__float_as_int(v), LARGEST - __float_as_int(MIDDLE), 2 * LARGEST);
        }
        return lowest_bytes(shifted);
    }
};
