// ResNet's first convolution in training, on Hopper: 7x7 with stride 2 and padding 3 on 4-channel images, 64 filters,
// with the sums of BatchNorm. The kernel computes the same outputs as `stem_fprop` of stem.cu.
//
// At batch 256 and 224 pixels an H200 reads and writes 514 MB (0.13 ms at 4.1 TB/s) and multiplies 92 GFLOP (0.09 ms at the
// highest rate). While one team rounds, sums and stores, the other teams multiply.
#include "moments.cuh"
#include "stem_rows.cuh"

constexpr int RESULT_VECTORS = WIDTH * FILTERS / VEC, RESULTS = 2, PARTS = MMA_THREADS / FILTERS;
constexpr NamedBarrier<TEAMS + 1, MMA_THREADS> sync_mma_warps{};

struct Shared {
    ImageRows images;
    alignas(1024) uint4 results[TEAMS][RESULTS][RESULT_VECTORS];  // a row of the output: 64 filters per pixel, swizzled
};

struct Sizes { int height, width, out_height, out_width; };

// y = the convolution. `sums` are the sums of y about the mean of each filter, in a fixed order. A team walks down `strip`
// rows of y of an image; each row is one tile of the tensor map of y, a matrix of 64 columns. A warp accumulates about the
// first value that it computes of each filter.
// Shapes: x (N, H, W, 4), w (K, 7, 7, 4) with K = FILTERS, y (N, OH, OW, K); sums (3, K), partials (gridDim.x, K, 3) fp32;
// tickets (1). W is even and 224 at most.
template <class T>
__global__ void __launch_bounds__(THREADS, 1)
stem_forward(const T *x, const T *w, const __grid_constant__ TensorMap y, float *sums, Moments *partials, uint32 *tickets,
             Sizes size, int images, int strip) {
    extern __shared__ __align__(1024) uint4 memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    __shared__ Moments of_part[PARTS][FILTERS];
    const int lane = lane_index(), warp = warp_index();
    const WarpRole<TEAMS> role(warp);
    const int strips = (size.out_height + strip - 1) / strip, items = images * strips;
    shared.images.init();

    if (!role.is_mma_warp) {
        shared.images.produce(role, lane, x, items, size.height, size.width, [&](int item, int &image, int &first, int &end) {
            image = item / strips, first = item % strips * strip, end = min(first + strip, size.out_height);
        });
        return;
    }

    setmaxnreg_inc<REGS_MMA>();
    Multiplier<T> multiplier(shared.images, role.team, w);
    const int in_team = threadIdx.x % TEAM_THREADS;
    // Index of this lane's matrix row for stmatrix: two groups of 8 pixels, times two groups of 8 filters.
    const int matrix_row = swizzled(lane / 16 * 8 + lane % 8, in_team / WARP * 2 + lane / 8 % 2);
    float pivot[2] = {}, acc[2][2] = {};  // of filters `multiplier.filter()` and + 8: sums of y - pivot and of (y - pivot)^2
    uint32 counted = 0;                  // pixels summed so far
    int buffer = 0;
    for (int item = blockIdx.x * TEAMS + role.team; item < items; item += gridDim.x * TEAMS) {
        const int image = item / strips, first = item % strips * strip, end = min(first + strip, size.out_height);
        multiplier.begin_strip();
        for (int row = first; row < end; ++row, buffer ^= 1) {
            // Each row is summed separately first: bf16 has few distinct values, so thousands of additions to one sum
            // would all round in one direction.
            float products[GROUPS][4] = {}, of_row[2][2] = {};
            multiplier.row(products, row, size.height);
            if (counted == 0)
#pragma unroll
                for (int f = 0; f < 2; ++f) pivot[f] = __shfl_sync(0xffffffff, products[0][2 * f], lane & ~3);
            counted += size.out_width;

            uint4 *const result = shared.results[role.team][buffer];
            if (in_team == 0) tma_store_wait<RESULTS - 1>();
            team_sync<TEAM_THREADS>(role.team);
#pragma unroll
            for (int g = 0; g < GROUPS; g += 2) {
                uint32 m[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int f = i % 2;
                    T two[2];
                    from_floats(products[g + i / 2][2 * f], products[g + i / 2][2 * f + 1], two);
                    m[i] = *reinterpret_cast<const uint32 *>(two);
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if ((g + i / 2) * 8 + lane % 4 * 2 + e < size.out_width) {
                            const float deviation = to_float(two[e]) - pivot[f];
                            of_row[f][0] += deviation;
                            of_row[f][1] += deviation * deviation;
                        }
                }
                stmatrix_trans(result + g * 8 * (FILTERS / VEC) + matrix_row, m);
            }
#pragma unroll
            for (int f = 0; f < 2; ++f)
#pragma unroll
                for (int j = 0; j < 2; ++j) acc[f][j] += of_row[f][j];
            tma_store_fence();
            team_sync<TEAM_THREADS>(role.team);
            if (in_team == 0) tma_store(y, 0, (image * size.out_height + row) * size.out_width, 0, result);
        }
        multiplier.end_strip();
    }
    if (in_team == 0) tma_store_wait<0>();
#pragma unroll
    for (int f = 0; f < 2; ++f) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int distance = 1; distance < 4; distance *= 2)
                acc[f][j] += __shfl_xor_sync(0xffffffff, acc[f][j], distance);
        if (lane % 4 == 0)
            of_part[role.team][multiplier.filter() + f * 8] = Moments::from_sums(pivot[f], counted, acc[f][0], acc[f][1]);
    }
    finish_moments(of_part, TEAMS, partials, tickets, sums, sync_mma_warps);
}
