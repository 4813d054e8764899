// Element types, 16-byte vectors and small helpers shared by all kernels.
//
// The 16-bit types are defined here, and PTX instructions convert them. So NVRTC needs no header of the CUDA toolkit,
// and the user needs no toolkit. All arithmetic is fp32; half and bfloat16 are storage only.
//
// The comment above each kernel gives the shapes of its operands. All kernels use these names: N images of H x W pixels
// (outputs: OH x OW) with C channels; rows = N*H*W; K is the number of a convolution's output channels, or of classes.
// Images are NHWC, filters are (K, height, width, C). The element type is the network's type T unless stated. A null
// pointer leaves an operand out.
//
// Indices have 32 bits and count vectors wherever data are vectors. A tensor has fewer than 2^31 elements (`MAX_ELEMENTS` of
// capacity.py).
#pragma once

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64_t = long long;
using size_t = decltype(sizeof(0));

struct half { uint16 bits; };
struct bfloat16 { uint16 bits; };

constexpr int VEC = 8;   // neighbouring channels that a thread processes at once: one 16-byte access in 16-bit types
constexpr int WARP = 32;
#define INF __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)

// --- a thread's place in its block ---

__device__ inline int lane_index() { return threadIdx.x % WARP; }
// The warp's number, which the compiler knows to be equal in all lanes.
__device__ inline int warp_index() { return __shfl_sync(0xffffffff, threadIdx.x / WARP, 0); }

// --- barriers within a block ---

struct BlockBarrier {
    __device__ void operator()() const { __syncthreads(); }
    // Barrier that also returns whether `is` is true in any thread.
    __device__ bool any(bool is) const { return __syncthreads_or(is); }
};
// Named barrier number BARRIER, from 1 on, of THREADS threads in whole warps.
template <int BARRIER, int THREADS> struct NamedBarrier {
    __device__ void operator()() const { asm volatile("bar.sync %0, %1;" :: "n"(BARRIER), "n"(THREADS) : "memory"); }
    __device__ bool any(bool is) const {
        uint32 found;
        asm volatile("{\n\t.reg .pred is, found;\n\t"
                     "setp.ne.u32 is, %1, 0;\n\t"
                     "bar.red.or.pred found, %2, %3, is;\n\t"
                     "selp.u32 %0, 1, 0, found;\n\t}"
                     : "=r"(found) : "r"(uint32(is)), "n"(BARRIER), "n"(THREADS) : "memory");
        return found;
    }
};
// Barrier of one team of THREADS threads. A block has several teams; each has its own named barrier.
template <int THREADS> __device__ inline void team_sync(int team) {
    asm volatile("bar.sync %0, %1;" :: "r"(team + 1), "n"(THREADS) : "memory");
}

// --- scalars ---

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(bfloat16 v) { return __uint_as_float(uint32(v.bits) << 16); }
__device__ inline float to_float(half v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
    return f;
}

template <class T> __device__ inline T from_float(float f);
template <> __device__ inline float from_float<float>(float f) { return f; }
template <> __device__ inline half from_float<half>(float f) {
    half h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(f));  // values beyond 65504 become infinity: loss scaling relies on it
    return h;
}
template <> __device__ inline bfloat16 from_float<bfloat16>(float f) {
    bfloat16 b;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b.bits) : "f"(f));
#else
    uint32 bits = __float_as_uint(f);
    bits += 0x7fff + ((bits >> 16) & 1);  // round to nearest, ties to even
    b.bits = f != f ? 0x7fff : bits >> 16;
#endif
    return b;
}

// Converts two values at once: one instruction for 16-bit types since sm_80.
template <class T> __device__ inline void from_floats(float f0, float f1, T *to) {
    to[0] = from_float<T>(f0);
    to[1] = from_float<T>(f1);
}
#if __CUDA_ARCH__ >= 800
template <> __device__ inline void from_floats<half>(float f0, float f1, half *to) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(*reinterpret_cast<uint32 *>(to)) : "f"(f1), "f"(f0));
}
template <> __device__ inline void from_floats<bfloat16>(float f0, float f1, bfloat16 *to) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(*reinterpret_cast<uint32 *>(to)) : "f"(f1), "f"(f0));
}
#endif

// --- vectors of 8 elements: kept packed while loads are in flight, unpacked to fp32 for arithmetic ---

template <class T> struct alignas(16) Packed { T element[VEC]; };
template <class T> __device__ inline uint4 words(const Packed<T> &v) { return *reinterpret_cast<const uint4 *>(&v); }
template <class T> __device__ inline Packed<T> packed(const uint4 &v) { return *reinterpret_cast<const Packed<T> *>(&v); }

template <class T> __device__ inline Packed<T> load(const T *p) {
    Packed<T> v;
    const uint4 *from = reinterpret_cast<const uint4 *>(p);
    uint4 *to = reinterpret_cast<uint4 *>(&v);
#pragma unroll
    for (int i = 0; i < int(sizeof(v) / sizeof(uint4)); ++i) to[i] = from[i];
    return v;
}

template <class T> __device__ inline void store(T *p, const Packed<T> &v) {
    const uint4 *from = reinterpret_cast<const uint4 *>(&v);
    uint4 *to = reinterpret_cast<uint4 *>(p);
#pragma unroll
    for (int i = 0; i < int(sizeof(v) / sizeof(uint4)); ++i) to[i] = from[i];
}

template <class T> __device__ inline void unpack(Packed<T> v, float (&f)[VEC]) {
#pragma unroll
    for (int k = 0; k < VEC; ++k) f[k] = to_float(v.element[k]);
}

template <class T> __device__ inline Packed<T> pack(const float (&f)[VEC]) {
    Packed<T> v;
#pragma unroll
    for (int k = 0; k < VEC; k += 2) from_floats(f[k], f[k + 1], v.element + k);
    return v;
}

__device__ inline void load_floats(const float *p, float (&f)[VEC]) { unpack(load(p), f); }
__device__ inline void store_floats(float *p, const float (&f)[VEC]) { store(p, pack<float>(f)); }

// z = function(x, y) for each element: one thread for each vector. z may alias x or y.
template <class T, class Function>
__device__ inline void combine(const Packed<T> *x, const Packed<T> *y, Packed<T> *z, uint32 vectors, Function function) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    float a[VEC], b[VEC];
    unpack(x[at], a);
    unpack(y[at], b);
#pragma unroll
    for (int k = 0; k < VEC; ++k) a[k] = function(a[k], b[k]);
    z[at] = pack<T>(a);
}


template <class Op> __device__ inline float block_reduce(float v, float identity, Op op) {
    __shared__ float of_warp[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = (blockDim.x + WARP - 1) / WARP;
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) v = op(v, __shfl_xor_sync(0xffffffff, v, d));
    if (lane == 0) of_warp[warp] = v;
    __syncthreads();
    v = lane < warps ? of_warp[lane] : identity;
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) v = op(v, __shfl_xor_sync(0xffffffff, v, d));
    __syncthreads();  // the next call may then overwrite of_warp
    return v;  // every warp has done the second step, so every thread has the result
}

struct Sum { __device__ float operator()(float a, float b) const { return a + b; } };
struct Max { __device__ float operator()(float a, float b) const { return fmaxf(a, b); } };
