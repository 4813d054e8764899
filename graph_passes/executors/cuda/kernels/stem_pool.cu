// ResNet's stem in inference: the first convolution (7x7 with stride 2 and padding 3 on 4-channel images, 64 filters) with
// bias, ReLU and 3x3 max pooling with stride 2 and padding 1. The convolution's output is never written. Pooling works in
// registers: a thread has two neighbouring pixels of a row of the convolution.
#include "stem_rows.cuh"

constexpr int POOLED_VECTORS = WIDTH / 2 * FILTERS / VEC;

struct Shared {
    ImageRows images;
    alignas(1024) uint4 pooled[TEAMS][2][POOLED_VECTORS];  // 64 filters per row, swizzled
};

struct Sizes { int height, width, out_height, out_width, pooled_height, pooled_width; };

__device__ inline float larger(float a, float b) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));  // propagates NaN
    return a;
}

// y = max pooling of ReLU(convolution + bias). A team walks down `strip` rows of y of an image. The pixels of a row are one
// tile of the tensor map of y, a matrix of 64 columns.
// Shapes: x (N, H, W, 4), w (K, 7, 7, 4) with K = FILTERS, y (N, PH, PW, K); bias (K) fp32. W is even and 224 at most.
template <class T>
__global__ void __launch_bounds__(THREADS, 1)
stem_pool(const T *x, const T *w, const float *bias, const __grid_constant__ TensorMap y, Sizes size, int images, int strip) {
    extern __shared__ __align__(1024) uint4 memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int lane = lane_index(), warp = warp_index();
    const WarpRole<TEAMS> role(warp);
    const int strips = (size.pooled_height + strip - 1) / strip, items = images * strips;

    shared.images.init();

    if (!role.is_mma_warp) {
        shared.images.produce(role, lane, x, items, size.height, size.width, [&](int item, int &image, int &first, int &end) {
            image = item / strips;
            const int first_pooled = item % strips * strip, end_pooled = min(first_pooled + strip, size.pooled_height);
            first = max(2 * first_pooled - 1, 0), end = min(2 * end_pooled, size.out_height);
        });
        return;
    }

    setmaxnreg_inc<REGS_MMA>();
    Multiplier<T> multiplier(shared.images, role.team, w);
    const int in_team = threadIdx.x % TEAM_THREADS, filter = multiplier.filter();
    const float biases[2] = {bias[filter], bias[filter + 8]};

    int buffer = 0;
    for (int item = blockIdx.x * TEAMS + role.team; item < items; item += gridDim.x * TEAMS) {
        const int image = item / strips, first = item % strips * strip, end = min(first + strip, size.pooled_height);
        const int first_row = max(2 * first - 1, 0), end_row = min(2 * end, size.out_height);
        float most[GROUPS][2] = {};  // running maxima over the rows of a window; ReLU gives nothing below 0
        multiplier.begin_strip();
        for (int row = first_row; row < end_row; ++row) {
            float products[GROUPS][4];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int e = 0; e < 4; ++e) products[g][e] = biases[e / 2];
            multiplier.row(products, row, size.height);

            // A thread has pixels 2u and 2u + 1 of each group, with u = 4g + lane % 4. It gets pixel 2u - 1 from its
            // neighbour.
            const bool ends_window = row % 2 == 1 || row + 1 == size.out_height;
            float before[2] = {0, 0};
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const int pixel = g * 8 + lane % 4 * 2;
#pragma unroll
                for (int f = 0; f < 2; ++f) {
                    const float left = pixel < size.out_width ? larger(products[g][2 * f], 0) : 0;
                    const float right = pixel + 1 < size.out_width ? larger(products[g][2 * f + 1], 0) : 0;
                    const float from = __shfl_sync(0xffffffff, right, (lane & ~3) | (lane + 3) % 4);
                    const float of_row = larger(larger(left, right), lane % 4 ? from : before[f]);
                    before[f] = from;
                    // `products` is free until the window ends: it keeps the maxima of this row.
                    products[g][2 * f] = of_row;
                    most[g][f] = larger(most[g][f], of_row);
                }
            }
            if (!ends_window) continue;
            if (row > 2 * first || row + 1 == size.out_height) {  // skips the row before the strip's first window
                uint4 *const pooled = shared.pooled[role.team][buffer];
                if (in_team == 0) tma_store_wait<1>();
                team_sync<TEAM_THREADS>(role.team);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                    for (int f = 0; f < 2; ++f) {
                        const int u = g * 4 + lane % 4, of = filter + f * 8;
                        if (u < size.pooled_width)
                            reinterpret_cast<T *>(&pooled[swizzled(u, of / VEC)])[of % VEC] = from_float<T>(most[g][f]);
                    }
                tma_store_fence();
                team_sync<TEAM_THREADS>(role.team);
                if (in_team == 0)
                    tma_store(y, 0, (image * size.pooled_height + row / 2) * size.pooled_width, 0, pooled);
                buffer ^= 1;
            }
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int f = 0; f < 2; ++f) most[g][f] = products[g][2 * f];
        }
        multiplier.end_strip();
    }
    if (in_team == 0) tma_store_wait<0>();
}
