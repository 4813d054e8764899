// Functions of single elements and their gradients (graph_passes/operators/activations.py), ReLU alone, and products
// and sums with a number. The kernels work on tensors of any size: the last vector may reach beyond the tensor, into
// the padding of its memory.
#include "common.cuh"

enum Function { relu_, sigmoid_, tanh_, softrelu_, softsign_, leaky_, elu_, selu_, gelu_, clip_, hard_sigmoid_ };

constexpr float SELU_SCALE = 1.0507009873554805f, SELU_ALPHA = 1.6732632423543772f, INVERSE_SQRT_2 = 0.70710678118654752f,
                NORMAL_DENSITY_AT_0 = 0.39894228040143268f;

// 1 / (1 + exp(-x)): exp of a large number is infinity, which gives 0.
__device__ inline float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// The function of x. NaN stays NaN.
template <int FUNCTION> __device__ inline float value(float x, float a, float b) {
    switch (FUNCTION) {
        case relu_: return x < 0 ? 0 : x;
        case sigmoid_: return sigmoid(x);
        case tanh_: return tanhf(x);
        case softrelu_: return (x > 0 ? x : 0) + log1pf(expf(-fabsf(x)));
        case softsign_: return x / (1 + fabsf(x));
        case leaky_: return x > 0 ? x : a * x;
        case elu_: return x > 0 ? x : a * expm1f(x);
        case selu_: return SELU_SCALE * (x > 0 ? x : SELU_ALPHA * expm1f(x));
        // erfc is used because 1 + erf would lose precision for negative x
        case gelu_: return 0.5f * x * erfcf(-x * INVERSE_SQRT_2);
        case clip_: return x < a ? a : x > b ? b : x;
        default: { const float y = a * x + b; return y < 0 ? 0 : y > 1 ? 1 : y; }  // hard_sigmoid_
    }
}

// The derivative of the function at x.
template <int FUNCTION> __device__ inline float slope(float x, float a, float b) {
    switch (FUNCTION) {
        case relu_: return x > 0 ? 1 : 0;
        case sigmoid_: return sigmoid(x) * sigmoid(-x);
        case tanh_: { const float t = tanhf(x); return 1 - t * t; }
        case softrelu_: return sigmoid(x);
        case softsign_: { const float d = 1 + fabsf(x); return 1 / (d * d); }
        case leaky_: return x > 0 ? 1 : a;
        case elu_: return x > 0 ? 1 : a * expf(x);
        case selu_: return SELU_SCALE * (x > 0 ? 1 : SELU_ALPHA * expf(x));
        case gelu_: return 0.5f * erfcf(-x * INVERSE_SQRT_2) + x * NORMAL_DENSITY_AT_0 * expf(-0.5f * x * x);
        case clip_: return x >= a && x <= b ? 1 : 0;
        default: { const float y = a * x + b; return y > 0 && y < 1 ? a : 0; }  // hard_sigmoid_
    }
}

// y = f(x). y may alias x.
// Shapes: x, y (8 * vectors).
template <class T, int FUNCTION>
__global__ void activation(const Packed<T> *x, Packed<T> *y, float a, float b, uint32 vectors) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    float v[VEC];
    unpack(x[at], v);
#pragma unroll
    for (int k = 0; k < VEC; ++k) v[k] = value<FUNCTION>(v[k], a, b);
    y[at] = pack<T>(v);
}

// dx = dy * f'(x). dx may alias dy or x.
// Shapes: dy, x, dx (8 * vectors).
template <class T, int FUNCTION>
__global__ void activation_backward(const Packed<T> *dy, const Packed<T> *x, Packed<T> *dx, float a, float b, uint32 vectors) {
    combine(dy, x, dx, vectors, [=](float g, float v) { return g * slope<FUNCTION>(v, a, b); });
}

// dx = dy where y > 0, else 0; y is the output of a ReLU. With TWO, of dy + dy2.
// Shapes: dy, dy2, y, dx (8 * vectors).
template <class T, bool TWO>
__global__ void relu_backward(const Packed<T> *dy, const Packed<T> *dy2, const Packed<T> *y, Packed<T> *dx, uint32 vectors) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    float g[VEC], g2[VEC] = {}, v[VEC];
    unpack(dy[at], g);
    if (TWO) unpack(dy2[at], g2);
    unpack(y[at], v);
#pragma unroll
    for (int k = 0; k < VEC; ++k) g[k] = v[k] > 0 ? g[k] + g2[k] : 0;
    dx[at] = pack<T>(g);
}

// z = relu(x + y).
// Shapes: x, y, z (8 * vectors).
template <class T>
__global__ void add_relu(const Packed<T> *x, const Packed<T> *y, Packed<T> *z, uint32 vectors) {
    combine(x, y, z, vectors, [](float a, float b) { return value<relu_>(a + b, 0, 0); });
}

// z = x * y.
// Shapes: x, y, z (8 * vectors).
template <class T>
__global__ void multiply(const Packed<T> *x, const Packed<T> *y, Packed<T> *z, uint32 vectors) {
    combine(x, y, z, vectors, [](float a, float b) { return a * b; });
}

// dx = dz * y and dy = dz * x, of z = x * y.
// Shapes: dz, x, y, dx, dy (8 * vectors).
template <class T>
__global__ void multiply_backward(const Packed<T> *dz, const Packed<T> *x, const Packed<T> *y, Packed<T> *dx,
                                  Packed<T> *dy, uint32 vectors) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    float g[VEC], a[VEC], b[VEC];
    unpack(dz[at], g);
    unpack(x[at], a);
    unpack(y[at], b);
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
        const float of_x = g[k] * b[k];
        b[k] = g[k] * a[k];
        a[k] = of_x;
    }
    dx[at] = pack<T>(a);
    dy[at] = pack<T>(b);
}

// y = x * factor + shift. y may alias x.
// Shapes: x, y (8 * vectors).
template <class T>
__global__ void scale_and_shift(const Packed<T> *x, Packed<T> *y, float factor, float shift, uint32 vectors) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    float v[VEC];
    unpack(x[at], v);
#pragma unroll
    for (int k = 0; k < VEC; ++k) v[k] = v[k] * factor + shift;
    y[at] = pack<T>(v);
}
