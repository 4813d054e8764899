// TMA, mbarriers and clusters of Hopper. One thread starts the copy of a whole tile between a tensor and shared memory. PTX
// ISA, "Data Movement and Conversion Instructions: Tensor copy" and "Parallel Synchronization: mbarrier".
#pragma once
#include "common.cuh"

// The tensor map (CUtensorMap): the layout of a tensor of lines, rows and columns, and the size of its tiles.
// `Gpu.tensor_map` makes tensor maps; a kernel takes a tensor map as a `const __grid_constant__` parameter. Tiles have
// the layout of warpgroup.cuh. Elements outside the tensor are read as zeros and not written.
struct alignas(64) TensorMap { uint64 words[16]; };

__device__ inline uint32 smem_address(const void *shared) { return uint32(__cvta_generic_to_shared(shared)); }

// --- mbarriers: a phase ends when `arrivals` threads have arrived and all expected bytes have come ---

__device__ inline void mbarrier_init(uint64 &barrier, uint32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(smem_address(&barrier)), "r"(arrivals) : "memory");
}
// Call after the last `mbarrier_init`, before the block's first barrier.
__device__ inline void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void arrive(uint64 &barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(smem_address(&barrier)) : "memory");
}
__device__ inline void arrive_expect_tx(uint64 &barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(smem_address(&barrier)), "r"(bytes) : "memory");
}
// Arrives once all cp.async copies that this thread has started are complete.
__device__ inline void cp_async_arrive_noinc(uint64 &barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(smem_address(&barrier)) : "memory");
}
// Waits until the phase with this parity has ended. The caller must have waited for the previous phase.
__device__ inline void mbarrier_wait(uint64 &barrier, uint32 parity) {
    uint32 ended;
    do {
        asm volatile("{\n\t.reg .pred ended;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, ended;\n\t}"
                     : "=r"(ended) : "r"(smem_address(&barrier)), "r"(parity) : "memory");
    } while (!ended);
}

// --- clusters: blocks that access each other's shared memory ---

__device__ inline int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Barrier of all threads of a cluster. A block must not exit before this barrier while other blocks access its shared
// memory.
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
// Arrives at the same mbarrier in the block of rank `block`. The arrival only tells that this thread has finished
// reading. It does not publish this thread's writes, because it would then wait for all writes.
__device__ inline void arrive_remote(int block, uint64 &barrier) {
    asm volatile("{\n\t.reg .b32 there;\n\t"
                 "mapa.shared::cluster.u32 there, %0, %1;\n\t"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}"
                 :: "r"(smem_address(&barrier)), "r"(block) : "memory");
}
// Cluster address of the same shared-memory location in the block of this rank.
__device__ inline uint32 cluster_address(const void *shared, uint32 rank) {
    uint32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem_address(shared)), "r"(rank));
    return there;
}
// Asynchronous store of 16 bytes to another block. The bytes count towards a phase of that block's `barrier`.
__device__ inline void st_async(uint32 to, const float (&v)[4], uint32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier) : "memory");
}
// Arrives at another block's `barrier`: after waiting for this barrier, the other block may overwrite the data that
// this thread has read.
__device__ inline void arrive_remote(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// --- copies ---

// Elects one thread of a converged warp. If the thread is chosen by its number instead, the compiler turns each copy into a
// loop over the warp's threads, with twice as many instructions.
__device__ inline bool elect_one() {
    uint32 is;
    asm volatile("{\n\t.reg .pred is;\n\t"
                 "elect.sync _|is, 0xffffffff;\n\t"
                 "selp.u32 %0, 1, 0, is;\n\t}"
                 : "=r"(is));
    return is;
}

__device__ inline void prefetch_tensormap(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}
// Starts the load of the tile at these coordinates. The bytes count towards a phase of `barrier`.
__device__ inline void tma_load(uint4 *to, const TensorMap &map, int column, int row, int line, uint64 &barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(smem_address(to)), "l"(&map), "r"(column), "r"(row), "r"(line), "r"(smem_address(&barrier)) : "memory");
}
// Loads the tile to the same address in all BLOCKS of a cluster (multicast). In each block the bytes count towards a phase of
// its own barrier.
template <int BLOCKS>
__device__ inline void tma_load_multicast(uint4 *to, const TensorMap &map, int column, int row, int line, uint64 &barrier) {
    if constexpr (BLOCKS == 1)
        tma_load(to, map, column, row, line, barrier);
    else
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                     "[%1, {%2, %3, %4}], [%5], %6;"
                     :: "r"(smem_address(to)), "l"(&map), "r"(column), "r"(row), "r"(line), "r"(smem_address(&barrier)),
                        "h"((unsigned short)((1 << BLOCKS) - 1)) : "memory");
}
// Loads of tiles from tensors with 4 dimensions (with layers of lines) and with 5 (several such tensors).
__device__ inline void tma_load(uint4 *to, const TensorMap &map, int column, int row, int line, int layer, uint64 &barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
                 "[%6];"
                 :: "r"(smem_address(to)), "l"(&map), "r"(column), "r"(row), "r"(line), "r"(layer), "r"(smem_address(&barrier))
                 : "memory");
}
__device__ inline void tma_load(uint4 *to, const TensorMap &map, int column, int row, int line, int layer, int tensor,
                                uint64 &barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
                 :: "r"(smem_address(to)), "l"(&map), "r"(column), "r"(row), "r"(line), "r"(layer), "r"(tensor),
                    "r"(smem_address(&barrier)) : "memory");
}
// Multicast of a 4-dimensional tile to all BLOCKS of a cluster.
template <int BLOCKS>
__device__ inline void tma_load_multicast(uint4 *to, const TensorMap &map, int column, int row, int line, int layer,
                                          uint64 &barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                 :: "r"(smem_address(to)), "l"(&map), "r"(column), "r"(row), "r"(line), "r"(layer), "r"(smem_address(&barrier)),
                    "h"((unsigned short)((1 << BLOCKS) - 1)) : "memory");
}
// Loads `bytes` contiguous bytes; size and addresses are multiples of 16.
__device__ inline void tma_load_bulk(void *to, const void *from, uint32 bytes, uint64 &barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(smem_address(to)), "l"(from), "r"(bytes), "r"(smem_address(&barrier)) : "memory");
}
// Starts the store of a tile. Threads that wrote the tile must have called `tma_store_fence` and then a barrier with this
// thread.
__device__ inline void tma_store(const TensorMap &map, int column, int row, int line, const uint4 *from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n\t"
                 "cp.async.bulk.commit_group;"
                 :: "l"(&map), "r"(column), "r"(row), "r"(line), "r"(smem_address(from)) : "memory");
}
__device__ inline void tma_store(const TensorMap &map, int column, int row, int line, int layer, const uint4 *from) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n\t"
                 "cp.async.bulk.commit_group;"
                 :: "l"(&map), "r"(column), "r"(row), "r"(line), "r"(layer), "r"(smem_address(from)) : "memory");
}
__device__ inline void tma_store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Waits until all but the last `PENDING` stores of this thread have finished reading shared memory.
template <int PENDING> __device__ inline void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory");
}
