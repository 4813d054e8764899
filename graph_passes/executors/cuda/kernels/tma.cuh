// Hopper's copy engine (TMA): one thread starts copies of whole tiles between a tensor and shared memory. PTX ISA, "Data
// Movement and Conversion Instructions: Tensor copy" and "Parallel Synchronization: mbarrier".
#pragma once
#include "common.cuh"

// How a tensor of lines, rows and columns lies in memory, and the size of a tile of it: made by `Gpu.tensor_map`. A kernel has
// it as a parameter that is `const __grid_constant__`. Tiles lie in shared memory as warpgroup.cuh says; what is outside of the
// tensor is read as zeros, and not written.
struct alignas(64) TensorMap { uint64 words[16]; };

__device__ inline uint32 smem_address(const void *shared) { return uint32(__cvta_generic_to_shared(shared)); }

// --- barriers in shared memory: a phase ends when `arrivals` threads have arrived and all bytes expected have come ---

__device__ inline void mbarrier_init(uint64 &barrier, uint32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(smem_address(&barrier)), "r"(arrivals) : "memory");
}
// After the last `mbarrier_init` and before a barrier of the block.
__device__ inline void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void arrive(uint64 &barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(smem_address(&barrier)) : "memory");
}
__device__ inline void arrive_expect_tx(uint64 &barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(smem_address(&barrier)), "r"(bytes) : "memory");
}
// Once all copies of 16 bytes that this thread has started are there.
__device__ inline void cp_async_arrive_noinc(uint64 &barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(smem_address(&barrier)) : "memory");
}
// Until the phase of this parity has ended. Who waits must have seen the phase before it end.
__device__ inline void mbarrier_wait(uint64 &barrier, uint32 parity) {
    uint32 ended;
    do {
        asm volatile("{\n\t.reg .pred ended;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, ended;\n\t}"
                     : "=r"(ended) : "r"(smem_address(&barrier)), "r"(parity) : "memory");
    } while (!ended);
}

// Places that are used in turn, each with a barrier of its own: where we are, and the parity of the phase there.
struct PipelineState {
    int index = 0;
    uint32 phase = 0;

    __device__ void advance(int stages) {
        if (++index == stages) {
            index = 0;
            phase ^= 1;
        }
    }
};

// Of a tile of a 1x1 convolution: how many rows it has, and from one to the next the steps in rows and lines, of x and of y.
struct TileStep { int rows, x_row, x_line, y_row, y_line; };

// --- clusters of blocks, which reach into each other's shared memory ---

__device__ inline int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of a cluster. Until then a block's shared memory stays.
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
// At the barrier that has this place in another block. It tells that this thread has read, not what it has written: that would
// wait for all its writes.
__device__ inline void arrive_remote(int block, uint64 &barrier) {
    asm volatile("{\n\t.reg .b32 there;\n\t"
                 "mapa.shared::cluster.u32 there, %0, %1;\n\t"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}"
                 :: "r"(smem_address(&barrier)), "r"(block) : "memory");
}
// Where the block of this rank has what lies here in our shared memory.
__device__ inline uint32 cluster_address(const void *shared, uint32 rank) {
    uint32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem_address(shared)), "r"(rank));
    return there;
}
// Asynchronous; the bytes end a phase of `barrier`, which is there too.
__device__ inline void st_async(uint32 to, const float (&v)[4], uint32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier) : "memory");
}
// What this thread has read the other block may write over when it has waited for `barrier`, which is there.
__device__ inline void arrive_remote(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// --- copies ---

// One thread of a warp, all of which come here. Where the thread is chosen by its number, the compiler makes a loop over the warp's
// threads of each copy, with twice as many instructions.
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
// The tile that starts at this place; its bytes end a phase of `barrier`.
__device__ inline void tma_load(uint4 *to, const TensorMap &map, int column, int row, int line, uint64 &barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(smem_address(to)), "l"(&map), "r"(column), "r"(row), "r"(line), "r"(smem_address(&barrier)) : "memory");
}
// The same to this place in all BLOCKS of a cluster, in each of which its bytes end a phase of the barrier there.
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
// Of a tensor of layers of lines, and of several of these.
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
// The same in all BLOCKS of a cluster.
template <int BLOCKS>
__device__ inline void tma_load_multicast(uint4 *to, const TensorMap &map, int column, int row, int line, int layer,
                                          uint64 &barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                 :: "r"(smem_address(to)), "l"(&map), "r"(column), "r"(row), "r"(line), "r"(layer), "r"(smem_address(&barrier)),
                    "h"((unsigned short)((1 << BLOCKS) - 1)) : "memory");
}
// Bytes that follow each other; `bytes` and both places are multiples of 16.
__device__ inline void tma_load_bulk(void *to, const void *from, uint32 bytes, uint64 &barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(smem_address(to)), "l"(from), "r"(bytes), "r"(smem_address(&barrier)) : "memory");
}
// What other threads wrote there must have been shown (`tma_store_fence`) before they met this one.
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
// Until all but the last `OPEN` stores of this thread have read shared memory.
template <int PENDING> __device__ inline void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory");
}
