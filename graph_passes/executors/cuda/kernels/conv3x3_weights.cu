// The gradient of the weights of 3x3 convolutions with stride 1 and padding 1 over multiples of 64 channels, on Hopper.
//
//     dw[filter, tap, c] = sum over pixels p of dy[p, filter] * x[p + tap, c]
//
// A block has 64 filters and 64 channels of x. In shared memory, both images get one column of zeros after their W columns,
// and one row of zeros after each image. So all pixels form one line, in which a tap is a constant distance: tap (ky, kx) of
// pixel p of dy is pixel p + ky * (W + 1) + kx of x, whose line begins one row and one column earlier. Every wgmma sums over
// 16 pixels of the line, wherever rows begin. The three taps of a kernel row are 192 columns of its B operand, read in place
// (`smem_desc_mn_windows`).
//
// At batch 256, 56 x 56 pixels and 64 channels an H200 reads 206 MB (0.05 ms). It multiplies 59 GFLOP, or 61 GFLOP with
// the zeros (0.066 ms at the highest rate). Each wgmma reads 8 KB of shared memory, which takes 64 of its 96 cycles;
// writing the loaded data takes 11.
#include "pipeline.cuh"

constexpr int CHANNELS = 64, SIZE = 3, VECTORS = CHANNELS / VEC;
constexpr int MMA_WARPS = SIZE * TEAM_WARPS, COPYING = 2, THREADS = (MMA_WARPS + COPYING) * WARP;
constexpr int STEP = 16;  // pixels that one wgmma sums over
constexpr int MAX_ROWS = 32;

// At the start of shared memory.
struct alignas(1024) Control { uint64 full[MAX_ROWS], empty[MAX_ROWS]; };

// The circular buffers after `Control`, first of x, then of dy: `rows` slots for rows of `pitch` pixels. The first `repeated`
// slots are stored again after the last, so that a wgmma may read across the wrap-around.
struct Ring { int rows, repeated, pitch; };

// parts[blockIdx.x] = the part of dw from the rows of the blocks with this blockIdx.x. A block works on consecutive
// rows of the padded images. A padded image has H + 1 rows; the last row is zeros; `padded_rows` leaves out the zeros
// of the last image. One warp loads x and one loads dy. For each kernel row, a team of four warps multiplies. The
// tensor maps of x and dy are (N*H, W, C) and (N*H, W, K), in tiles of one row of W + 1 pixels and 64 channels.
// Shapes: parts (gridDim.x, K, 3, 3, C) fp32. C and K are multiples of 64, gridDim.y = K / 64 * C / 64.
template <class T>
__global__ void __launch_bounds__(THREADS, 1)
conv3x3_weights(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dy, float *parts, int height,
                int channels, int padded_rows, Ring ring) {
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    uint4 *const x_rows = memory + sizeof(Control) / 16;
    uint4 *const dy_rows = x_rows + (ring.rows + ring.repeated) * ring.pitch * VECTORS;
    const int lane = lane_index(), warp = warp_index();
    const int first = int64_t(blockIdx.x) * padded_rows / gridDim.x;
    const int end = int64_t(blockIdx.x + 1) * padded_rows / gridDim.x;
    const int steps = ((end - first) * ring.pitch + STEP - 1) / STEP;
    const int first_channel = blockIdx.y * CHANNELS % channels;
    const int first_filter = blockIdx.y * CHANNELS / channels * CHANNELS;

    // Until the first row of x has arrived, the zeros of dy are multiplied with two pixels of its slot: these two
    // pixels must be finite numbers.
    for (int i = threadIdx.x; i < (ring.rows + ring.repeated) * 2 * VECTORS; i += THREADS)
        x_rows[i / (2 * VECTORS) * ring.pitch * VECTORS + i % (2 * VECTORS)] = make_uint4(0, 0, 0, 0);
    fence_view_async_shared();
    if (threadIdx.x == 0) {
        for (int r = 0; r < ring.rows; ++r) {
            mbarrier_init(control.full[r], COPYING);
            mbarrier_init(control.empty[r], MMA_WARPS);
        }
        fence_barrier_init();
    }
    __syncthreads();

    PipelineState pipe;
    // Loads padded rows from `row` on, and zeros from `end` on; each row starts at `column`.
    const auto copy_rows = [&](const TensorMap &map, uint4 *to, int row, int end, int column, int channel) {
        const uint32 row_bytes = ring.pitch * CHANNELS * sizeof(T);
        const int image = (row + height + 1) / (height + 1) - 1;  // -1 for row -1
        // row in the image, and line in the tensor map
        int in_image = row - image * (height + 1), line = image * height + in_image;
        const int stop = row + (steps * STEP - 1) / ring.pitch + SIZE;
        for (; row < stop; ++row, pipe.advance(ring.rows)) {
            uint64 &full = control.full[pipe.index];
            const bool is_zeros = in_image == height;
            const int copies = pipe.index < ring.repeated ? 2 : 1;
            mbarrier_wait(control.empty[pipe.index], pipe.phase ^ 1);  // the first round does not wait
            arrive_expect_tx(full, copies * row_bytes);
            for (int copy = 0; copy < copies; ++copy)
                tma_load(to + (pipe.index + copy * ring.rows) * ring.pitch * VECTORS, map, channel, column,
                         is_zeros || row >= end ? -1 : line, full);
            in_image = is_zeros ? 0 : in_image + 1;
            line += !is_zeros;
        }
    };
    if (warp >= MMA_WARPS) {
        if (lane != 0) return;
        if (warp == MMA_WARPS)
            copy_rows(x, x_rows, first - 1, end + 1, -1, first_channel);
        else
            copy_rows(dy, dy_rows, first, end, 0, first_filter);
        return;
    }

    const int kernel_row = warp / TEAM_WARPS, round = ring.rows * ring.pitch;
    PipelineState oldest;
    // there: number of pixels of dy whose operands have all arrived. done: number of pixels of dy whose rows have been
    // released.
    int there = -2 * ring.pitch, done = 0;
    int dy_at = 0, x_at = kernel_row * ring.pitch;
    float sums[SIZE * VECTORS][4] = {};
    for (int pixels = STEP; pixels <= steps * STEP; pixels += STEP) {
        for (; there < pixels; there += ring.pitch, pipe.advance(ring.rows))
            mbarrier_wait(control.full[pipe.index], pipe.phase);
        wgmma_fence();
        wgmma_mn_mn(sums, smem_desc(dy_rows + dy_at * VECTORS), smem_desc_mn_windows(x_rows + x_at * VECTORS), T{});
        wgmma_commit();
        dy_at += STEP;
        x_at += STEP;
        if (dy_at >= round) dy_at -= round;
        if (x_at >= round) x_at -= round;
        wgmma_wait<1>();
        for (; done + ring.pitch <= pixels - STEP; done += ring.pitch, oldest.advance(ring.rows))
            if (lane == 0) arrive(control.empty[oldest.index]);
    }
    wgmma_wait();
    wgmma_fence_operand(sums);
    float *const own = parts + size_t(blockIdx.x) * gridDim.y * CHANNELS * SIZE * SIZE * CHANNELS;
#pragma unroll
    for (int j = 0; j < SIZE * VECTORS; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int filter = first_filter + warp % TEAM_WARPS * 16 + r * 8 + lane / 4;
            const int tap = kernel_row * SIZE + j / VECTORS, channel = first_channel + j % VECTORS * VEC + lane % 4 * 2;
            *reinterpret_cast<float2 *>(own + (filter * SIZE * SIZE + tap) * channels + channel) =
                float2{sums[j][r * 2], sums[j][r * 2 + 1]};
        }
}
