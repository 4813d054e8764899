// Products of small matrices by single warps. PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix".
#pragma once
#include "common.cuh"

// Four 8x8 matrices; each thread gives the address of one row: threads 0 to 7 of the first, 8 to 15 of the second ...
__device__ inline void load_matrices(uint32 (&m)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
__device__ inline void load_transposed(uint32 (&m)[4], uint32 address) {
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
