// Integer products on tensor cores, and the epilogue: shared by the INT8 convolutions.
//
//     accumulator[row, k] = bias[k] + sum over tap, c of x[pixel(row, tap), c] * weight[k, tap, c]
#pragma once
#include "quantised.cuh"
#include "warpgroup.cuh"

constexpr int VECTOR = 16;  // channels of 16 bytes

// Like `cp_async_zfill`, but through the L1 cache, in which the taps of a window find most pixels.
__device__ inline void cp_async_zfill_l1(uint4 *to, const void *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;"
                 :: "r"(uint32(__cvta_generic_to_shared(to))), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Groups of integer products of tiles in the layout of warpgroup.cuh. On Hopper these are wgmma instructions:
// asynchronous, with operands in shared memory. On other GPUs (sm_80 and newer) each warp loads its operands and
// multiplies immediately.
//
// `int8_mma`: c += a * b, exact. a is (64, 32) and b (columns, 32), both K-major; c[j] is laid out as in warpgroup.cuh.
#define INTEGERS(c, j) "+r"(c[j][0]), "+r"(c[j][1]), "+r"(c[j][2]), "+r"(c[j][3])
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ inline void int8_fence_view_async_shared() { fence_view_async_shared(); }
__device__ inline void int8_mma_fence() { wgmma_fence(); }
__device__ inline void int8_mma_commit() { wgmma_commit(); }
template <int PENDING = 0> __device__ inline void int8_mma_wait() { wgmma_wait<PENDING>(); }

#define INTEGERS_4(c, j) INTEGERS(c, j), INTEGERS(c, j + 1), INTEGERS(c, j + 2), INTEGERS(c, j + 3)
#define INTEGERS_16(c, j) INTEGERS_4(c, j), INTEGERS_4(c, j + 4), INTEGERS_4(c, j + 8), INTEGERS_4(c, j + 12)

__device__ inline void int8_mma(int (&c)[8][4], uint64 a, uint64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
                 "%28,%29,%30,%31}, %32, %33, 1;"
                 : INTEGERS_4(c, 0), INTEGERS_4(c, 4) : "l"(a), "l"(b));
}
__device__ inline void int8_mma(int (&c)[16][4], uint64 a, uint64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
                 "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"
                 "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, 1;"
                 : INTEGERS_16(c, 0) : "l"(a), "l"(b));
}
__device__ inline void int8_mma(int (&c)[32][4], uint64 a, uint64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
                 "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"
                 "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
                 "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,"
                 "%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,"
                 "%124,%125,%126,%127}, %128, %129, 1;"
                 : INTEGERS_16(c, 0), INTEGERS_16(c, 16) : "l"(a), "l"(b));
}
__device__ inline void int8_mma(int (&c)[14][4], uint64 a, uint64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n112k32.s32.s8.s8 {" REGISTERS_56 "}, %56, %57, 1;"
                 : INTEGERS_4(c, 0), INTEGERS_4(c, 4), INTEGERS_4(c, 8), INTEGERS(c, 12), INTEGERS(c, 13) : "l"(a), "l"(b));
}
__device__ inline void int8_mma(int (&c)[24][4], uint64 a, uint64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n192k32.s32.s8.s8 {" REGISTERS_96 "}, %96, %97, 1;"
                 : INTEGERS_16(c, 0), INTEGERS_4(c, 16), INTEGERS_4(c, 20) : "l"(a), "l"(b));
}
__device__ inline void int8_mma(int (&c)[26][4], uint64 a, uint64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n208k32.s32.s8.s8 {" REGISTERS_104 "}, %104, %105, 1;"
                 : INTEGERS_16(c, 0), INTEGERS_4(c, 16), INTEGERS_4(c, 20), INTEGERS(c, 24), INTEGERS(c, 25) : "l"(a), "l"(b));
}
__device__ inline void int8_mma(int (&c)[28][4], uint64 a, uint64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n224k32.s32.s8.s8 {" REGISTERS_112 "}, %112, %113, 1;"
                 : INTEGERS_16(c, 0), INTEGERS_4(c, 16), INTEGERS_4(c, 20), INTEGERS_4(c, 24) : "l"(a), "l"(b));
}
__device__ inline void int8_mma(int (&c)[30][4], uint64 a, uint64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n240k32.s32.s8.s8 {" REGISTERS_120 "}, %120, %121, 1;"
                 : INTEGERS_16(c, 0), INTEGERS_4(c, 16), INTEGERS_4(c, 20), INTEGERS_4(c, 24), INTEGERS(c, 28), INTEGERS(c, 29)
                 : "l"(a), "l"(b));
}
// c += a * b with a (64, 32) in registers, in the `mma.m16n8k32` fragment layout: each warp has 16 rows. The registers of a
// must not change before int8_mma_wait.
__device__ inline void int8_mma(int (&c)[8][4], const uint32 (&a)[4], uint64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
                 "%29,%30,%31}, {%32,%33,%34,%35}, %36, 1;"
                 : INTEGERS_4(c, 0), INTEGERS_4(c, 4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ inline void int8_mma(int (&c)[16][4], const uint32 (&a)[4], uint64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
                 "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"
                 "%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1;"
                 : INTEGERS_16(c, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ inline void int8_mma(int (&c)[14][4], const uint32 (&a)[4], uint64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n112k32.s32.s8.s8 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,"
                 "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,"
                 "%54,%55}, {%56,%57,%58,%59}, %60, 1;"
                 : INTEGERS_4(c, 0), INTEGERS_4(c, 4), INTEGERS_4(c, 8), INTEGERS(c, 12), INTEGERS(c, 13)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <int EIGHTS> __device__ inline void int8_mma(int (&c)[EIGHTS][4], const uint4 *a, const uint4 *b) {
    int8_mma(c, smem_desc(a), smem_desc(b));
}
#else
__device__ inline void int8_fence_view_async_shared() {}
__device__ inline void int8_mma_fence() {}
__device__ inline void int8_mma_commit() {}
template <int PENDING = 0> __device__ inline void int8_mma_wait() {}

// Loads 4 bytes of a tile's row, from byte `k` on. The 128-byte swizzle is a function of the address.
__device__ inline uint32 word_of(const uint4 *at, int row, int k) {
    const uint64 address = reinterpret_cast<uint64>(at) + row * 128 + k;
    return *reinterpret_cast<const uint32 *>(address ^ (address >> 7 & 7) << 4);
}
template <int EIGHTS> __device__ inline void int8_mma(int (&c)[EIGHTS][4], const uint4 *a, const uint4 *b) {
    const int lane = threadIdx.x % WARP, row = threadIdx.x / WARP % 4 * 16 + lane / 4, k = lane % 4 * 4;
    const uint32 a0 = word_of(a, row, k), a1 = word_of(a, row + 8, k);
    const uint32 a2 = word_of(a, row, k + 16), a3 = word_of(a, row + 8, k + 16);
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j)
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : INTEGERS(c, j)
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(word_of(b, 8 * j + lane / 4, k)),
                       "r"(word_of(b, 8 * j + lane / 4, k + 16)));
}
#endif

// Keeps the compiler from touching `c` before this point.
template <int EIGHTS> __device__ inline void int8_mma_fence_operand(int (&c)[EIGHTS][4]) {
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) asm volatile("" : INTEGERS(c, j) :: "memory");
}

// The filter that belongs to a column of the accumulators. Among 64 columns, thread t of a quad has columns 2t and 2t + 1 of
// each 8: these are 16 neighbouring filters, so that the thread stores 16 bytes.
__device__ inline int filter_of(int column) {
    return column / 64 * 64 + column % 8 / 2 * VECTOR + column % 64 / 8 * 2 + column % 2;
}

// The epilogue of a thread's rows: requantises, adds a shortcut, applies ReLU and stores. A thread has two of a
// warpgroup's 64 rows, which are 8 apart, and 16 neighbouring columns of each 64 columns.
// Shapes: multiplier (K) fp32; bias (K) int32; addend (rows, K) int8; y (rows, K), int8 or of the type T. filters = K.
template <class T, int COLUMNS, bool ADD, bool RELU> struct Results {
    static constexpr int SPANS = COLUMNS / 64;
    const float *multiplier;
    const int *bias;
    T *y;
    float addend_share;
    int filters, first;  // first: first column of this thread
    uint32 row[2];
    bool there[2];
    uint4 added[ADD ? SPANS : 1][2];

    // Called before the products, so that these loads overlap with the products.
    __device__ void load_addends(const uint4 *addend) {
#pragma unroll
        for (int span = 0; span < SPANS; ++span)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (ADD && there[r] && first + span * 64 < filters)
                    added[span][r] = addend[(row[r] * size_t(filters) + first + span * 64) / VECTOR];
    }

    // Initialises the accumulators with the bias.
    __device__ void start(int (&products)[COLUMNS / 8][4]) const {
#pragma unroll
        for (int span = 0; span < SPANS; ++span)
#pragma unroll
            for (int k = 0; k < VECTOR; k += 4) {
                const int column = first + span * 64;
                const int4 b = column < filters ? *reinterpret_cast<const int4 *>(bias + column + k) : int4{};
                int(&left)[4] = products[span * 8 + k / 2], (&right)[4] = products[span * 8 + k / 2 + 1];
                left[0] = left[2] = b.x, left[1] = left[3] = b.y;
                right[0] = right[2] = b.z, right[1] = right[3] = b.w;
            }
    }

    __device__ void store(const int (&products)[COLUMNS / 8][4]) const {
#pragma unroll
        for (int span = 0; span < SPANS; ++span) {
            const int column = first + span * 64;
            if (column >= filters) continue;
            float scale[VECTOR / 4][4];
#pragma unroll
            for (int i = 0; i < VECTOR / 4; ++i)
                *reinterpret_cast<float4 *>(scale[i]) = *reinterpret_cast<const float4 *>(multiplier + column + 4 * i);
            if constexpr (sizeof(T) == 1) {
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) scale[i / 4][i % 4] = Bytes<RELU>::scale(scale[i / 4][i % 4]);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (!there[r]) continue;
                struct alignas(16) { T element[VECTOR]; } out;
                const uint32 *words = reinterpret_cast<const uint32 *>(&added[ADD ? span : 0][r]);
#pragma unroll
                for (int i = 0; i < VECTOR / 4; ++i) {
                    const int(&left)[4] = products[span * 8 + i * 2], (&right)[4] = products[span * 8 + i * 2 + 1];
                    const int sums[4] = {left[r * 2], left[r * 2 + 1], right[r * 2], right[r * 2 + 1]};
                    if constexpr (sizeof(T) == 1) {
                        reinterpret_cast<uint32 *>(&out)[i] =
                            Bytes<RELU>::template of<ADD>(sums, scale[i], ADD ? words[i] : 0, addend_share);
                    } else {
#pragma unroll
                        for (int k = 0; k < 4; ++k)
                            out.element[i * 4 + k] = result<T>(requantised<ADD, RELU>(
                                sums[k], scale[i][k], ADD ? byte_of(words[i], k) : 0, addend_share));
                    }
                }
                uint4 *to = reinterpret_cast<uint4 *>(y + row[r] * size_t(filters) + column);
#pragma unroll
                for (int i = 0; i < int(sizeof(out) / 16); ++i) to[i] = reinterpret_cast<const uint4 *>(&out)[i];
            }
        }
    }
};
