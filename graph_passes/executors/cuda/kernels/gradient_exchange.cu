// The mean of gradients over the GPUs of a machine, which write into each other's memory: see gradient_exchange.py.
#include "common.cuh"

constexpr int THREADS = 512, BLOCKS = 32;
constexpr int MAX_MEMBERS = 16;

struct Members { uint64 address[MAX_MEMBERS]; };

// The mean of 8 neighbouring values over all members, added up in their order in fp32: `mine` and what the others have put
// into the inbox, where each of them has a place of `stride` values.
template <class T>
__device__ inline Packed<T> mean(Packed<T> mine, const T *inbox, size_t stride, int own, int size) {
    float sum[VEC] = {};
#pragma unroll 4
    for (int member = 0; member < size; ++member) {
        float values[VEC];
        unpack(member == own ? mine : load(inbox + member * stride), values);
#pragma unroll
        for (int k = 0; k < VEC; ++k) sum[k] += values[k];
    }
#pragma unroll
    for (int k = 0; k < VEC; ++k) sum[k] /= size;
    return pack<T>(sum);
}

// Replaces this GPU's part of a bucket by its mean; the others' values of it lie in the inbox.
template <class T>
__global__ void __launch_bounds__(THREADS)
average_part(T *part, const T *inbox, size_t stride, int own, int size, uint32 vectors) {
    const uint32 at = blockIdx.x * THREADS + threadIdx.x;
    if (at >= vectors) return;
    store(part + size_t(at) * VEC, mean(load(part + size_t(at) * VEC), inbox + size_t(at) * VEC, stride, own, size));
}

__device__ inline void raise_flag(uint32 *flag, uint32 number) {  // what this block has written before can be seen then
    asm volatile("st.release.sys.u32 [%0], %1;" :: "l"(flag), "r"(number) : "memory");
}

__device__ inline void wait_for_flag(const uint32 *flag, uint32 number) {
    uint32 found;
    do asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
    while (int(found - number) < 0);
}

// Replaces a small bucket by its mean: each GPU writes all of it into the inboxes of the others and adds up what it finds in
// its own. Blocks exchange independently: each member has one flag for each of them.
template <class T>
__global__ void __launch_bounds__(THREADS)
average_at_once(T *bucket, Members inboxes, Members flags, size_t stride, int own, int size, uint32 number, uint32 vectors) {
    const uint32 first = blockIdx.x * THREADS + threadIdx.x, step = gridDim.x * THREADS;
    for (uint32 at = first; at < vectors; at += step) {
        const Packed<T> mine = load(bucket + size_t(at) * VEC);
#pragma unroll 1
        for (int i = 1; i < size; ++i) {
            T *const inbox = reinterpret_cast<T *>(inboxes.address[(own + i) % size]);  // not all write to the same one first
            store(inbox + own * stride + size_t(at) * VEC, mine);
        }
    }
    __syncthreads();
    if (threadIdx.x < size && threadIdx.x != own) {
        raise_flag(reinterpret_cast<uint32 *>(flags.address[threadIdx.x]) + own * BLOCKS + blockIdx.x, number);
        wait_for_flag(reinterpret_cast<uint32 *>(flags.address[own]) + threadIdx.x * BLOCKS + blockIdx.x, number);
    }
    __syncthreads();
    const T *const inbox = reinterpret_cast<const T *>(inboxes.address[own]);
    for (uint32 at = first; at < vectors; at += step) {
        T *const to = bucket + size_t(at) * VEC;
        store(to, mean(load(to), inbox + size_t(at) * VEC, stride, own, size));
    }
}
