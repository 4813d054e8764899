// Hopper's asynchronous matrix products (wgmma). A warpgroup of four warps starts them, and the tensor cores read both
// operands from shared memory. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
//
// Operands are tiles in the 128-byte swizzled layout: a row has 64 elements, which are 128 bytes or 8 vectors of 16 bytes.
// Vector `v` of row `r` lies at index r * 8 + (v ^ r % 8). Tiles start at multiples of 1024 bytes.
//
// K-major: neighbouring elements of a row have neighbouring k. MN-major: the rows of the tile are k.
#pragma once
#include "common.cuh"

constexpr int TEAM_WARPS = 4;  // a team is a warpgroup

// Starts an asynchronous 16-byte copy to shared memory; writes zeros where `there` is false.
__device__ inline void cp_async_zfill(uint4 *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(uint32(__cvta_generic_to_shared(to))), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `PENDING` of this thread's committed cp.async groups are still running.
template <int PENDING> __device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

__device__ inline int swizzled(int row, int vector) { return row * 8 + (vector ^ row % 8); }

// Descriptor of a tile, or of its rows or columns from `at` on. Groups of 8 rows are 1024 bytes apart. The swizzle is a
// function of the address, so the operand may start at any row.
__device__ inline uint64 smem_desc(const uint4 *at) {
    return (__cvta_generic_to_shared(at) & 0x3ffff) >> 4 | 64ull << 16 | 64ull << 32 | 1ull << 62;
}

// Descriptor of an MN-major operand that spans several adjacent tiles of 64 rows (k) and 64 columns: its columns continue in
// the next tile.
__device__ inline uint64 smem_desc_mn(const uint4 *at) {
    return (__cvta_generic_to_shared(at) & 0x3ffff) >> 4 | 512ull << 16 | 64ull << 32 | 1ull << 62;
}

// Descriptor of an MN-major operand whose 64-column groups overlap: each group starts one row after the previous group.
// The groups are the columns of a pixel and of its right neighbours. The swizzle is a function of the address, so the
// first group may start at any row.
__device__ inline uint64 smem_desc_mn_windows(const uint4 *at) {
    return (__cvta_generic_to_shared(at) & 0x3ffff) >> 4 | 8ull << 16 | 64ull << 32 | 1ull << 62;
}

// Descriptor of a K-major operand whose rows overlap, without swizzle: each row starts 16 bytes after the previous row.
// The rows are windows that lie two 8-byte pixels apart. Groups of 8 elements of k are 16 bytes apart; groups of 8 rows
// are 128 bytes apart.
__device__ inline uint64 smem_desc_windows(const uint4 *at) {
    return (__cvta_generic_to_shared(at) & 0x3ffff) >> 4 | 1ull << 16 | 8ull << 32;
}

// Descriptor of the windows of `smem_desc_windows` as an MN-major operand. Row k is 8 neighbouring elements of a
// window; row k + 1 is the corresponding elements of the next window, 16 bytes later. Groups of 8 rows are 128 bytes
// apart; groups of 8 columns are `pitch` vectors apart.
__device__ inline uint64 smem_desc_windows_mn(const uint4 *at, int pitch) {
    return (__cvta_generic_to_shared(at) & 0x3ffff) >> 4 | 8ull << 16 | uint64(pitch) << 32;
}

// Makes this thread's writes to shared memory visible to wgmma. A barrier must follow before the wgmma starts.
__device__ inline void fence_view_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Call wgmma_fence before the first wgmma of a group, and wgmma_commit after the last.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `PENDING` of this warpgroup's committed groups of wgmma are still running.
template <int PENDING = 0> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}
// Sets the registers per thread of the warpgroup, a multiple of 8. setmaxnreg_inc waits until other warpgroups have
// released enough registers, because the block's total number cannot grow.
template <int REGISTERS> __device__ inline void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS> __device__ inline void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

// --- accumulator fragments of a thread ---

template <class T> __device__ inline float2 unpack_two(uint32 bits) {
    const T *two = reinterpret_cast<const T *>(&bits);
    return make_float2(to_float(two[0]), to_float(two[1]));
}
template <class T> __device__ inline uint32 pack_two(float first, float second) {
    uint32 bits;
    from_floats(first, second, reinterpret_cast<T *>(&bits));
    return bits;
}

// One step of a reduce-scatter over lanes `DISTANCE` apart. Each thread keeps half of its 2 * HALF values and adds its
// partner's values of that half.
template <int HALF, int DISTANCE, int N> __device__ inline void reduce_scatter(float (&v)[N], int lane) {
    const bool upper = lane & DISTANCE;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float kept = upper ? v[HALF + i] : v[i], given = upper ? v[i] : v[HALF + i];
        v[i] = kept + __shfl_xor_sync(0xffffffff, given, DISTANCE);
    }
}

__device__ inline float relu(float v) {
    asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(v));  // propagates NaN
    return v;
}

// relu(x * scale + shift) of a vector: BatchNorm + ReLU of its 8 channels.
template <class T>
__device__ inline uint4 norm_relu(const uint4 &x, const float (&scale)[VEC], const float (&shift)[VEC]) {
    float v[VEC];
    unpack(packed<T>(x), v);
#pragma unroll
    for (int k = 0; k < VEC; ++k) v[k] = relu(v[k] * scale[k] + shift[k]);
    return words(pack<T>(v));
}

// Loads or stores four 8x8 matrices, or two, transposed. Each lane gives the address of one row; with two matrices only the
// first 16 lanes do.
__device__ inline void ldmatrix_trans(uint32 (&m)[4], const uint4 *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(uint32(__cvta_generic_to_shared(at))) : "memory");
}
__device__ inline void ldmatrix_trans(uint32 (&m)[2], const uint4 *at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(m[0]), "=r"(m[1]) : "r"(uint32(__cvta_generic_to_shared(at))) : "memory");
}
__device__ inline void stmatrix_trans(uint4 *at, const uint32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(uint32(__cvta_generic_to_shared(at))), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}
__device__ inline void stmatrix_trans(uint4 *at, const uint32 (&m)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};"
                 :: "r"(uint32(__cvta_generic_to_shared(at))), "r"(m[0]), "r"(m[1]) : "memory");
}

// --- wgmma ---

#define FOUR(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
// Keeps the compiler from touching `c` before this point.
template <int N> __device__ inline void wgmma_fence_operand(float (&c)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; ++j) asm volatile("" : FOUR(c, j) :: "memory");
}

// c += a * b, both operands in shared memory. c has 64 rows; a warp holds 16 of them. `c[j]` is the `mma.m16n8k16`
// accumulator of columns 8j to 8j + 7. The names tell the major-ness of a and b:
//   wgmma_k_k    a (64, 16), b (32, 64, 128, 232 or 256 columns of c, 16)
//   wgmma_mn_mn  a (16, 64), b (16, 64)
//   wgmma_mn_k   a (16, 64), b (232, 16)
#define DEFINE_WGMMA(TYPE)                                                                                                    \
    __device__ inline void wgmma_k_k(float (&c)[4][4], uint64 a, uint64 b, TYPE) {                                            \
        asm volatile(WGMMA("32", TYPE) " {" REGISTERS_16 "}, %16, %17, 1, 1, 1, 0, 0;"                                        \
                     : SIXTEEN(c, 0) : "l"(a), "l"(b));                                                                       \
    }                                                                                                                         \
    __device__ inline void wgmma_k_k(float (&c)[8][4], uint64 a, uint64 b, TYPE) {                                            \
        asm volatile(WGMMA("64", TYPE) " {" REGISTERS_32 "}, %32, %33, 1, 1, 1, 0, 0;"                                        \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4) : "l"(a), "l"(b));                                                        \
    }                                                                                                                         \
    __device__ inline void wgmma_k_k(float (&c)[16][4], uint64 a, uint64 b, TYPE) {                                           \
        asm volatile(WGMMA("128", TYPE) " {" REGISTERS_64 "}, %64, %65, 1, 1, 1, 0, 0;"                                       \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4), SIXTEEN(c, 8), SIXTEEN(c, 12) : "l"(a), "l"(b));                         \
    }                                                                                                                         \
    __device__ inline void wgmma_k_k(float (&c)[32][4], uint64 a, uint64 b, TYPE) {                                           \
        asm volatile(WGMMA("256", TYPE) " {" REGISTERS_128 "}, %128, %129, 1, 1, 1, 0, 0;"                                    \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4), SIXTEEN(c, 8), SIXTEEN(c, 12), SIXTEEN(c, 16), SIXTEEN(c, 20),           \
                       SIXTEEN(c, 24), SIXTEEN(c, 28) : "l"(a), "l"(b));                                                      \
    }                                                                                                                         \
    __device__ inline void wgmma_k_k(float (&c)[29][4], uint64 a, uint64 b, TYPE) {                                           \
        asm volatile(WGMMA("232", TYPE) " {" REGISTERS_116 "}, %116, %117, 1, 1, 1, 0, 0;" : TWENTY_NINE_FOURS(c)             \
                     : "l"(a), "l"(b));                                                                                       \
    }                                                                                                                         \
    __device__ inline void wgmma_mn_k(float (&c)[29][4], uint64 a, uint64 b, TYPE) {                                          \
        asm volatile(WGMMA("232", TYPE) " {" REGISTERS_116 "}, %116, %117, 1, 1, 1, 1, 0;" : TWENTY_NINE_FOURS(c)             \
                     : "l"(a), "l"(b));                                                                                       \
    }                                                                                                                         \
    __device__ inline void wgmma_mn_mn(float (&c)[8][4], uint64 a, uint64 b, TYPE) {                                          \
        asm volatile(WGMMA("64", TYPE) " {" REGISTERS_32 "}, %32, %33, 1, 1, 1, 1, 1;"                                        \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4) : "l"(a), "l"(b));                                                        \
    }
// c += a * b with a (64, 16) in registers, in the `mma.m16n8k16` fragment layout: each warp has 16 rows. b is K-major: (64,
// 128 or 256, 16), or (112, 16) without swizzle (`smem_desc_windows`). The registers of a must not change before wgmma_wait.
#define DEFINE_WGMMA_RS(TYPE)                                                                                                 \
    __device__ inline void wgmma_k_k(float (&c)[8][4], const uint32 (&a)[4], uint64 b, TYPE) {                                \
        asm volatile(WGMMA("64", TYPE) " {" REGISTERS_32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"                             \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                    \
    }                                                                                                                         \
    __device__ inline void wgmma_k_k(float (&c)[14][4], const uint32 (&a)[4], uint64 b, TYPE) {                               \
        asm volatile(WGMMA("112", TYPE) " {" REGISTERS_56 "}, {%56,%57,%58,%59}, %60, 1, 1, 1, 0;"                            \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4), SIXTEEN(c, 8), FOUR(c, 12), FOUR(c, 13)                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                   \
    }                                                                                                                         \
    __device__ inline void wgmma_k_k(float (&c)[16][4], const uint32 (&a)[4], uint64 b, TYPE) {                               \
        asm volatile(WGMMA("128", TYPE) " {" REGISTERS_64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"                            \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4), SIXTEEN(c, 8), SIXTEEN(c, 12)                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                   \
    }                                                                                                                         \
    __device__ inline void wgmma_k_k(float (&c)[32][4], const uint32 (&a)[4], uint64 b, TYPE) {                               \
        asm volatile(WGMMA("256", TYPE) " {" REGISTERS_128 "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 0;"                      \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4), SIXTEEN(c, 8), SIXTEEN(c, 12), SIXTEEN(c, 16), SIXTEEN(c, 20),           \
                       SIXTEEN(c, 24), SIXTEEN(c, 28)                                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                   \
    }
// c += a * b with a in registers and b MN-major (16, 56): `smem_desc_windows_mn`.
#define DEFINE_WGMMA_RS_MN(TYPE)                                                                                              \
    __device__ inline void wgmma_mn_mn(float (&c)[7][4], const uint32 (&a)[4], uint64 b, TYPE) {                              \
        asm volatile(WGMMA("56", TYPE) " {" REGISTERS_28 "}, {%28,%29,%30,%31}, %32, 1, 1, 1, 1;"                             \
                     : FOUR(c, 0), FOUR(c, 1), FOUR(c, 2), FOUR(c, 3), FOUR(c, 4), FOUR(c, 5), FOUR(c, 6)                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                   \
    }
// c += a * b with a K-major and b MN-major: (16, 64) or (16, 128), with a in registers also (16, 256). `smem_desc_mn`
// describes b.
#define DEFINE_WGMMA_K_MN(TYPE)                                                                                               \
    __device__ inline void wgmma_k_mn(float (&c)[8][4], uint64 a, uint64 b, TYPE) {                                           \
        asm volatile(WGMMA("64", TYPE) " {" REGISTERS_32 "}, %32, %33, 1, 1, 1, 0, 1;"                                        \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4) : "l"(a), "l"(b));                                                        \
    }                                                                                                                         \
    __device__ inline void wgmma_k_mn(float (&c)[16][4], uint64 a, uint64 b, TYPE) {                                          \
        asm volatile(WGMMA("128", TYPE) " {" REGISTERS_64 "}, %64, %65, 1, 1, 1, 0, 1;"                                       \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4), SIXTEEN(c, 8), SIXTEEN(c, 12) : "l"(a), "l"(b));                         \
    }                                                                                                                         \
    __device__ inline void wgmma_k_mn(float (&c)[16][4], const uint32 (&a)[4], uint64 b, TYPE) {                              \
        asm volatile(WGMMA("128", TYPE) " {" REGISTERS_64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"                            \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4), SIXTEEN(c, 8), SIXTEEN(c, 12)                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                   \
    }                                                                                                                         \
    __device__ inline void wgmma_k_mn(float (&c)[32][4], const uint32 (&a)[4], uint64 b, TYPE) {                              \
        asm volatile(WGMMA("256", TYPE) " {" REGISTERS_128 "}, {%128,%129,%130,%131}, %132, 1, 1, 1, 1;"                      \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4), SIXTEEN(c, 8), SIXTEEN(c, 12), SIXTEEN(c, 16), SIXTEEN(c, 20),           \
                       SIXTEEN(c, 24), SIXTEEN(c, 28)                                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                   \
    }
// c += a * b with both MN-major, b (16, 128): `smem_desc_mn`.
#define DEFINE_WGMMA_MN_MN(TYPE)                                                                                              \
    __device__ inline void wgmma_mn_mn(float (&c)[16][4], uint64 a, uint64 b, TYPE) {                                         \
        asm volatile(WGMMA("128", TYPE) " {" REGISTERS_64 "}, %64, %65, 1, 1, 1, 1, 1;"                                       \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4), SIXTEEN(c, 8), SIXTEEN(c, 12) : "l"(a), "l"(b));                         \
    }
// c += a * b with both MN-major, b (16, 192): `smem_desc_mn_windows`.
#define DEFINE_WGMMA_MN_WINDOWS(TYPE)                                                                                         \
    __device__ inline void wgmma_mn_mn(float (&c)[24][4], uint64 a, uint64 b, TYPE) {                                         \
        asm volatile(WGMMA("192", TYPE) " {" REGISTERS_96 "}, %96, %97, 1, 1, 1, 1, 1;"                                       \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4), SIXTEEN(c, 8), SIXTEEN(c, 12), SIXTEEN(c, 16), SIXTEEN(c, 20)            \
                     : "l"(a), "l"(b));                                                                                       \
    }
#define WGMMA(COLUMNS, TYPE) "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." PTX_##TYPE "." PTX_##TYPE
#define REGISTERS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define REGISTERS_28 REGISTERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27"
#define REGISTERS_32 REGISTERS_16  \
    ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGISTERS_56 REGISTERS_32 \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55"
#define REGISTERS_64 REGISTERS_32 \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
    ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS_96 REGISTERS_64 \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
    ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define REGISTERS_104 REGISTERS_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define REGISTERS_112 REGISTERS_104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define REGISTERS_116 REGISTERS_112 ",%112,%113,%114,%115"
#define REGISTERS_120 REGISTERS_116 ",%116,%117,%118,%119"
#define REGISTERS_128 REGISTERS_120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define SIXTEEN(c, j) FOUR(c, j), FOUR(c, j + 1), FOUR(c, j + 2), FOUR(c, j + 3)
#define TWENTY_NINE_FOURS(c) SIXTEEN(c, 0), SIXTEEN(c, 4), SIXTEEN(c, 8), SIXTEEN(c, 12), SIXTEEN(c, 16), SIXTEEN(c, 20),     \
    SIXTEEN(c, 24), FOUR(c, 28)
#define PTX_half "f16"
#define PTX_bfloat16 "bf16"
DEFINE_WGMMA(half)
DEFINE_WGMMA(bfloat16)
DEFINE_WGMMA_RS(half)
DEFINE_WGMMA_RS(bfloat16)
DEFINE_WGMMA_RS_MN(half)
DEFINE_WGMMA_RS_MN(bfloat16)
DEFINE_WGMMA_K_MN(half)
DEFINE_WGMMA_K_MN(bfloat16)
DEFINE_WGMMA_MN_MN(half)
DEFINE_WGMMA_MN_MN(bfloat16)
DEFINE_WGMMA_MN_WINDOWS(half)
DEFINE_WGMMA_MN_WINDOWS(bfloat16)
