// What CUDA C++ has and C++ has not, as far as our plain kernels use it: compiled before a kernel, for the CPU.
// emulator.cc runs the threads; emulation/__init__.py translates PTX instructions to the `ptx_` functions below.
#pragma once
#include <math.h>
#include <stddef.h>
#include <string.h>

#define __global__ __attribute__((noinline))
#define __device__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 900
#define UNCHECKED __attribute__((no_sanitize("thread"), noinline))  // the emulator does not see its accesses

struct uint3 { unsigned x, y, z; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern "C" {  // emulator.cc
__attribute__((const)) uint3 emulated_thread();
__attribute__((const)) uint3 emulated_block();
__attribute__((const)) uint3 emulated_block_size();
__attribute__((const)) uint3 emulated_grid_size();
__attribute__((const)) void *emulated_shared();
int emulated_barrier(int is);
// The value of lane `source`; from -1 the lanes whose value is not 0; -2 for a barrier of the warp.
unsigned long long emulated_warp(unsigned mask, unsigned long long value, int source);
void emulated_atomic(const void *address, size_t bytes);
void emulated_refusal(const char *instruction);
}
#define threadIdx (emulated_thread())
#define blockIdx (emulated_block())
#define blockDim (emulated_block_size())
#define gridDim (emulated_grid_size())

inline void __syncthreads() { emulated_barrier(0); }
inline int __syncthreads_or(int is) { return emulated_barrier(is); }
inline void __threadfence() {}  // a block ends before the next begins
inline void __syncwarp(unsigned mask = ~0u) { emulated_warp(mask, 0, -2); }
inline unsigned __ballot_sync(unsigned mask, int is) { return emulated_warp(mask, is != 0, -1); }
inline int warp_lane() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32; }
template <class T> T __shfl_sync(unsigned mask, T v, int lane) {
    unsigned long long value = 0;
    memcpy(&value, &v, sizeof v);
    value = emulated_warp(mask, value, lane % 32);
    memcpy(&v, &value, sizeof v);
    return v;
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int d) { return __shfl_sync(mask, v, warp_lane() ^ d); }
template <class T> T __shfl_down_sync(unsigned mask, T v, int d) {
    return __shfl_sync(mask, v, warp_lane() + d < 32 ? warp_lane() + d : warp_lane());
}
template <class T> T __shfl_up_sync(unsigned mask, T v, int d) {
    return __shfl_sync(mask, v, warp_lane() >= d ? warp_lane() - d : warp_lane());
}
template <class T, class V> UNCHECKED T atomicAdd(T *address, V v) {
    emulated_atomic(address, sizeof(T));
    const T old = *address;
    *address = old + v;
    return old;
}
template <class T> T __ldcg(const T *address) { return *address; }
template <class T> T __ldg(const T *address) { return *address; }

// --- arithmetic ---

template <class To, class From> To same_bits(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __int_as_float(int v) { return same_bits<float>(v); }
inline float __uint_as_float(unsigned v) { return same_bits<float>(v); }
inline int __float_as_int(float v) { return same_bits<int>(v); }
inline unsigned __float_as_uint(float v) { return same_bits<unsigned>(v); }
inline float rsqrtf(float v) { return 1 / sqrtf(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return expf(v); }
inline float __saturatef(float v) { return v > 0 ? v < 1 ? v : 1 : 0; }
inline float __int2float_rn(int v) { return float(v); }
inline int __float2int_rn(float v) { return v != v ? 0 : v >= 0x1p31f ? 0x7fffffff : v < -0x1p31f ? int(1u << 31) : int(rintf(v)); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (signed char)(a >> i) * (signed char)(b >> i);
    return sum;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned s = selector >> 4 * i, byte = bytes >> 8 * (s & 7) & 255;
        result |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return result;
}
inline unsigned __vmaxs2(unsigned a, unsigned b) {
    const auto larger = [](unsigned x, unsigned y) { return unsigned((short)x > (short)y ? x : y) & 0xffff; };
    return larger(a >> 16, b >> 16) << 16 | larger(a, b);
}
#define MIN_AND_MAX(T)                             \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
MIN_AND_MAX(int)
MIN_AND_MAX(unsigned)
MIN_AND_MAX(long long)
MIN_AND_MAX(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

// --- PTX: named as the instruction is; the result comes first ---

inline void ptx_cvt_f32_f16(float &f, unsigned short h) {
    const unsigned exponent = h >> 10 & 31, mantissa = h & 1023;
    const float size = exponent == 31  ? __uint_as_float(0x7f800000 | mantissa << 13)
                       : exponent == 0 ? mantissa * 0x1p-24f
                                       : __uint_as_float(exponent + 112 << 23 | mantissa << 13);
    f = h >> 15 ? -size : size;
}
// To nearest, ties to even; what is 65520 or more becomes infinity.
inline void ptx_cvt_rn_f16_f32(unsigned short &h, float f) {
    const unsigned bits = __float_as_uint(f), size = bits & 0x7fffffff;
    h = size > 0x7f800000    ? 0x7fff
        : size >= 0x477ff000 ? 0x7c00
        : size < 0x38800000  ? (unsigned short)rintf(fabsf(f) * 0x1p24f)  // multiples of 2^-24
                             : (size + 0xfff + (size >> 13 & 1) >> 13) - (112 << 10);
    if (size <= 0x7f800000) h |= bits >> 16 & 0x8000;
}
inline void ptx_cvt_rn_bf16_f32(unsigned short &b, float f) {
    const unsigned bits = __float_as_uint(f);
    b = f != f ? 0x7fff : bits + 0x7fff + (bits >> 16 & 1) >> 16;
}
inline void ptx_cvt_rn_f16x2_f32(unsigned &both, float high, float low) {
    unsigned short h, l;
    ptx_cvt_rn_f16_f32(h, high);
    ptx_cvt_rn_f16_f32(l, low);
    both = h << 16 | l;
}
inline void ptx_cvt_rn_bf16x2_f32(unsigned &both, float high, float low) {
    unsigned short h, l;
    ptx_cvt_rn_bf16_f32(h, high);
    ptx_cvt_rn_bf16_f32(l, low);
    both = h << 16 | l;
}
inline void ptx_set_gt_u32_f16x2(unsigned &bits, unsigned a, unsigned b) {
    bits = 0;
    for (int i = 0; i < 32; i += 16) {
        float x, y;
        ptx_cvt_f32_f16(x, a >> i);
        ptx_cvt_f32_f16(y, b >> i);
        bits |= x > y ? 0xffffu << i : 0;
    }
}
inline void ptx_set_gt_u32_bf16x2(unsigned &bits, unsigned a, unsigned b) {
    bits = (__uint_as_float(a & 0xffff0000) > __uint_as_float(b & 0xffff0000) ? 0xffff0000 : 0) |
           (__uint_as_float(a << 16) > __uint_as_float(b << 16) ? 0xffff : 0);
}

// --- a launch ---

template <size_t... I> struct Numbers {};
template <size_t N, size_t... I> struct NumbersUpTo : NumbersUpTo<N - 1, N - 1, I...> {};
template <size_t... I> struct NumbersUpTo<0, I...> { using type = Numbers<I...>; };
template <class... T, size_t... I> UNCHECKED void call_with(void (*kernel)(T...), void **arguments, Numbers<I...>) {
    kernel(*static_cast<T *>(arguments[I])...);
}
// As cuLaunchKernel takes them: pointers to the arguments.
template <class... T> UNCHECKED void call(void (*kernel)(T...), void **arguments) {
    call_with(kernel, arguments, typename NumbersUpTo<sizeof...(T)>::type());
}
