// Matrix products of Hopper's tensor cores, which a group of four warps starts and which read both operands from shared
// memory by themselves. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
//
// Every operand is made of tiles with rows of 64 elements (128 bytes) of which 8 vectors of 8; the vector `v` of row `r` lies
// at r * 8 + (v ^ r % 8), which is the layout with 128-byte swizzle. Tiles start at multiples of 1024 bytes.
#pragma once
#include "common.cuh"

// Copies to shared memory that nobody waits for; zeros where `there` is false.
__device__ inline void copy_ahead(uint4 *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(uint32(__cvta_generic_to_shared(to))), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ inline void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `OPEN` of the groups of copies that this thread has closed are under way.
template <int OPEN> __device__ inline void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(OPEN) : "memory"); }

__device__ inline int swizzled(int row, int vector) { return row * 8 + (vector ^ row % 8); }

// A tile, or the rows or columns from `at` on, as the tensor cores are told of it. Groups of 8 rows are 1024 bytes apart.
__device__ inline uint64 matrix(const uint4 *at) {
    return (__cvta_generic_to_shared(at) & 0x3ffff) >> 4 | 64ull << 16 | 64ull << 32 | 1ull << 62;
}

// What this thread wrote to shared memory is seen by products that are started after the next barrier.
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before the first of a series of products, and after its last.
__device__ inline void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ inline void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// c += a * b. c has 64 rows, of which a warp has 16; `c[j]` is what it is for `mma.m16n8k16` of columns 8j to 8j + 7.
// `multiply_rows`: a is (64, 16) with rows of k, b is (32, 16) likewise. `multiply_columns`: a is (16, 64), b is (16, 64):
// the rows are k.
#define MULTIPLY(TYPE)                                                                                                       \
    __device__ inline void multiply_rows(float (&c)[4][4], uint64 a, uint64 b, TYPE) {                                       \
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." PTX_##TYPE "." PTX_##TYPE                                 \
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, 0, 0;"                    \
                     : SIXTEEN(c, 0) : "l"(a), "l"(b));                                                                      \
    }                                                                                                                        \
    __device__ inline void multiply_columns(float (&c)[8][4], uint64 a, uint64 b, TYPE) {                                    \
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." PTX_##TYPE "." PTX_##TYPE                                 \
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"  \
                     "%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 1, 1;"                                                        \
                     : SIXTEEN(c, 0), SIXTEEN(c, 4) : "l"(a), "l"(b));                                                       \
    }
#define FOUR(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define SIXTEEN(c, j) FOUR(c, j), FOUR(c, j + 1), FOUR(c, j + 2), FOUR(c, j + 3)
#define PTX_half "f16"
#define PTX_bfloat16 "bf16"
MULTIPLY(half)
MULTIPLY(bfloat16)
