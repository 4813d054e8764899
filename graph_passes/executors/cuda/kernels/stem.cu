// ResNet's first convolution on tensor cores: 7x7 with stride 2 and padding 3 on 4-channel images, 64 filters. Forward,
// with the sums of BatchNorm; and the gradient of its weights, fused with the gradient of BatchNorm + ReLU + max
// pooling. No other node reads that gradient, so it is never written.
//
//     out[pixel, filter] = sum over k of a[pixel, k] * w[filter, k]
//
// For each of the 7 kernel rows, k runs over 8 taps of 4 channels; the first tap is padding, and its weight is 0. The 8
// taps are 64 bytes of one image row; for the next output pixel they start 16 bytes later. `ldmatrix` reads rows of 16
// bytes from any address, so an image row in shared memory serves as the matrix a, without im2col. PTX ISA, "Matrix
// Fragments for mma.m16n8k16" and "ldmatrix".
#include "batch_norm_relu_max_pool.cuh"
#include "moments.cuh"

constexpr int SIZE = 7, TAPS = SIZE + 1, IMAGE_CHANNELS = 4, FILTERS = 64;
constexpr int FILTER_VECTORS = FILTERS / VEC;
constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int OUT_ROWS = 4;  // output rows of one work item
constexpr int IN_ROWS = 2 * OUT_ROWS + SIZE - 2;
constexpr int ROW_OF_K = TAPS * IMAGE_CHANNELS;              // values of k in one kernel row
constexpr int LEFT = 2;                                      // vectors of zeros left of an image row
constexpr int LANES = 16;                                    // bytes of a vector

// --- shared by forward and gradient: image rows in shared memory, tensor cores ---

// Length of an image row in shared memory, in vectors of 16 bytes (2 pixels), for `tiles` tiles of 16 output pixels.
__device__ inline int row_vectors(int tiles) { return tiles * 16 + 3; }

__device__ inline void clear(uint4 *to, int vectors) {
    for (int i = threadIdx.x; i < vectors; i += THREADS) to[i] = make_uint4(0, 0, 0, 0);
}

// Starts the copies of the image rows that are read by OUT_ROWS output rows, from `out_row` on.
template <class T>
__device__ inline void copy_image_rows(uint4 *to, int pitch, const T *x, int image, int out_row, Image size) {
    const int vectors = size.width / 2;
    const uint4 *from = reinterpret_cast<const uint4 *>(x);
    for (int i = threadIdx.x; i < IN_ROWS * vectors; i += THREADS) {
        const int j = i / vectors, column = i - j * vectors, row = 2 * out_row - 3 + j;
        const bool inside = row >= 0 && row < size.height;
        const uint4 *source = from + (size_t(image) * size.height + (inside ? row : 0)) * vectors + column;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                         uint32(__cvta_generic_to_shared(to + j * pitch + LEFT + column))),
                     "l"(source), "r"(inside ? 16 : 0)
                     : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING> __device__ inline void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Loads four 8x8 matrices. Each lane gives the address of one row: lanes 0 to 7 of the first matrix, 8 to 15 of the second
// ...
__device__ inline void ldmatrix_x4(uint32 (&m)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
__device__ inline void ldmatrix_trans(uint32 (&m)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

template <class T> __device__ inline void multiply_add(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);
template <> __device__ inline void multiply_add<half>(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ inline void multiply_add<bfloat16>(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- forward ---

// y = the convolution. `sums` are the sums of y about the mean of each filter, in a fixed order. A warp accumulates about the
// first value that it computes of each filter.
// `items` is the number of images times groups of OUT_ROWS rows; `tiles` is the number of 16-pixel tiles in a row. Even and
// odd warps compute 32 filters each, and keep all weights of these in registers; each of the four warps of either half
// computes one row of an item. Dynamic shared memory has the image rows of two items.
// Shapes: x (N, H, W, 4), w (K, 7, 7, 4) with K = FILTERS, y (N, OH, OW, K); sums (3, K), partials (gridDim.x, K, 3) fp32;
// tickets (1).
template <class T>
__global__ void __launch_bounds__(THREADS, 1)
stem_fprop(const T *x, const T *w, Packed<T> *y, float *sums, Moments *partials, uint32 *tickets, Image size,
           uint32 items, int tiles) {
    constexpr int PARTS = THREADS / FILTERS;
    static_assert(PARTS == OUT_ROWS, "of_part has as many rows for both uses");
    extern __shared__ uint4 shared[];
    __shared__ Moments of_part[OUT_ROWS][FILTERS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, half_of_filters = warp % 2, own_row = warp / 2;
    const int pitch = row_vectors(tiles), groups = (size.out_height + OUT_ROWS - 1) / OUT_ROWS;
    clear(shared, 2 * IN_ROWS * pitch);

    // Filters can be assigned to the columns of the product in any order. A thread gets columns 2q and 2q + 1 of each
    // of the four accumulator tiles. The order is chosen such that these columns are 8 neighbouring filters.
    uint32 weights[2 * SIZE][4][2];
#pragma unroll
    for (int step = 0; step < 2 * SIZE; ++step) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int column = lane / 4, filter = half_of_filters * 32 + column / 2 * VEC + j * 2 + column % 2;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int k = step % 2 * 16 + lane % 4 * 2 + e * 8, tap = k / IMAGE_CHANNELS - 1;
                const T *at = w + ((filter * SIZE + step / 2) * SIZE + tap) * IMAGE_CHANNELS + k % IMAGE_CHANNELS;
                weights[step][j][e] = tap < 0 ? 0 : *reinterpret_cast<const uint32 *>(at);
            }
        }
    }
    __syncthreads();

    float acc[2][VEC] = {}, pivot[VEC] = {};
    uint32 pixels = 0;  // pixels that this warp has summed so far
    uint32 item = blockIdx.x;
    if (item < items) copy_image_rows(shared, pitch, x, item / groups, item % groups * OUT_ROWS, size);
    for (int turn = 0; item < items; item += gridDim.x, turn ^= 1) {
        const uint32 next = item + gridDim.x;
        if (next < items) {
            copy_image_rows(shared + (turn ^ 1) * IN_ROWS * pitch, pitch, x, next / groups, next % groups * OUT_ROWS, size);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        const int out_row = item % groups * OUT_ROWS + own_row;
        const uint32 rows = uint32(__cvta_generic_to_shared(shared + (turn * IN_ROWS + 2 * own_row) * pitch));
        const size_t first = (size_t(item / groups) * size.out_height + out_row) * size.out_width;
        for (int tile = 0; tile < tiles && out_row < size.out_height; ++tile) {
            float c[4][4] = {};
            const uint32 start = rows + (tile * 16 + lane % 16 + lane / 16) * LANES;
#pragma unroll
            for (int step = 0; step < 2 * SIZE; ++step) {
                uint32 a[4];
                ldmatrix_x4(a, start + (step / 2 * pitch + step % 2 * 2) * LANES);
#pragma unroll
                for (int j = 0; j < 4; ++j) multiply_add<T>(c[j], a, weights[step][j][0], weights[step][j][1]);
            }
            if (pixels == 0)  // lanes 0 to 3 have the first pixel
#pragma unroll
                for (int k = 0; k < VEC; ++k) pivot[k] = __shfl_sync(0xffffffff, c[k / 2][k % 2], lane % 4);
            pixels += min(16, size.out_width - tile * 16);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int column = tile * 16 + r * 8 + lane / 4;
                if (column >= size.out_width) continue;
                float v[VEC];
#pragma unroll
                for (int k = 0; k < VEC; ++k) v[k] = c[k / 2][2 * r + k % 2];
                const Packed<T> packed = pack<T>(v);
                y[(first + column) * FILTER_VECTORS + half_of_filters * 4 + lane % 4] = packed;
                unpack(packed, v);
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    v[k] -= pivot[k];
                    acc[0][k] += v[k];
                    acc[1][k] += v[k] * v[k];
                }
            }
        }
        __syncthreads();  // the next round may then overwrite this buffer
    }

#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            float v = acc[j][k];
#pragma unroll
            for (int distance = 4; distance < WARP; distance *= 2) v += __shfl_xor_sync(0xffffffff, v, distance);
            acc[j][k] = v;
        }
    }
    if (lane < 4) {
#pragma unroll
        for (int k = 0; k < VEC; ++k)
            of_part[own_row][half_of_filters * 32 + lane * VEC + k] = Moments::from_sums(pivot[k], pixels, acc[0][k], acc[1][k]);
    }
    finish_moments(of_part, OUT_ROWS, partials, tickets, sums);
}

// --- gradient of the weights ---

// partials[block] (FILTERS, SIZE * ROW_OF_K) = the block's part of
// dw[filter, k] = sum over pixels of dy[pixel, filter] * a[pixel, k]
// dy is the gradient of BatchNorm + ReLU + max pooling, computed here (`PoolGradient`). Each half of the warps computes
// 32 filters; within a half, each of the four warps computes 7 of the 28 groups of 8 values of k. Dynamic shared memory
// has dy of an item, then its image rows. The vectors of a pixel of dy are ordered such that `ldmatrix` has no bank
// conflicts.
// Shapes: data (N, H, W, 4); x (N, OH, OW, K), the input of BatchNorm; dz (N, PH, PW, K), after pooling; winner (N, PH,
// PW, K) bytes; saved (2, K), gamma, dgamma, dbeta (K), partials (gridDim.x, K, 7 * ROW_OF_K) fp32. rows = N*OH*OW.
template <class T>
__global__ void __launch_bounds__(THREADS, 2)
stem_wgrad(const T *data, const Packed<T> *x, const Packed<T> *dz, const uint2 *winner, const float *saved,
           const float *gamma, const float *dgamma, const float *dbeta, float *partials, Image size, Image pool,
           uint32 rows, uint32 items, int tiles) {
    constexpr int GROUPS_OF_K = SIZE * ROW_OF_K / 8 / 4;  // groups of k of one warp
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, half_of_filters = warp % 2, first_k = warp / 2 * GROUPS_OF_K;
    const int pitch = row_vectors(tiles), dy_pitch = tiles * 16, groups = (size.out_height + OUT_ROWS - 1) / OUT_ROWS;
    uint4 *const image_rows = shared + OUT_ROWS * dy_pitch * FILTER_VECTORS;
    clear(shared, OUT_ROWS * dy_pitch * FILTER_VECTORS + IN_ROWS * pitch);
    const int vector = threadIdx.x % FILTER_VECTORS;
    const PoolGradient<T> gradient(saved, gamma, dgamma, dbeta, rows, vector * VEC, FILTERS);

    // Addresses of this lane's matrix row: in dy, and for each pair of groups of k.
    const int pixel = lane / 16 * 8 + lane % 8;
    const uint32 dy_start = uint32(__cvta_generic_to_shared(shared)) + pixel * FILTER_VECTORS * LANES;
    uint32 dy_vector[2], k_start[(GROUPS_OF_K + 1) / 2];
#pragma unroll
    for (int m = 0; m < 2; ++m) dy_vector[m] = ((half_of_filters * 4 + m * 2 + lane / 8 % 2) ^ (pixel % 8)) * LANES;
#pragma unroll
    for (int i = 0; i < (GROUPS_OF_K + 1) / 2; ++i) {
        const int group = min(first_k + 2 * i + lane / 16, SIZE * 4 - 1);
        k_start[i] = uint32(__cvta_generic_to_shared(image_rows)) +
                     (group / 4 * pitch + group % 4 + lane / 8 % 2 * 8 + lane % 8) * LANES;
    }

    float acc[2][GROUPS_OF_K][4] = {};
    for (uint32 item = blockIdx.x; item < items; item += gridDim.x) {
        const int image = item / groups, out_row = item % groups * OUT_ROWS;
        __syncthreads();  // all warps are done with the previous item
        copy_image_rows(image_rows, pitch, data, image, out_row, size);
        const int squares = (size.out_width + 1) / 2;
        for (int i = threadIdx.x / FILTER_VECTORS; i < OUT_ROWS / 2 * squares; i += THREADS / FILTER_VECTORS) {
            const int square_row = i / squares, square_column = i - square_row * squares;
            gradient.square(x, dz, winner, image, out_row / 2 + square_row, square_column, pool, FILTER_VECTORS, vector,
                            [=](int r, int c, bool inside, const Packed<T> &dy) {
                const int column = 2 * square_column + c;
                uint4 *to = shared + ((2 * square_row + r) * dy_pitch + column) * FILTER_VECTORS + (vector ^ (column % 8));
                *to = inside ? *reinterpret_cast<const uint4 *>(&dy) : make_uint4(0, 0, 0, 0);
            });
        }
        cp_async_wait<0>();
        __syncthreads();
        for (int i = 0; i < OUT_ROWS * tiles; ++i) {
            const int row = i / tiles, tile = i - row * tiles;
            uint32 a[2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m)
                ldmatrix_trans(a[m], dy_start + (row * dy_pitch + tile * 16) * FILTER_VECTORS * LANES + dy_vector[m]);
#pragma unroll
            for (int g = 0; g < GROUPS_OF_K; g += 2) {
                uint32 b[4];
                ldmatrix_trans(b, k_start[g / 2] + (2 * row * pitch + tile * 16) * LANES);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    multiply_add<T>(acc[m][g], a[m], b[0], b[1]);
                    if (g + 1 < GROUPS_OF_K) multiply_add<T>(acc[m][g + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    float *own = partials + size_t(blockIdx.x) * FILTERS * SIZE * ROW_OF_K;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int g = 0; g < GROUPS_OF_K; ++g) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int filter = half_of_filters * 32 + m * 16 + e / 2 * 8 + lane / 4;
                own[filter * SIZE * ROW_OF_K + (first_k + g) * 8 + lane % 4 * 2 + e % 2] = acc[m][g][e];
            }
        }
    }
}

// dw (FILTERS, 7, 7, 4) = the sum of the blocks' parts, in a fixed order; the padding tap is left out. A block has 32 values
// of k times 8 parts of the sum.
// Shapes: partials (blocks, K, 7 * ROW_OF_K) fp32, dw (K, 7, 7, 4).
template <class T>
__global__ void stem_wgrad_sum(const float *partials, T *dw, int blocks) {
    __shared__ float parts[8][WARP];
    const int at = blockIdx.x * ROW_OF_K + threadIdx.x;  // a kernel row of a filter has 32 values
    float total = 0;
#pragma unroll 8
    for (int block = threadIdx.y; block < blocks; block += 8) total += partials[size_t(block) * FILTERS * SIZE * ROW_OF_K + at];
    parts[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y != 0 || threadIdx.x < IMAGE_CHANNELS) return;
    for (int part = 1; part < 8; ++part) total += parts[part][threadIdx.x];
    dw[blockIdx.x * SIZE * IMAGE_CHANNELS + threadIdx.x - IMAGE_CHANNELS] = from_float<T>(total);
}
