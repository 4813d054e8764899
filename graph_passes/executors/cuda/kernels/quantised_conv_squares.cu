// The first convolution in INT8 on Hopper's tensor cores, of squares with 16 channels (passes/quantise_squares.py).
//
// A square is 16 bytes. At stride 1, without padding, a row of the window of the output at a place p of the images' one line of
// squares is the squares from p + r * W on; those of the next place begin one square later. So the tensor cores read a row of
// the products, 32 bytes, at every 16 bytes of one copy of the squares. Results at places near the end of a row or an image,
// whose windows reach into the next one, are not stored.
#include "integer_products.cuh"

constexpr int GROUPS = 2, ROWS = 64 * GROUPS, COLUMNS = 64, THREADS = 128 * GROUPS, STAGES = 3;

// Rows of 32 bytes, of which each begins 16 bytes behind the one before.
__device__ inline uint64 overlapping_rows(const uint4 *at) {
    return (__cvta_generic_to_shared(at) & 0x3ffff) >> 4 | 1ull << 16 | 8ull << 32;
}

// A block keeps 64 filters and walks over tiles of ROWS places. Shared memory: the weights, in tiles as in warpgroup.cuh, then
// STAGES times `patch` squares.
// Shapes: x (N, H, W, 16), weight (K, KERNEL, KERNEL, 16) int8; bias (K) int32; multiplier (K) fp32; y (N, OH, OW, K), int8 or
// of the type T, with OH = H - KERNEL + 1, OW = W - KERNEL + 1. KERNEL is even, K a multiple of 16. places = N * H * W,
// patch >= ROWS + (KERNEL - 1) * W + KERNEL.
template <class T, int KERNEL, bool RELU>
__global__ void __launch_bounds__(THREADS, 3)
quantised_conv_squares(const uint4 *x, const uint4 *weight, const float *multiplier, const int *bias, T *y, uint32 places,
                       int height, int width, int filters, int patch) {
    extern __shared__ __align__(1024) uint4 memory[];
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    constexpr int TAPS = KERNEL * KERNEL;
    const int first_column = blockIdx.y * COLUMNS;
    const uint32 tiles = (places + ROWS - 1) / ROWS;
    uint4 *squares = memory + (TAPS + 7) / 8 * COLUMNS * 8;

    for (int i = threadIdx.x; i < TAPS * COLUMNS; i += THREADS) {
        const int tap = i % TAPS, column = i / TAPS, filter = first_column + filter_of(column);
        copy_ahead(memory + (tap / 8 * COLUMNS * 8 + swizzled(column, tap % 8)),
                   weight + (filter < filters ? filter * TAPS + tap : 0), filter < filters);
    }
    const auto copy_tile = [&](uint32 tile, int stage) {
        if (tile < tiles)
            for (int i = threadIdx.x; i < patch; i += THREADS) {
                const uint32 place = tile * ROWS + i;
                copy_ahead(squares + (stage * patch + i), x + (place < places ? place : 0), place < places);
            }
        close_copies();
    };
    for (int s = 0; s < STAGES - 1; ++s) copy_tile(blockIdx.x + s * gridDim.x, s);

    int now = 0;
    for (uint32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, now = (now + 1) % STAGES) {
        wait_for_copies<STAGES - 2>();
        show_to_products();
        __syncthreads();  // the tile is there, and everybody is done with the one before
        Results<T, COLUMNS, false, RELU> results{multiplier, bias, y, 0, filters, first_column + lane % 4 * VECTOR};
        int products[COLUMNS / 8][4];
        results.start(products);
        const uint4 *rows = squares + (now * patch + warp / 4 * 64);
        open_products();
#pragma unroll
        for (int tap = 0; tap < TAPS; tap += 2)
            multiply_integers(products, overlapping_rows(rows + (tap / KERNEL * width + tap % KERNEL)),
                              matrix(memory + (tap / 8 * COLUMNS * 8 + tap % 8)));
        close_products();
        copy_tile(tile + (STAGES - 1) * gridDim.x, (now + STAGES - 1) % STAGES);

        const int out_height = height - KERNEL + 1, out_width = width - KERNEL + 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32 place = tile * ROWS + warp * 16 + lane / 4 + r * 8, column = place % width, line = place / width;
            const uint32 image = line / height, image_row = line % height;
            results.there[r] = place < places && column < out_width && image_row < out_height;
            results.row[r] = (image * out_height + image_row) * out_width + column;
        }
        wait_for_products();
        hold_integers(products);
        results.store(products);
    }
}
