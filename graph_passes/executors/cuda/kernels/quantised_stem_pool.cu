// INT8 on Hopper: the first convolution, after space to depth with 16 channels (passes/quantise_squares.py), fused with
// 3x3 max pooling at stride 2 and padding 1. The convolution's output is four times as large as the pooled output, and
// is never written.
//
//     out[filter, pixel] = sum over k of weight[filter, k] * x[pixel, k]
//
// The weights, 256 bytes per filter, stay in registers, so the tensor cores read only pixels from shared memory. In one
// line, a window has 64 bytes. The next pixel's window starts 16 bytes later (`smem_desc_windows`). One group of wgmma
// computes one line of the convolution.
//
// Multipliers are quotients of scales and therefore not negative, so a larger sum never gives a smaller result. So the
// kernel takes the maxima of the sums, and requantises only the maxima. Maxima over lines come first, because they need
// no values of other threads.
#include "tma.cuh"
#include "integer_products.cuh"

// side of a window in (space-to-depth) pixels; k-steps of 32 bytes
constexpr int KERNEL = 4, FILTERS = 64, STEPS = KERNEL * KERNEL / 2;
constexpr int WIDTH = 112, GROUPS = WIDTH / 8;  // maximum number of pixels in a line of the convolution
constexpr int LINE_VECTORS = WIDTH + KERNEL;    // a line has WIDTH + KERNEL - 1 input pixels
// Three teams with 168 registers per thread use up an SM. While one team pools, the other teams multiply.
constexpr int TEAMS = 3, TEAM_THREADS = 4 * WARP, THREADS = TEAMS * TEAM_THREADS;
// lines of a team in shared memory: a row of y needs five lines; the other lines are being loaded
constexpr int LINES = 12;
constexpr int PIXEL_VECTORS = FILTERS / VECTOR;
constexpr int SMALLEST = -2147483647 - 1;

struct Shared {
    uint4 pooled[TEAMS][2][WIDTH / 2 * PIXEL_VECTORS];  // vectors are in the order of `place_of`
    uint4 lines[TEAMS][LINES][LINE_VECTORS];
    uint64 full[TEAMS][LINES];
};

// Position of a vector in a row of y. Neighbours in pairs of pixels use different banks of shared memory.
__device__ inline int place_of(int vector) { return vector ^ vector / (2 * PIXEL_VECTORS) % PIXEL_VECTORS; }

struct PooledSizes { int images, out_height, out_width, pooled_height, pooled_width; };

// y = max pooling of the convolution. A team computes consecutive rows of y, one image after another. The lines of x that it
// reads are consecutive, too, so they pass through a circular buffer. If the first row's window starts with a line of the
// previous team, the team recomputes that line.
// Shapes: x (N, OH + 3, OW + 3, 16), weight (K, 4, 4, 16) int8 with K = FILTERS; multiplier (K) fp32; bias (K) int32; y (N,
// PH, PW, K) int8. OW is WIDTH at most.
template <bool RELU>
__global__ void __launch_bounds__(THREADS, 1)
quantised_stem_pool(const uint4 *x, const uint32 *weight, const float *multiplier, const int *bias, uint4 *y,
                    PooledSizes size) {
    extern __shared__ __align__(1024) uint4 memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int lane = threadIdx.x % WARP, in_team = threadIdx.x % TEAM_THREADS;
    const int team = __shfl_sync(0xffffffff, threadIdx.x / TEAM_THREADS, 0);  // warp-uniform
    if (threadIdx.x == 0) {
        for (int t = 0; t < TEAMS; ++t)
            for (int p = 0; p < LINES; ++p) mbarrier_init(shared.full[t][p], 1);
        fence_barrier_init();
    }
    __syncthreads();

    const uint32 rows = size.images * size.pooled_height, teams = gridDim.x * TEAMS, own = blockIdx.x * TEAMS + team;
    const uint32 first = uint64(rows) * own / teams, end = uint64(rows) * (own + 1) / teams;
    if (first == end) return;

    // Lines are numbered over all images. A line of the convolution reads four lines of x, and has the number of the
    // first of these lines.
    const int height = size.out_height + KERNEL - 1, width = size.out_width + KERNEL - 1;
    const auto line_of = [&](uint32 row, int line) { return row / size.pooled_height * height + line; };
    const int first_row = first % size.pooled_height, last_row = (end - 1) % size.pooled_height;
    const uint32 first_line = line_of(first, max(2 * first_row - 1, 0));
    const uint32 end_line = line_of(end - 1, min(2 * last_row + 1, size.out_height - 1)) + KERNEL;

    uint32 loaded = first_line;
    const auto load_before = [&](uint32 line) {
        for (; loaded < min(line, end_line); ++loaded) {
            const int place = (loaded - first_line) % LINES;
            arrive_expect_tx(shared.full[team][place], width * VECTOR);
            tma_load_bulk(shared.lines[team][place], x + size_t(loaded) * width, width * VECTOR, shared.full[team][place]);
        }
    };
    if (in_team == 0) load_before(first_line + LINES);

    // A fragments of mma.m16n8k32: rows are `filter` and filter + 8.
    const int filter = in_team / WARP * 16 + lane / 4;
    uint32 weights[STEPS][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            weights[step][e] = weight[((filter + e % 2 * 8) * STEPS + step) * 8 + e / 2 * 4 + lane % 4];
    const int biases[2] = {bias[filter], bias[filter + 8]};
    const float scales[2] = {Bytes<RELU>::scale(multiplier[filter]), Bytes<RELU>::scale(multiplier[filter + 8])};
    const float scale[4] = {scales[0], scales[1], scales[0], scales[1]};

    uint32 there = first_line;  // lines before `there` have arrived
    const auto multiply = [&](int(&products)[GROUPS][4], uint32 line) {
        for (; there < line + KERNEL; ++there)
            mbarrier_wait(shared.full[team][(there - first_line) % LINES], (there - first_line) / LINES % 2);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) products[g][e] = biases[e / 2];
        int8_mma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const uint4 *of_row = shared.lines[team][(line + step / 2 - first_line) % LINES];
            int8_mma(products, weights[step], smem_desc_windows(of_row + step % 2 * 2));
        }
        int8_mma_commit();
        int8_mma_wait();
        int8_mma_fence_operand(products);
    };

    int most[GROUPS][4];  // running maxima over the lines of a window
    for (uint32 row = first; row < end; ++row) {
        const int in_image = row % size.pooled_height;
        const uint32 line = line_of(row, 2 * in_image);
        if (in_image == 0 || row == first) {
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int e = 0; e < 4; ++e) most[g][e] = SMALLEST;
        }
        int products[GROUPS][4];
        const int last = min(1, size.out_height - 1 - 2 * in_image);
#pragma unroll 1
        for (int i = row == first && in_image > 0 ? -1 : 0; i <= last; ++i) {
            multiply(products, line + i);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int e = 0; e < 4; ++e) most[g][e] = max(most[g][e], products[g][e]);
        }

        // A thread has pixels 2u and 2u + 1 of each group, with u = 4g + lane % 4. It gets pixel 2u - 1 from its neighbour.
        uint4 *const pooled = shared.pooled[team][row % 2];
        int before[2] = {SMALLEST, SMALLEST};
#pragma unroll
        for (int g = 0; g < GROUPS; g += 2) {
            int sums[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int group = g + i / 2, f = i % 2;
                const int right = group * 8 + lane % 4 * 2 + 1 < size.out_width ? most[group][2 * f + 1] : SMALLEST;
                const int from = __shfl_sync(0xffffffff, right, (lane & ~3) | (lane + 3) % 4);
                sums[i] = max(max(most[group][2 * f], right), lane % 4 ? from : before[f]);
                before[f] = from;
            }
            const uint32 bytes = Bytes<RELU>::template of<false>(sums, scale, 0, 0);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int u = (g + i / 2) * 4 + lane % 4, of = filter + i % 2 * 8;
                reinterpret_cast<int8 *>(&pooled[place_of(u * PIXEL_VECTORS + of / VECTOR)])[of % VECTOR] = byte_of(bytes, i);
            }
        }
        asm volatile("bar.sync %0, %1;" :: "r"(team + 1), "n"(TEAM_THREADS) : "memory");  // barrier of the team
        if (in_team == 0) load_before(line + 2 + LINES);  // all warps have finished with the lines before line + 2
        const int vectors = size.pooled_width * PIXEL_VECTORS;
        for (int v = in_team; v < vectors; v += TEAM_THREADS) y[row * size_t(vectors) + v] = pooled[place_of(v)];
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int e = 0; e < 4; ++e) most[g][e] = products[g][e];
    }
}
