// INT8 convolutions at stride 1 on Hopper's tensor cores, with windows that overlap in shared memory. The kernel serves
// the first convolution after space to depth, with 16 channels (passes/quantise_squares.py), and convolutions of few
// channels, for which copies of the windows would need many times the memory of the pixels.
//
// Shared memory has planes of 16 channels, 16 bytes per pixel. All pixels of the images, padding included, form one
// line. The window of output position p has kernel row r at pixels p + r * W and following; the window of p + 1 is
// shifted by one pixel. wgmma reads each 32-byte row of its A operand 16 bytes after the previous one, from a single
// copy of the pixels. The 32 bytes are two neighbouring pixels of one plane, or one pixel of two planes. Near the end
// of a row or an image, the window reaches into the next row or image. The results of these positions are not stored.
#include "integer_products.cuh"

constexpr int GROUPS = 2, ROWS = 64 * GROUPS, THREADS = 128 * GROUPS;

// Descriptor of rows of 32 bytes, each 16 bytes after the previous row. The second half of a row is `vectors` after the
// first half.
__device__ inline uint64 smem_desc_window_rows(const uint4 *at, int vectors) {
    return (__cvta_generic_to_shared(at) & 0x3ffff) >> 4 | uint64(vectors) << 16 | 8ull << 32;
}

// A block keeps COLUMNS filters and walks over tiles of ROWS positions. Shared memory has the weights, in tiles as in
// warpgroup.cuh, then STAGES * PLANES * `patch` pixels.
// Shapes: x (N, H, W, 16 * PLANES), weight (K, KERNEL, KERNEL, 16 * PLANES) int8; bias (K) int32; multiplier (K) fp32; y (N,
// OH, OW, K), int8 or of the type T, with OH = height - KERNEL + 1, OW = width - KERNEL + 1. KERNEL * PLANES is even, K a
// multiple of 16. height = H + 2 * pad, width = W + 2 * pad; pad is 0 with one plane. places = N * height * width, patch >=
// ROWS + (KERNEL - 1) * width + KERNEL.
template <class T, int KERNEL, int PLANES, int COLUMNS, bool RELU>
__global__ void __launch_bounds__(THREADS, COLUMNS == 64 ? 3 : 1)
quantised_conv_squares(const uint4 *x, const uint4 *weight, const float *multiplier, const int *bias, T *y, uint32 places,
                       int height, int width, int filters, int patch, int pad) {
    constexpr int STAGES = PLANES == 1 ? 3 : 2;
    constexpr int VECTORS = KERNEL * KERNEL * PLANES;  // vectors of a filter
    static_assert(KERNEL * PLANES % 2 == 0);
    extern __shared__ __align__(1024) uint4 memory[];
    const int lane = lane_index(), warp = warp_index();
    const int first_column = blockIdx.y * COLUMNS;
    const uint32 tiles = (places + ROWS - 1) / ROWS;
    uint4 *pixels = memory + (VECTORS + 7) / 8 * COLUMNS * 8;

    for (int i = threadIdx.x; i < VECTORS * COLUMNS; i += THREADS) {
        const int vector = i % VECTORS, column = i / VECTORS, filter = first_column + filter_of(column);
        cp_async_zfill(memory + (vector / 8 * COLUMNS * 8 + swizzled(column, vector % 8)),
                       weight + (filter < filters ? filter * VECTORS + vector : 0), filter < filters);
    }
    const auto copy_tile = [&](uint32 tile, int stage) {
        if (tile < tiles)
            for (int i = threadIdx.x; i < patch * PLANES; i += THREADS) {
                const int pixel = i / PLANES, plane = i % PLANES;
                const uint32 place = tile * ROWS + pixel;
                uint32 from = place;
                bool there = place < places;
                if (PLANES > 1) {
                    const uint32 line = place / width, image = line / height;
                    const int column = int(place % width) - pad, row = int(line % height) - pad;
                    const int rows = height - 2 * pad, columns = width - 2 * pad;
                    there = there && uint32(row) < uint32(rows) && uint32(column) < uint32(columns);
                    from = (image * rows + row) * columns + column;
                }
                cp_async_zfill(pixels + ((stage * PLANES + plane) * patch + pixel), x + (there ? from * PLANES + plane : 0), there);
            }
        cp_async_commit();
    };
    for (int s = 0; s < STAGES - 1; ++s) copy_tile(blockIdx.x + s * gridDim.x, s);

    int now = 0;
    for (uint32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, now = (now + 1) % STAGES) {
        cp_async_wait<STAGES - 2>();
        fence_view_async_shared();
        __syncthreads();  // the tile has arrived, and all warps are done with the previous one
        Results<T, COLUMNS, false, RELU> results{multiplier, bias, y, 0, filters, first_column + lane % 4 * VECTOR};
        int products[COLUMNS / 8][4];
        results.start(products);
        const uint4 *rows = pixels + (now * PLANES * patch + warp / 4 * 64);
        wgmma_fence();
#pragma unroll
        for (int v = 0; v < VECTORS; v += 2) {
            const int tap = v / PLANES;
            int8_mma(products,
                     smem_desc_window_rows(rows + (v % PLANES * patch + tap / KERNEL * width + tap % KERNEL),
                                           PLANES == 1 ? 1 : patch),
                     smem_desc(memory + (v / 8 * COLUMNS * 8 + v % 8)));
        }
        wgmma_commit();
        copy_tile(tile + (STAGES - 1) * gridDim.x, (now + STAGES - 1) % STAGES);

        const int out_height = height - KERNEL + 1, out_width = width - KERNEL + 1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32 place = tile * ROWS + warp * 16 + lane / 4 + r * 8, column = place % width, line = place / width;
            const uint32 image = line / height, image_row = line % height;
            results.there[r] = place < places && column < out_width && image_row < out_height;
            results.row[r] = (image * out_height + image_row) * out_width + column;
        }
        wgmma_wait();
        int8_mma_fence_operand(products);
        results.store(products);
    }
}
