// The gradient of the weights of ResNet's first convolution on Hopper. The kernel computes the same gradient as
// `stem_wgrad` of stem.cu. Separate warps load the operands, compute the gradient of the convolution's output from
// them, and multiply.
//
// At batch 256 and 224 pixels an H200 reads 668 MB (0.16 ms at 4.1 TB/s), computes 205 million elements of the output's
// gradient (12 instructions each, 0.08 ms if no cycle is lost) and multiplies 92 GFLOP (0.09 ms at the highest rate).
//
//     dw[filter, k] = sum over pixels of dy[pixel, filter] * window[pixel, k]
//
// For each of the 7 kernel rows, k runs over 8 taps of 4 channels; the first tap is padding, and its sums are never
// read. The 8 taps are 64 bytes of one image row, or 4 vectors; for the next output pixel they start one vector later.
// So the vectors at one position in all 7 kernel rows form a matrix of 56 columns in shared memory
// (`smem_desc_windows_mn`), and four such matrices cover all k.
#include "batch_norm_relu_max_pool.cuh"
#include "pipeline.cuh"

constexpr int SIZE = 7, TAPS = SIZE + 1, IMAGE_CHANNELS = 4, PIXEL_BYTES = 2 * IMAGE_CHANNELS, FILTERS = 64;
constexpr int FILTER_VECTORS = FILTERS / VEC, ROW_OF_K = TAPS * IMAGE_CHANNELS, PLACES = ROW_OF_K / VEC;
constexpr int MMA_WARPS = 4, DY_WARPS = 15, WARPS = MMA_WARPS + DY_WARPS + 1, THREADS = WARPS * WARP;
// Registers per thread: the launch gives REGISTERS, too few for 112 accumulators; setmaxnreg redistributes them.
constexpr int REGISTERS = 65536 / THREADS / 8 * 8, REGS_MMA = 160, REGS_OTHERS = 80;
static_assert(MMA_WARPS * REGS_MMA + (WARPS - MMA_WARPS) * REGS_OTHERS <= WARPS * REGISTERS,
              "setmaxnreg cannot give more registers than the launch");
constexpr int STEP = 16;                                // pixels that a product sums over
constexpr int OUT_ROWS = 2, IN_ROWS = 2 * OUT_ROWS + SIZE - 2, WINDOW_ROWS = 2;  // rows of one work item
constexpr int LEFT = 2;                                 // vectors of zeros left of an image row
constexpr int MAX_STAGES = 8;

// At the start of shared memory.
struct alignas(1024) Control { uint64 full[MAX_STAGES], empty[MAX_STAGES]; };

// Named barriers, one per stage: the warps that compute an item's dy arrive, and the MMA warps wait for all of these
// warps.
constexpr int SYNC_THREADS = (MMA_WARPS + DY_WARPS) * WARP;
__device__ inline void signal_made(int place) {
    asm volatile("bar.arrive %0, %1;" :: "r"(place + 1), "n"(SYNC_THREADS) : "memory");
}
__device__ inline void wait_until_made(int place) {
    asm volatile("bar.sync %0, %1;" :: "r"(place + 1), "n"(SYNC_THREADS) : "memory");
}

// Shared memory after `Control`: items in flight, vectors of an item, and pixels in a row of the gradient, which are a
// multiple of STEP.
struct Layout { int stages, stage_vectors, pixels; };

// The operands of an item.
struct Stage {
    uint4 *x;      // (OUT_ROWS, pixels, FILTERS), swizzled; overwritten in place by the gradient
    uint4 *image;  // (IN_ROWS, pitch), from image row 2 * OUT_ROWS * item - 3 on
    uint4 *dz;     // (WINDOW_ROWS, PW, FILTERS)
    uint2 *winner; // (WINDOW_ROWS, PW, FILTERS)
    int pitch;

    __device__ Stage(uint4 *memory, const Layout &layout, int place, int pooled_width)
        : x(memory + sizeof(Control) / 16 + place * layout.stage_vectors),
          image(x + OUT_ROWS * layout.pixels * FILTER_VECTORS), dz(image + IN_ROWS * (layout.pixels + 3)),
          winner(reinterpret_cast<uint2 *>(dz + WINDOW_ROWS * pooled_width * FILTER_VECTORS)), pitch(layout.pixels + 3) {}
};

// partials[block] = the block's part of dw. A work item is two rows of the gradient of an image: one row of 2x2 squares
// of `PoolGradient`. One warp loads the operands, 15 warps overwrite x by the gradient, and four warps multiply. The
// tensor map of x is (N*OH, OW, K), in tiles of (OUT_ROWS, layout.pixels, K).
// Shapes: data (N, H, W, 4); x (N, OH, OW, K), the input of BatchNorm; dz (N, PH, PW, K), after pooling; winner (N, PH,
// PW, K) bytes; saved (2, K), gamma, dgamma, dbeta (K), partials (gridDim.x, K, 7 * ROW_OF_K) fp32. rows = N*OH*OW.
template <class T>
__global__ void __launch_bounds__(THREADS, 1)
stem_weights(const __grid_constant__ TensorMap x, const T *data, const T *dz, const uint8 *winner, const float *saved,
             const float *gamma, const float *dgamma, const float *dbeta, float *partials, Image size, Image pool,
             uint32 rows, int items, Layout layout) {
    extern __shared__ __align__(1024) uint4 memory[];
    Control &control = *reinterpret_cast<Control *>(memory);
    const int lane = lane_index(), warp = warp_index();
    const int squares_down = (size.out_height + 1) / 2;
    const auto stage_at = [&](const PipelineState &pipe) { return Stage(memory, layout, pipe.index, pool.out_width); };

    // The padding beside the image rows stays zero.
    for (int i = sizeof(Control) / 16 + threadIdx.x; i < int(sizeof(Control) / 16) + layout.stages * layout.stage_vectors;
         i += THREADS)
        memory[i] = make_uint4(0, 0, 0, 0);
    fence_view_async_shared();
    if (threadIdx.x == 0) {
        for (int s = 0; s < layout.stages; ++s) {
            mbarrier_init(control.full[s], 1);
            mbarrier_init(control.empty[s], MMA_WARPS);
        }
        fence_barrier_init();
    }
    __syncthreads();

    PipelineState pipe;
    if (warp < MMA_WARPS) {
        setmaxnreg_inc<REGS_MMA>();
        const int pixel = lane / 16 * 8 + lane % 8, vector = warp * 2 + lane / 8 % 2;  // this lane's matrix row
        float sums[PLACES][SIZE][4] = {};
        for (int item = blockIdx.x; item < items; item += gridDim.x, pipe.advance(layout.stages)) {
            const Stage stage = stage_at(pipe);
            mbarrier_wait(control.full[pipe.index], pipe.phase);
            wait_until_made(pipe.index);
            for (int first = 0; first < layout.pixels; first += STEP) {
                uint32 dy[OUT_ROWS][4];
#pragma unroll
                for (int row = 0; row < OUT_ROWS; ++row) {
                    ldmatrix_trans(dy[row], stage.x + swizzled(row * layout.pixels + first + pixel, vector));
                    wgmma_fence();
#pragma unroll
                    for (int place = 0; place < PLACES; ++place)
                        wgmma_mn_mn(sums[place], dy[row],
                                    smem_desc_windows_mn(stage.image + 2 * row * stage.pitch + first + place, stage.pitch),
                                    T{});
                    wgmma_commit();
                    wgmma_wait<1>();
                }
            }
            wgmma_wait();
            __syncwarp();  // all lanes have read the gradient
            if (lane == 0) arrive(control.empty[pipe.index]);
        }
        float *own = partials + size_t(blockIdx.x) * FILTERS * SIZE * ROW_OF_K;
#pragma unroll
        for (int place = 0; place < PLACES; ++place) {
            wgmma_fence_operand(sums[place]);
#pragma unroll
            for (int row = 0; row < SIZE; ++row)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int filter = warp * 16 + e / 2 * 8 + lane / 4;
                    own[(filter * SIZE + row) * ROW_OF_K + place * VEC + lane % 4 * 2 + e % 2] = sums[place][row][e];
                }
        }
        return;
    }

    setmaxnreg_dec<REGS_OTHERS>();
    if (warp < MMA_WARPS + DY_WARPS) {
        const int thread = threadIdx.x - MMA_WARPS * WARP, vector = thread % FILTER_VECTORS;
        const PoolGradient<T> gradient(saved, gamma, dgamma, dbeta, rows, vector * VEC, FILTERS);
        const auto pixel_at = [&](uint4 *x, int row, int column) {
            return reinterpret_cast<Packed<T> *>(x + row * layout.pixels * FILTER_VECTORS + swizzled(column, vector));
        };
        for (int item = blockIdx.x; item < items; item += gridDim.x, pipe.advance(layout.stages)) {
            const Stage stage = stage_at(pipe);
            const int square_row = item % squares_down;
            mbarrier_wait(control.full[pipe.index], pipe.phase);
            for (int square = thread / FILTER_VECTORS; square < pool.out_width; square += DY_WARPS * WARP / FILTER_VECTORS) {
                uint2 places[2][2];
                Packed<T> packed_dz[2][2], packed[2][2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int window = (i * pool.out_width + square + j) * FILTER_VECTORS + vector;
                        places[i][j] = {~0u, ~0u};
                        if (square_row + i < pool.out_height && square + j < pool.out_width) {
                            places[i][j] = stage.winner[window];
                            packed_dz[i][j] = reinterpret_cast<const Packed<T> *>(stage.dz)[window];
                        }
                        packed[i][j] = *pixel_at(stage.x, i, 2 * square + j);
                    }
                gradient.apply(packed, packed_dz, places);
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int j = 0; j < 2; ++j)
                        // pixels beyond the image need no store: TMA has loaded zeros
                        if (2 * square + j < size.out_width) {
                            Packed<T> *const at = pixel_at(stage.x, i, 2 * square + j);
                            if (2 * square_row + i < size.out_height)
                                *at = packed[i][j];
                            else  // this row belongs to the next image
                                *reinterpret_cast<uint4 *>(at) = make_uint4(0, 0, 0, 0);
                        }
            }
            tma_store_fence();  // needed because TMA writes this memory next
            __syncwarp();
            signal_made(pipe.index);
        }
        return;
    }

    const uint32 row_bytes = size.width * PIXEL_BYTES, winner_bytes = pool.out_width * FILTERS, dz_bytes = 2 * winner_bytes;
    for (int item = blockIdx.x; item < items; item += gridDim.x, pipe.advance(layout.stages)) {
        const Stage stage = stage_at(pipe);
        const int image = item / squares_down, square_row = item % squares_down, first_row = 2 * OUT_ROWS * square_row - 3;
        // rows that are in the image
        const int there_from = max(0, -first_row), there_to = min(IN_ROWS, size.height - first_row);
        const int windows = min(WINDOW_ROWS, pool.out_height - square_row);
        mbarrier_wait(control.empty[pipe.index], pipe.phase ^ 1);  // the first round does not wait
        if (there_to - there_from < IN_ROWS) {
            for (int i = lane; i < IN_ROWS * stage.pitch; i += WARP)
                if (i < there_from * stage.pitch || i >= there_to * stage.pitch) stage.image[i] = make_uint4(0, 0, 0, 0);
            fence_view_async_shared();
        }
        __syncwarp();
        if (lane != 0) continue;
        uint64 &full = control.full[pipe.index];
        arrive_expect_tx(full, OUT_ROWS * layout.pixels * FILTER_VECTORS * 16 + (there_to - there_from) * row_bytes +
                                   windows * (dz_bytes + winner_bytes));
        tma_load(stage.x, x, 0, 0, image * size.out_height + OUT_ROWS * square_row, full);
        const size_t window_row = size_t(image) * pool.out_height + square_row;
        tma_load_bulk(stage.dz, dz + window_row * pool.out_width * FILTERS, windows * dz_bytes, full);
        tma_load_bulk(stage.winner, winner + window_row * pool.out_width * FILTERS, windows * winner_bytes, full);
        for (int row = there_from; row < there_to; ++row)
            tma_load_bulk(stage.image + row * stage.pitch + LEFT,
                          data + (size_t(image) * size.height + first_row + row) * size.width * IMAGE_CHANNELS, row_bytes, full);
    }
}
