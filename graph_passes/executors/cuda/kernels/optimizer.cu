// The optimizer: one launch updates every tensor. Master weights, momentum and arithmetic are fp32.
//
// Work is cut into chunks of at most CHUNK elements of one tensor; a block does one chunk. All state that decides about a
// step (loss scale, learning rate, overflow) lives on the GPU, so that no step waits for the host.
#include "common.cuh"

constexpr int CHUNK = 8192;  // elements; must equal optimizer.py's
constexpr int THREADS = 256;

struct Tensor {
    const void *gradient;  // T, or fp32 where `fp32_gradient`; scaled by the loss scale
    float *master, *momentum;
    float *average;        // moving average of the weights, or null
    void *copy;            // the network's own weights of type T, or null
    uint32 size;           // elements, a multiple of 8
    uint32 first_chunk, num_chunks;
    uint32 fp32_gradient;
    uint32 adapt;          // LARS trust ratio for this tensor?
    float weight_decay;
};

struct Chunk { uint32 tensor, start; };

struct State {
    float learning_rate, momentum;
    float gradient_scale;      // gradients are multiplied by it besides 1 / loss_scale, for averaging
    float loss_scale;
    uint32 overflow;           // a gradient of this step is not finite: skip the update
    uint32 good_steps;         // since the last change of the loss scale
    uint32 skipped_steps;      // in total
    uint32 growth_interval;    // good steps after which the loss scale doubles; 0: constant loss scale
    float trust_coefficient, trust_epsilon;
    float average_decay;       // average = average_decay * average + (1 - average_decay) * weight
};

template <class T> __device__ inline void load_gradient(const Tensor &t, uint32 at, float (&g)[VEC]) {
    if (t.fp32_gradient) load_floats(static_cast<const float *>(t.gradient) + at, g);
    else unpack(load(static_cast<const T *>(t.gradient) + at), g);
}

// average = decay * average + (1 - decay) * values
__device__ inline void average_in(float *average, const float (&values)[VEC], float decay) {
    float a[VEC];
    load_floats(average, a);
#pragma unroll
    for (int k = 0; k < VEC; ++k) a[k] = decay * a[k] + (1 - decay) * values[k];
    store_floats(average, a);
}

// Sets state->overflow if a gradient is not finite. With NORMS also leaves the sums of squares of weights and gradients
// of each chunk in norms (chunks, 2), for LARS.
template <class T, bool NORMS>
__global__ void __launch_bounds__(THREADS)
inspect_gradients(const Tensor *tensors, const Chunk *chunks, State *state, float *norms) {
    const Chunk chunk = chunks[blockIdx.x];
    const Tensor t = tensors[chunk.tensor];
    const uint32 end = min(t.size, chunk.start + CHUNK);
    bool finite = true;
    float weight_squares = 0, gradient_squares = 0;
    for (uint32 at = chunk.start + threadIdx.x * VEC; at < end; at += THREADS * VEC) {
        float g[VEC], w[VEC];
        load_gradient<T>(t, at, g);
        if (NORMS) load_floats(t.master + at, w);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            finite &= fabsf(g[k]) < INF;
            if (NORMS) {
                weight_squares += w[k] * w[k];
                gradient_squares += g[k] * g[k];
            }
        }
    }
    if (!finite) state->overflow = 1;
    if (NORMS) {
        weight_squares = block_reduce(weight_squares, 0.f, Sum());
        gradient_squares = block_reduce(gradient_squares, 0.f, Sum());
        if (threadIdx.x == 0) {
            norms[2 * blockIdx.x] = weight_squares;
            norms[2 * blockIdx.x + 1] = gradient_squares;
        }
    }
}

// trust[t] = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon) where LARS adapts, else 1. One block a tensor.
// You, Gitman, Ginsburg, arXiv:1708.03888, equation 6.
__global__ void trust_ratios(const Tensor *tensors, const State *state, const float *norms, float *trust) {
    const Tensor t = tensors[blockIdx.x];
    float weight_squares = 0, gradient_squares = 0;
    for (uint32 c = threadIdx.x; c < t.num_chunks; c += blockDim.x) {
        weight_squares += norms[2 * (t.first_chunk + c)];
        gradient_squares += norms[2 * (t.first_chunk + c) + 1];
    }
    const float w = sqrtf(block_reduce(weight_squares, 0.f, Sum()));
    const float g = sqrtf(block_reduce(gradient_squares, 0.f, Sum())) * state->gradient_scale / state->loss_scale;
    if (threadIdx.x == 0) {
        const bool adapt = t.adapt && w > 0 && g > 0;
        trust[blockIdx.x] = adapt ? state->trust_coefficient * w / (g + t.weight_decay * w + state->trust_epsilon) : 1;
    }
}

// momentum = m * momentum - rate * (gradient + weight_decay * weight); weight += momentum, or with NESTEROV
// weight += m * momentum - rate * (gradient + weight_decay * weight). MXNet's sgd_mom_update has this form. Then the
// moving average of the weight, which a skipped step moves too: as often as the host has counted.
template <class T, bool LARS, bool NESTEROV>
__global__ void __launch_bounds__(THREADS)
sgd_update(const Tensor *tensors, const Chunk *chunks, const State *state, const float *trust) {
    const Chunk chunk = chunks[blockIdx.x];
    const Tensor t = tensors[chunk.tensor];
    const bool skip = state->overflow;
    if (skip && !t.average) return;
    const uint32 end = min(t.size, chunk.start + CHUNK);
    const float rate = state->learning_rate * (LARS ? trust[chunk.tensor] : 1.f);
    const float unscale = state->gradient_scale / state->loss_scale, m = state->momentum;
    for (uint32 at = chunk.start + threadIdx.x * VEC; at < end; at += THREADS * VEC) {
        float g[VEC], w[VEC], v[VEC];
        load_floats(t.master + at, w);
        if (!skip) {
            load_gradient<T>(t, at, g);
            load_floats(t.momentum + at, v);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const float step = rate * (g[k] * unscale + t.weight_decay * w[k]);
                v[k] = m * v[k] - step;
                w[k] += NESTEROV ? m * v[k] - step : v[k];
            }
            store_floats(t.momentum + at, v);
            store_floats(t.master + at, w);
            if (t.copy) store(static_cast<T *>(t.copy) + at, pack<T>(w));
        }
        if (t.average) average_in(t.average + at, w, state->average_decay);
    }
}

// The moving average of the running statistics, `size` a multiple of VEC.
__global__ void average_statistics(const float *statistics, float *average, const State *state, uint32 size) {
    const uint32 at = (blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    if (at >= size) return;
    float values[VEC];
    load_floats(statistics + at, values);
    average_in(average + at, values, state->average_decay);
}

// After the update: halves the loss scale after an overflow, doubles it after growth_interval good steps in a row
// (Micikevicius et al., arXiv:1710.03740, section 3.2). One thread.
__global__ void end_step(State *state) {
    if (state->overflow) {
        state->overflow = 0;
        state->skipped_steps += 1;
        state->good_steps = 0;
        if (state->growth_interval) state->loss_scale = fmaxf(1.f, state->loss_scale / 2);
        return;
    }
    state->good_steps += 1;
    if (state->growth_interval && state->good_steps >= state->growth_interval) {
        state->loss_scale = fminf(16777216.f, state->loss_scale * 2);  // 2^24, as NVIDIA's Apex
        state->good_steps = 0;
    }
}

// copy = master, after the parameters have been set.
template <class T>
__global__ void __launch_bounds__(THREADS) copy_weights(const Tensor *tensors, const Chunk *chunks) {
    const Chunk chunk = chunks[blockIdx.x];
    const Tensor t = tensors[chunk.tensor];
    if (!t.copy) return;
    const uint32 end = min(t.size, chunk.start + CHUNK);
    for (uint32 at = chunk.start + threadIdx.x * VEC; at < end; at += THREADS * VEC) {
        float w[VEC];
        load_floats(t.master + at, w);
        store(static_cast<T *>(t.copy) + at, pack<T>(w));
    }
}
