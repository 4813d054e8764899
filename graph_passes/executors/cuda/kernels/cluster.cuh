// Two blocks of a cluster, which reach each other's shared memory. PTX ISA, "Cluster of Cooperative Thread Arrays",
// "Instructions: mapa" and "Parallel Synchronization: mbarrier". A kernel of them has `__cluster_dims__(2, 1, 1)`.
#pragma once
#include "copy_engine.cuh"

// All threads of both blocks. What they did before is seen behind it.
__device__ inline void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
// Where the block of this rank has what lies here in our shared memory.
__device__ inline uint32 address_in(const void *shared, uint32 rank) {
    uint32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address_of(shared)), "r"(rank));
    return there;
}
// Asynchronous; the bytes end a phase of `barrier`, which is there too.
__device__ inline void store_there(uint32 to, const float (&v)[4], uint32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier) : "memory");
}
// What this thread has read the other block may write over when it has waited for `barrier`, which is there.
__device__ inline void arrive_there(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}
