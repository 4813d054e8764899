// Convolutions of few images, where what counts is how long one launch takes from its begin to its end: bias, a sum and ReLU in
// the epilogue, in 16-bit types, on GPUs with clusters of blocks (sm_90 and newer).
//
// A block makes a tile of ROWS x COLUMNS of the output. So that there are blocks for all multiprocessors, the SPLIT blocks of a
// cluster share the channels of one tile. Each starts to copy all that it will read at once, in PARTS that it multiplies as they
// come, and gives of its sums to every other block of the cluster the rows that this one finishes. Those are added in the order
// of the blocks, so results are the same every time.
//
// Pixels are copied once for all taps of a window. To that end images lie behind each other in padded form, as far as a tile
// needs them: their places are numbered through, padding is zeros, and a tap is a distance in places.
#include "matrices.cuh"
#include "warpgroup.cuh"

constexpr int THREADS = 256, MULTIPLYING = 4;  // warps that multiply; all copy and finish
constexpr int PARTS = 4;
constexpr int CHUNK_VECTORS = 4;  // of the channels, that are copied and multiplied at once for each tap: a `unit`
constexpr int COPIED = THREADS / CHUNK_VECTORS;  // rows of a chunk that all threads copy at once
constexpr int ROW_BYTES = 16 * CHUNK_VECTORS;

// Places, pixels and channels of a convolution; vectors are of 8 channels.
struct SmallConvolution {
    uint32 rows;  // N * OH * OW
    int out_height, out_width, filters, vectors;
    int height, width, pad_h, pad_w;    // of a padded image, in places
    int inside_h, inside_w;             // of the image in it
    int pixel, line, image;             // vectors of x from one to the next
    int stride_h, stride_w;             // places between neighbouring rows of the output
    int taps, kernel_w, step_h, step_w; // of a window; places between neighbouring taps
    int chunks, places;                 // of all channels; of a tile, at most
    int relu;

    // Of the first tap of a row of the output.
    __device__ int place(uint32 row) const {
        const int line = row / out_width, column = row % out_width;
        return (line / out_height * height + line % out_height * stride_h) * width + column * stride_w;
    }
};

// Where a vector of a chunk lies, in vectors: `ldmatrix` finds 8 rows that follow each other in all banks of shared memory.
__device__ inline int of_chunk(int row, int vector) { return row * CHUNK_VECTORS + (vector ^ row / 2 % CHUNK_VECTORS); }
__device__ inline uint32 shared_address(const void *at) { return uint32(__cvta_generic_to_shared(at)); }

// All blocks of a cluster have arrived; what they wrote before can be seen. Every thread must call both.
template <int SPLIT> __device__ inline void arrive_in_cluster() {
    if (SPLIT > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
template <int SPLIT> __device__ inline void wait_for_cluster() {
    if (SPLIT > 1)
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    else
        __syncthreads();
}
// The same place in the shared memory of another block of the cluster, and two floats for there.
__device__ inline uint32 address_in_block(uint32 address, int block) {
    uint32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}
__device__ inline void store_there(uint32 address, float first, float second) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" :: "r"(address), "f"(first), "f"(second) : "memory");
}

// Copies chunks of the pixels of a tile, `places` from `start` on. A thread copies one vector of every COPIED-th place.
struct Pixels {
    const uint4 *x;
    uint4 *to;
    int first_chunk, places;
    int image, line, column;  // of the first place, in padded images

    __device__ Pixels(const SmallConvolution &c, const uint4 *x, uint4 *to, int first_chunk, int start, int end)
        : x(x), to(to), first_chunk(first_chunk), places(end - start) {
        const int place = start + threadIdx.x / CHUNK_VECTORS;
        image = place / c.width / c.height;
        line = place / c.width % c.height;
        column = place % c.width;
    }

    __device__ void copy(const SmallConvolution &c, int chunk) const {
        const int vector = threadIdx.x % CHUNK_VECTORS, channel = (first_chunk + chunk) * CHUNK_VECTORS + vector;
        int n = image, h = line, w = column;
        for (int place = threadIdx.x / CHUNK_VECTORS; place < places; place += COPIED) {
            const int y = h - c.pad_h, column_of_x = w - c.pad_w;
            const bool there = channel < c.vectors && uint32(y) < uint32(c.inside_h) && uint32(column_of_x) < uint32(c.inside_w);
            const int from = n * c.image + y * c.line + column_of_x * c.pixel + channel;
            copy_ahead(to + chunk * c.places * CHUNK_VECTORS + of_chunk(place, vector), x + (there ? from : 0), there);
            for (w += COPIED; w >= c.width; w -= c.width)
                if (++h == c.height) {
                    h = 0;
                    ++n;
                }
        }
    }
};

// Copies the weights of COLUMNS filters, unit after unit: all taps of a chunk, then those of the next. A thread copies one
// vector of every AT_ONCE-th unit.
template <int COLUMNS> struct Weights {
    static constexpr int AT_ONCE = COPIED / COLUMNS, UNIT = COLUMNS * CHUNK_VECTORS;
    const uint4 *from;
    uint4 *to;
    int unit, tap, channel;
    bool there;

    __device__ Weights(const SmallConvolution &c, const uint4 *weight, uint4 *to, int first_chunk, int first_column)
        : to(to), unit(threadIdx.x / UNIT), tap(unit) {
        const int vector = threadIdx.x % CHUNK_VECTORS, column = threadIdx.x / CHUNK_VECTORS % COLUMNS;
        there = first_column + column < c.filters;
        from = weight + (there ? (first_column + column) * c.taps * c.vectors : 0);
        this->to += of_chunk(column, vector);
        channel = first_chunk * CHUNK_VECTORS + vector;
    }

    // Those before unit `end` that have not been copied.
    __device__ void copy(const SmallConvolution &c, int end) {
        for (; unit < end; unit += AT_ONCE, tap += AT_ONCE) {
            for (; tap >= c.taps; tap -= c.taps) channel += CHUNK_VECTORS;
            const bool inside = there && channel < c.vectors;
            copy_ahead(to + unit * UNIT, from + (inside ? tap * c.vectors + channel : 0), inside);
        }
    }
};

// The products of a warp: 16 * M rows and 16 * N columns of a tile.
template <class T, int M, int N> struct Products {
    float sum[M][2 * N][4] = {};
    uint32 a[2][M][4], b[2][N][4];  // 16 channels each of two halves of a chunk
    uint32 pixels, weights;         // addresses: of the chunk, and of this thread's row in the unit
    int place[M];                   // this thread's row of `pixels`, of the first tap
    int tap = 0, tap_w = 0, step = 0;

    __device__ void load(int half) {
        const int vector = threadIdx.x % WARP / 16;
#pragma unroll
        for (int i = 0; i < M; ++i)
            load_matrices(a[half][i], pixels + 16 * of_chunk(place[i] + step, vector) ^ half * 32);
#pragma unroll
        for (int j = 0; j < N; ++j) load_matrices(b[half][j], weights + j * 16 * ROW_BYTES ^ half * 32);
    }
    __device__ void multiply(int half) {
#pragma unroll
        for (int i = 0; i < M; ++i)
#pragma unroll
            for (int j = 0; j < 2 * N; ++j)
                multiply_add<T>(sum[i][j], a[half][i], b[half][j / 2][j % 2 * 2], b[half][j / 2][j % 2 * 2 + 1]);
    }
    // To the next unit, of UNIT vectors.
    template <int UNIT> __device__ void advance(const SmallConvolution &c) {
        weights += 16 * UNIT;
        step += c.step_w;
        if (++tap_w == c.kernel_w) {
            tap_w = 0;
            step += c.step_h - c.kernel_w * c.step_w;
        }
        if (++tap == c.taps) {
            tap = step = 0;
            pixels += c.places * ROW_BYTES;
        }
    }
};

// Grid: SPLIT blocks for each COLUMNS filters, and ROWS rows. C and K are multiples of 8.
// Shapes: x (N, H, W, C), weight (K, kernel_h, kernel_w, C); bias (K) fp32; addend, y (rows, K); addend may be left out.
template <class T, int ROWS, int COLUMNS, int SPLIT>
__global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(THREADS, 2)
conv_small(const uint4 *x, const uint4 *weight, const float *bias, const uint4 *addend, uint4 *y, SmallConvolution c) {
    constexpr int M = ROWS / 32, N = COLUMNS / 32, OWN = ROWS / SPLIT, PITCH = COLUMNS + 8;  // PITCH: for all banks
    constexpr int VECTORS = COLUMNS / VEC, FINISHED = (OWN * VECTORS + THREADS - 1) / THREADS, UNIT = Weights<COLUMNS>::UNIT;
    extern __shared__ __align__(128) float memory[];  // sums (SPLIT, OWN, PITCH); the weights of all units; chunks of pixels
    arrive_in_cluster<SPLIT>();
    const int lane = threadIdx.x % WARP, warp = __shfl_sync(0xffffffff, threadIdx.x / WARP, 0);  // one for all, to the compiler
    const int block = blockIdx.x % SPLIT, first_column = blockIdx.x / SPLIT * COLUMNS;
    const uint32 first_row = blockIdx.y * ROWS, last_row = min(first_row + ROWS, c.rows) - 1;
    const int first_chunk = c.chunks * block / SPLIT, chunks = c.chunks * (block + 1) / SPLIT - first_chunk;
    const int units = chunks * c.taps, most_units = (c.chunks + SPLIT - 1) / SPLIT * c.taps;
    uint4 *const weight_vectors = reinterpret_cast<uint4 *>(memory + ROWS * PITCH);
    uint4 *const pixel_vectors = weight_vectors + most_units * UNIT;

    Weights<COLUMNS> weights(c, weight, weight_vectors, first_chunk, first_column);
    weights.copy(c, (units + PARTS - 1) / PARTS);  // before the divisions that places take
    const int start = c.place(first_row), of_window = (c.taps / c.kernel_w - 1) * c.step_h + (c.kernel_w - 1) * c.step_w;
    const Pixels pixels(c, x, pixel_vectors, first_chunk, start, c.place(last_row) + of_window + 1);
    for (int part = 1, chunk = 0; part <= PARTS; ++part) {
        const int end = units * part / PARTS;
        for (; chunk * c.taps < end; ++chunk) pixels.copy(c, chunk);
        weights.copy(c, end);
        close_copies();
    }

    // What this thread finishes: a vector of `FINISHED` rows.
    const int column = first_column + threadIdx.x % VECTORS * VEC;
    uint32 row[FINISHED];
    bool finishes[FINISHED];
    Packed<T> added[FINISHED];
    float shift[VEC] = {};
    if (column < c.filters) load_floats(bias + column, shift);
#pragma unroll
    for (int i = 0; i < FINISHED; ++i) {
        const int own = (threadIdx.x + i * THREADS) / VECTORS;
        row[i] = first_row + block * OWN + own;
        finishes[i] = own < OWN && row[i] < c.rows && column < c.filters;
        if (finishes[i] && addend) added[i] = load(reinterpret_cast<const T *>(addend) + row[i] * size_t(c.filters) + column);
    }

    // Two warps side by side, two below each other.
    const int tile_row = warp % 2 * 16 * M, tile_column = warp / 2 * 16 * N;
    Products<T, M, N> products;
#pragma unroll
    for (int i = 0; i < M; ++i)
        products.place[i] = c.place(min(first_row + tile_row + i * 16 + lane % 16, last_row)) - start;
    products.pixels = shared_address(pixel_vectors);
    products.weights = shared_address(weight_vectors + of_chunk(tile_column + lane / 16 * 8 + lane % 8, lane / 8 % 2));
    int unit = 0;
    const auto multiply_part = [&](int end) {
        __syncthreads();  // what all threads copied is there
        if (warp >= MULTIPLYING || unit == end) return;
        products.load(0);
        while (true) {
            products.load(1);
            products.multiply(0);
            products.template advance<UNIT>(c);
            const bool more = ++unit < end;
            if (more) products.load(0);
            products.multiply(1);
            if (!more) break;
        }
    };
    wait_for_copies<3>();
    multiply_part(units / PARTS);
    wait_for_copies<2>();
    multiply_part(units * 2 / PARTS);
    wait_for_copies<1>();
    multiply_part(units * 3 / PARTS);
    wait_for_copies<0>();
    multiply_part(units);

    if (SPLIT > 1) wait_for_cluster<SPLIT>();  // all blocks run, so their shared memory can be written
    if (warp < MULTIPLYING)
#pragma unroll
        for (int i = 0; i < 2 * M; ++i) {
            const int of_tile = tile_row + i * 8 + lane / 4;
            const int at = (block * OWN + of_tile % OWN) * PITCH + tile_column + lane % 4 * 2;
            const uint32 there = address_in_block(shared_address(memory + at), of_tile / OWN);
            if (first_row + of_tile > last_row) continue;
#pragma unroll
            for (int j = 0; j < 2 * N; ++j)
                store_there(there + j * 32, products.sum[i / 2][j][i % 2 * 2], products.sum[i / 2][j][i % 2 * 2 + 1]);
        }
    arrive_in_cluster<SPLIT>();
    wait_for_cluster<SPLIT>();

#pragma unroll
    for (int i = 0; i < FINISHED; ++i) {
        if (!finishes[i]) continue;
        const int at = (threadIdx.x + i * THREADS) / VECTORS * PITCH + threadIdx.x % VECTORS * VEC;
        float sum[VEC], v[VEC];
        load_floats(memory + at, sum);
#pragma unroll
        for (int other = 1; other < SPLIT; ++other) {
            load_floats(memory + other * OWN * PITCH + at, v);
#pragma unroll
            for (int k = 0; k < VEC; ++k) sum[k] += v[k];
        }
        if (addend) unpack(added[i], v);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            sum[k] += shift[k];
            if (addend) sum[k] += v[k];
            if (c.relu && sum[k] < 0) sum[k] = 0;  // NaN stays
        }
        store(reinterpret_cast<T *>(y) + row[i] * size_t(c.filters) + column, pack<T>(sum));
    }
}
