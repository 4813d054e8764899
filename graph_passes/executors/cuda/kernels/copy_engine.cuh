// Hopper's copy engine (TMA): one thread starts copies of whole tiles between a tensor and shared memory. PTX ISA, "Data
// Movement and Conversion Instructions: Tensor copy" and "Parallel Synchronization: mbarrier".
#pragma once
#include "common.cuh"

// How a tensor of lines, rows and columns lies in memory, and the size of a tile of it: made by `Gpu.tensor_map`. A kernel has it as a parameter that is
// `const __grid_constant__`. Tiles lie in shared memory as warpgroup.cuh says; what is outside of the tensor is read as
// zeros, and not written.
struct alignas(64) TensorMap { uint64 words[16]; };

__device__ inline uint32 address_of(const void *shared) { return uint32(__cvta_generic_to_shared(shared)); }

// --- barriers in shared memory: a phase ends when `arrivals` threads have arrived and all bytes expected have come ---

__device__ inline void init_barrier(uint64 &barrier, uint32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(address_of(&barrier)), "r"(arrivals) : "memory");
}
// After the last `init_barrier` and before a barrier of the block.
__device__ inline void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void arrive(uint64 &barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address_of(&barrier)) : "memory");
}
__device__ inline void arrive_expecting(uint64 &barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address_of(&barrier)), "r"(bytes) : "memory");
}
// Until the phase of this parity has ended. Who waits must have seen the phase before it end.
__device__ inline void wait_for_phase(uint64 &barrier, uint32 parity) {
    uint32 ended;
    do {
        asm volatile("{\n\t.reg .pred ended;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, ended;\n\t}"
                     : "=r"(ended) : "r"(address_of(&barrier)), "r"(parity) : "memory");
    } while (!ended);
}

// Places that are used in turn, each with a barrier of its own: where we are, and the parity of the phase there.
struct Turn {
    int place = 0;
    uint32 parity = 0;

    __device__ void next(int places) {
        if (++place == places) {
            place = 0;
            parity ^= 1;
        }
    }
};

// Of a tile of a 1x1 convolution: how many rows it has, and from one to the next the steps in rows and lines, of x and of y.
struct TileWalk { int rows, x_row, x_line, y_row, y_line; };

// --- copies ---

__device__ inline void fetch_map(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}
// The tile that starts at this place; its bytes end a phase of `barrier`.
__device__ inline void load_tile(uint4 *to, const TensorMap &map, int column, int row, int line, uint64 &barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 :: "r"(address_of(to)), "l"(&map), "r"(column), "r"(row), "r"(line), "r"(address_of(&barrier)) : "memory");
}
// Of a tensor of layers of lines, and of several of these.
__device__ inline void load_tile(uint4 *to, const TensorMap &map, int column, int row, int line, int layer, uint64 &barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
                 "[%6];"
                 :: "r"(address_of(to)), "l"(&map), "r"(column), "r"(row), "r"(line), "r"(layer), "r"(address_of(&barrier))
                 : "memory");
}
__device__ inline void load_tile(uint4 *to, const TensorMap &map, int column, int row, int line, int layer, int tensor,
                                 uint64 &barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
                 :: "r"(address_of(to)), "l"(&map), "r"(column), "r"(row), "r"(line), "r"(layer), "r"(tensor),
                    "r"(address_of(&barrier)) : "memory");
}
// Bytes that follow each other; `bytes` and both places are multiples of 16.
__device__ inline void load_bytes(void *to, const void *from, uint32 bytes, uint64 &barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(address_of(to)), "l"(from), "r"(bytes), "r"(address_of(&barrier)) : "memory");
}
// What other threads wrote there must have been shown (`show_to_copies`) before they met this one.
__device__ inline void store_tile(const TensorMap &map, int column, int row, int line, const uint4 *from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n\t"
                 "cp.async.bulk.commit_group;"
                 :: "l"(&map), "r"(column), "r"(row), "r"(line), "r"(address_of(from)) : "memory");
}
__device__ inline void store_tile(const TensorMap &map, int column, int row, int line, int layer, const uint4 *from) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n\t"
                 "cp.async.bulk.commit_group;"
                 :: "l"(&map), "r"(column), "r"(row), "r"(line), "r"(layer), "r"(address_of(from)) : "memory");
}
__device__ inline void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Until all but the last `OPEN` stores of this thread have read shared memory.
template <int OPEN> __device__ inline void wait_for_stores() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(OPEN) : "memory");
}

// --- clusters: blocks that run at the same time and reach each other's shared memory ---

// Threads of the block must have met before, for what one of them wrote. Those that have ended are not waited for.
__device__ inline void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
}
// At the same barrier of a block of the cluster.
__device__ inline void arrive_at(uint64 &barrier, uint32 rank) {
    asm volatile("{\n\t.reg .b32 there;\n\t"
                 "mapa.shared::cluster.u32 there, %0, %1;\n\t"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}"
                 :: "r"(address_of(&barrier)), "r"(rank) : "memory");
}
// A tile to the same place of all PEERS; its bytes count at the same barrier of each.
template <int PEERS>
__device__ inline void load_for_all(uint4 *to, const TensorMap &map, int column, int row, int line, uint64 &barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;"
                 :: "r"(address_of(to)), "l"(&map), "r"(column), "r"(row), "r"(line), "r"(address_of(&barrier)),
                    "h"((unsigned short)((1 << PEERS) - 1)) : "memory");
}
template <int PEERS>
__device__ inline void load_for_all(uint4 *to, const TensorMap &map, int column, int row, int line, int layer,
                                    uint64 &barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                 :: "r"(address_of(to)), "l"(&map), "r"(column), "r"(row), "r"(line), "r"(layer), "r"(address_of(&barrier)),
                    "h"((unsigned short)((1 << PEERS) - 1)) : "memory");
}
