// The gradient of a 1x1 convolution's input, and the sums of the BatchNorm backward that reads it.
#include "tensor_cores.cuh"

// dz = dy * w, plus `addend` with ADD, where the ReLU bits in `mask` let it through; and of dz the sums that
// batch_norm_backward_reduce makes, or with PAIR those of batch_norm_pair_backward_reduce. Weights are (k, n), which is OHWI.
//
// A block has WARPS_M x WARPS_N warps; a warp works on 16 rows of COLUMN_TILES * 8 columns, from global memory to registers
// and back, and no warp waits for another: while some compute, the loads of others are in flight. All loads of a tile come
// first; loading the next tile's as registers become free was slower, since a wait for one load is a wait for later ones too.
template <class T, int K, int WARPS_M, int WARPS_N, int COLUMN_TILES, bool ADD, bool PAIR>
__global__ void __launch_bounds__(WARPS_M * WARPS_N * WARP, 1)
dgrad_reduce(const Packed<T> *dy, const T *w, const Packed<T> *x, const Packed<T> *x_2, const Packed<T> *addend,
             const uint8 *mask, Packed<T> *dz, const float *saved, const float *saved_2, float *dgamma, float *dgamma_2,
             float *dbeta, float *dbeta_2, float *partials, uint32 *tickets, uint32 rows, int columns) {
    constexpr int STEPS = K / 32, VECTORS = COLUMN_TILES / 4, SUMS = 2 + PAIR, TILE_ROWS = 16;
    constexpr int BLOCK_COLUMNS = WARPS_N * COLUMN_TILES * 8;
    static_assert(K % 32 == 0 && COLUMN_TILES % 4 == 0, "a thread's share is 8 channels");
    extern __shared__ uint4 weights[];
    __shared__ alignas(16) float means[1 + PAIR][BLOCK_COLUMNS];  // read as vectors
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warp_m = warp / WARPS_N, warp_n = warp % WARPS_N;
    const int in_block = warp_n * COLUMN_TILES * 8 + lane % 4 * VEC, column = blockIdx.x * BLOCK_COLUMNS + in_block;
    load_weights<T, K, BLOCK_COLUMNS>(weights, w, blockIdx.x * BLOCK_COLUMNS, columns);
    for (int n = threadIdx.x; n < BLOCK_COLUMNS && blockIdx.x * BLOCK_COLUMNS + n < columns; n += blockDim.x) {
        means[0][n] = saved[blockIdx.x * BLOCK_COLUMNS + n];
        if (PAIR) means[PAIR][n] = saved_2[blockIdx.x * BLOCK_COLUMNS + n];
    }
    __syncthreads();

    float sums[SUMS][VECTORS][VEC] = {};
    for (uint32 tile = blockIdx.y * WARPS_M + warp_m; tile * TILE_ROWS < rows; tile += gridDim.y * WARPS_M) {
        const uint32 row = tile * TILE_ROWS + lane / 4;  // and the eighth behind it
        Packed<T> a[STEPS][2], of_x[2][VECTORS], of_x_2[2][VECTORS], more[2][VECTORS];
        uint32 bits[2][VECTORS];
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (row + r * 8 < rows) a[step][r] = dy[(row + r * 8) * (K / VEC) + step * 4 + lane % 4];
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int q = 0; q < VECTORS; ++q) {
                if (row + r * 8 >= rows || column + q * 32 >= columns) continue;
                const uint32 at = ((row + r * 8) * columns + column) / VEC + q * 4;
                of_x[r][q] = x[at];
                if (PAIR) of_x_2[r][q] = x_2[at];
                if (ADD) more[r][q] = addend[at];
                bits[r][q] = mask[at];
            }

        float products[COLUMN_TILES][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; ++n)
                multiply_add<T>(products[n], words(a[step][0]), words(a[step][1]),
                                weights[((step * WARPS_N + warp_n) * COLUMN_TILES + n) * WARP + lane]);

#pragma unroll
        for (int q = 0; q < VECTORS; ++q) {
            if (column + q * 32 >= columns) continue;
            float mean[VEC], mean_2[VEC];
            load_floats(means[0] + in_block + q * 32, mean);
            if (PAIR) load_floats(means[PAIR] + in_block + q * 32, mean_2);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (row + r * 8 >= rows) continue;
                float g[VEC], g2[VEC], v[VEC], v_2[VEC];
                columns_of(products, q * 4, r, g);
                unpack(of_x[r][q], v);
                if (PAIR) unpack(of_x_2[r][q], v_2);
                if (ADD) unpack(more[r][q], g2);
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    if (ADD) g[k] += g2[k];
                    if (!(bits[r][q] >> k & 1)) g[k] = 0;
                    sums[0][q][k] += g[k];
                    sums[1][q][k] += g[k] * (v[k] - mean[k]);
                    if (PAIR) sums[SUMS - 1][q][k] += g[k] * (v_2[k] - mean_2[k]);
                }
                dz[((row + r * 8) * columns + column) / VEC + q * 4] = pack<T>(g);
            }
        }
    }
    reduce_columns<WARPS_M, WARPS_N>(sums, warp_m, warp_n, reinterpret_cast<float *>(weights), partials, tickets, columns,
                                     [=](int n, const float (&of)[SUMS]) {
        dbeta[n] = of[0];
        dgamma[n] = of[1] * saved[columns + n];
        if (PAIR) dbeta_2[n] = of[0];
        if (PAIR) dgamma_2[n] = of[SUMS - 1] * saved_2[columns + n];
    });
}
