// 3x3 convolutions in INT8 on tensor cores, whose nine taps read one copy of the pixels in shared memory.
//
// Images lie behind each other in one line of places: a pixel of zeros before each row of an image, and a row of zeros before
// each image, so that what follows an end is zero too. With PITCH = W + 1 a tap (r, s) of the output at a place p reads place
// p + r * PITCH + s: for a tile of neighbouring places these are rows of shared memory that follow each other, which begin at
// another row for each tap. Results at places of zeros are not stored.
#include "integer_products.cuh"

constexpr int GROUPS = 4, ROWS = 64 * GROUPS, THREADS = 128 * GROUPS, STAGES = 5, TAPS = 9, COPIED_ROWS = THREADS / 8;
constexpr int AHEAD = STAGES - 2;  // taps that are on their way; the products of one are under way when the next are started
constexpr int FIRST_COPYING_TAP = AHEAD + 1;  // of the chunk before: nobody reads its buffer then

// A block makes ROWS places and COLUMNS filters, chunk by chunk of 128 channels, or of C with KSTEPS = C / 32. Shared memory:
// two buffers of `patch_rows` pixels (one, if there is one chunk), then STAGES times the weights of a tap; tiles as in
// warpgroup.cuh.
// Shapes: x (N, H, W, C), weight (K, 3, 3, C), addend (N, H, W, K) int8; bias (K) int32; multiplier (K) fp32; y (N, H, W, K),
// int8 or of the type T. C is 64 or a multiple of 128, K a multiple of 16. places = N * (H + 1) * (W + 1),
// patch_rows >= ROWS + 2 * (W + 1) + 2, a multiple of 8.
template <class T, int COLUMNS, int KSTEPS, bool ADD, bool RELU>
__global__ void __launch_bounds__(THREADS, 1)
quantised_conv3x3(const uint4 *x, const uint4 *weight, const float *multiplier, const int *bias, const uint4 *addend, T *y,
                  int images, int height, int width, int channels, int filters, float addend_share, int patch_rows) {
    constexpr int COLUMN_COPIES = COLUMNS / COPIED_ROWS;
    extern __shared__ __align__(1024) uint4 memory[];
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    const int column_tiles = (filters + COLUMNS - 1) / COLUMNS, pitch = width + 1, vectors = channels / VECTOR;
    const int first_place = blockIdx.x / column_tiles * ROWS, first_column = blockIdx.x % column_tiles * COLUMNS;
    const int chunks = (vectors + 7) / 8, steps = chunks * TAPS;
    uint4 *weights = memory + (chunks > 1 ? 2 : 1) * patch_rows * 8;
    const int copied_row = threadIdx.x / 8, copied_vector = threadIdx.x % 8;

    // Rows of the patch from `row` on, as many as there are threads for.
    const auto copy_pixels = [&](int chunk, int row) {
        row += copied_row;
        if (row >= patch_rows) return;
        const uint32 place = first_place + row, column = place % pitch, line = place / pitch;
        const uint32 image = line / (height + 1), image_row = line % (height + 1);
        const int vector = chunk * 8 + copied_vector;
        const bool there = vector < vectors && column && image_row && image < images;
        copy_ahead(memory + (chunk % 2 * patch_rows * 8 + swizzled(row, copied_vector)),
                   x + (there ? ((image * height + image_row - 1) * width + column - 1) * vectors + vector : 0), there);
    };
    const auto copy_step = [&](int step) {
        if (step < steps) {
            const int chunk = step / TAPS, tap = step % TAPS, vector = chunk * 8 + copied_vector;
            if (chunk + 1 < chunks)
                for (int row = (tap - FIRST_COPYING_TAP) * COPIED_ROWS; row >= 0 && row < patch_rows;
                     row += (TAPS - FIRST_COPYING_TAP) * COPIED_ROWS)
                    copy_pixels(chunk + 1, row);
#pragma unroll
            for (int i = 0; i < COLUMN_COPIES; ++i) {
                const int column = copied_row + i * COPIED_ROWS, filter = first_column + filter_of(column);
                const bool there = filter < filters && vector < vectors;
                copy_ahead(weights + (step % STAGES * COLUMNS * 8 + swizzled(column, copied_vector)),
                           weight + (there ? (filter * TAPS + tap) * vectors + vector : 0), there);
            }
        }
        close_copies();
    };
    for (int row = 0; row < patch_rows; row += COPIED_ROWS) copy_pixels(0, row);
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) copy_step(s);

    Results<T, COLUMNS, ADD, RELU> results{multiplier, bias, y, addend_share, filters, first_column + lane % 4 * VECTOR};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const uint32 place = first_place + warp * 16 + lane / 4 + r * 8, column = place % pitch, line = place / pitch;
        const uint32 image = line / (height + 1), image_row = line % (height + 1);
        results.there[r] = column < width && image_row < height && image < images;
        results.row[r] = (image * height + image_row) * width + column;
    }
    results.load_addends(addend);

    int products[COLUMNS / 8][4] = {};
    for (int step = 0; step < steps; ++step) {
        const int tap = step % TAPS;
        const uint4 *pixels = memory + (step / TAPS % 2 * patch_rows + warp / 4 * 64 + tap / 3 * pitch + tap % 3) * 8;
        const uint4 *columns = weights + step % STAGES * COLUMNS * 8;
        wait_for_copies<AHEAD - 1>();
        show_integers();
        __syncthreads();  // the tap is there, and everybody is done with the second last
        open_integers();
#pragma unroll
        for (int k = 0; k < KSTEPS; ++k) multiply_integers(products, pixels + k * 2, columns + k * 2);
        close_integers();
        copy_step(step + AHEAD);
        wait_for_integers<1>();
    }
    wait_for_integers();
    results.store(products);
}
