// The optimizers: one launch updates every tensor. Master weights, optimizer state and arithmetic are fp32.
//
// The work is cut into chunks of at most CHUNK elements of one tensor; a block processes one chunk. All state that controls a
// step (loss scale, learning rate, overflow) is on the GPU, so that no step waits for the host.
#include "common.cuh"

constexpr int CHUNK = 8192;  // most elements of a chunk
constexpr int THREADS = 256;
constexpr int MAX_SLOTS = 2, MAX_CONSTANTS = 8;

struct Tensor {
    const void *gradient;  // of type T, or fp32 if `fp32_gradient`; multiplied by the loss scale
    float *master;
    float *state[MAX_SLOTS];  // optimizer state: `state[slot]` has a value for each weight
    float *ema;               // moving average of the weights, or null
    void *copy;               // the network's own weights of type T, or null
    uint32 size;  // number of elements, a multiple of 8
    uint32 first_chunk, num_chunks;
    uint32 fp32_gradient;
    uint32 is_weight;  // whether the tensor has weight decay, and its own learning rate in LARS and LAMB
    float weight_decay;
    float rate_factor;  // factor of the learning rate
};

struct Chunk { uint32 tensor, start; };

struct State {
    float learning_rate;
    float gradient_scale;  // factor of the gradients in addition to 1 / loss_scale, for averaging
    float loss_scale;
    uint32 overflow;  // 1 if a gradient of this step is not finite; the update is then skipped
    uint32 good_steps;  // good steps since the last change of the loss scale
    uint32 skipped_steps;  // skipped steps in total
    uint32 skipped_in_a_row;  // skipped steps since the last update
    uint32 growth_interval;    // good steps after which the loss scale doubles; 0: constant loss scale
    uint32 updates;  // updates in total, without skipped steps
    float ema_decay;           // ema = ema_decay * ema + (1 - ema_decay) * weight
    float constants[MAX_CONSTANTS];  // constants of the rule, in the order of the members of its struct below
    float clip_norm;           // upper limit of the gradients' norm; used only if `clip_gradients` is launched
    float gradient_norm;  // gradient norm before clipping, of the latest step that was not skipped
};

// --- the rules, one struct for each optimizer; graph_passes/optimizers/ has the formulas ---
//
// update      changes a weight and its optimizer state. `g` is the gradient, without the loss scale
// NORMS_OF    the norm that is compared with |weight| to give each tensor its own learning rate (`trust`): GRADIENT, or
//             UPDATE, the term that the rate multiplies. With UPDATE, an earlier launch (`accumulate`) changes the optimizer
//             state, so that `direction` can be evaluated twice: for its norm, and in `update`

enum NormsOf { NOTHING, GRADIENT, UPDATE };

template <bool NESTEROV>
struct Sgd {
    static constexpr int SLOTS = 1;
    static constexpr NormsOf NORMS_OF = NOTHING;
    float momentum;

    __device__ explicit Sgd(const State &state) : momentum(state.constants[0]) {}

    // MXNet's sgd_mom_update has this form.
    __device__ void update(float &w, float g, float (&v)[SLOTS], float rate, float decay) const {
        const float step = rate * (g + decay * w);
        v[0] = momentum * v[0] - step;
        w += NESTEROV ? momentum * v[0] - step : v[0];
    }
};

// You, Gitman, Ginsburg, arXiv:1708.03888, equation 6
template <bool NESTEROV>
struct Lars : Sgd<NESTEROV> {
    static constexpr NormsOf NORMS_OF = GRADIENT;
    float trust_coefficient;

    __device__ explicit Lars(const State &state) : Sgd<NESTEROV>(state), trust_coefficient(state.constants[1]) {}

    __device__ float trust(float w, float g, float decay) const { return trust_coefficient * w / (g + decay * w); }
};

// Loshchilov and Hutter, arXiv:1711.05101, algorithm 2
struct AdamW {
    static constexpr int SLOTS = 2;
    static constexpr NormsOf NORMS_OF = NOTHING;
    float beta1, rest1, beta2, rest2, epsilon;  // rest: 1 - beta
    float correction1, correction2;             // 1 - beta^t

    __device__ explicit AdamW(const State &state)
        : beta1(state.constants[0]), rest1(state.constants[1]), beta2(state.constants[3]), rest2(state.constants[4]),
          epsilon(state.constants[6]) {
        const float t = state.updates + 1;
        correction1 = -expm1f(t * state.constants[2]);  // state.constants[2] and [5] are log(beta1) and log(beta2)
        correction2 = -expm1f(t * state.constants[5]);
    }

    __device__ void accumulate(float g, float (&s)[SLOTS]) const {
        s[0] = beta1 * s[0] + rest1 * g;
        s[1] = beta2 * s[1] + rest2 * g * g;
    }

    __device__ float direction(float w, const float (&s)[SLOTS], float decay) const {
        return s[0] / correction1 / (sqrtf(s[1] / correction2) + epsilon) + decay * w;
    }

    __device__ void update(float &w, float g, float (&s)[SLOTS], float rate, float decay) const {
        accumulate(g, s);
        w -= rate * direction(w, s, decay);
    }
};

// You et al., arXiv:1904.00962, algorithm 2
struct Lamb : AdamW {
    static constexpr NormsOf NORMS_OF = UPDATE;

    __device__ explicit Lamb(const State &state) : AdamW(state) {}

    __device__ float trust(float w, float update, float) const { return w / update; }

    __device__ void update(float &w, float, float (&s)[SLOTS], float rate, float decay) const {
        w -= rate * direction(w, s, decay);
    }
};

// Chen et al., arXiv:2302.06675, algorithm 2
struct Lion {
    static constexpr int SLOTS = 1;
    static constexpr NormsOf NORMS_OF = NOTHING;
    float beta1, rest1, beta2, rest2;  // rest: 1 - beta

    __device__ explicit Lion(const State &state)
        : beta1(state.constants[0]), rest1(state.constants[1]), beta2(state.constants[2]), rest2(state.constants[3]) {}

    __device__ void update(float &w, float g, float (&s)[SLOTS], float rate, float decay) const {
        const float c = beta1 * s[0] + rest1 * g;
        const float sign = c > 0 ? 1.f : c < 0 ? -1.f : c;  // the last case is 0 or NaN; NaN must reach the loss
        s[0] = beta2 * s[0] + rest2 * g;
        w -= rate * (sign + decay * w);
    }
};

// Tieleman and Hinton, 2012, with epsilon inside the root as in TensorFlow
struct RmsProp {
    static constexpr int SLOTS = 2;
    static constexpr NormsOf NORMS_OF = NOTHING;
    float rho, rest, momentum, epsilon;  // rest: 1 - rho

    __device__ explicit RmsProp(const State &state)
        : rho(state.constants[0]), rest(state.constants[1]), momentum(state.constants[2]), epsilon(state.constants[3]) {}

    __device__ void update(float &w, float g, float (&s)[SLOTS], float rate, float decay) const {
        g += decay * w;
        s[0] = rho * s[0] + rest * g * g;
        s[1] = momentum * s[1] + rate * g / sqrtf(s[0] + epsilon);
        w -= s[1];
    }
};

// --- the launches of a step ---

template <class T> __device__ inline void load_gradient(const Tensor &t, uint32 at, float (&g)[VEC]) {
    if (t.fp32_gradient) load_floats(static_cast<const float *>(t.gradient) + at, g);
    else unpack(load(static_cast<const T *>(t.gradient) + at), g);
}

// ema = decay * ema + (1 - decay) * values
__device__ inline void update_ema(float *ema, const float (&values)[VEC], float decay) {
    float a[VEC];
    load_floats(ema, a);
#pragma unroll
    for (int k = 0; k < VEC; ++k) a[k] = decay * a[k] + (1 - decay) * values[k];
    store_floats(ema, a);
}

// Sets state->overflow if a gradient is not finite. Also writes sums of squares of each chunk to norms (chunks, 2): with
// WEIGHT_NORMS of the weights in the first column, for LARS; with GRADIENT_NORMS of the gradients in the second column, for
// LARS and clipping.
// Shapes: tensors (number of tensors), chunks (gridDim.x), state (1), norms (gridDim.x, 2) fp32.
template <class T, bool WEIGHT_NORMS, bool GRADIENT_NORMS>
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
        if (WEIGHT_NORMS) load_floats(t.master + at, w);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            finite &= fabsf(g[k]) < INF;
            if (WEIGHT_NORMS) weight_squares += w[k] * w[k];
            if (GRADIENT_NORMS) gradient_squares += g[k] * g[k];
        }
    }
    if (!finite) state->overflow = 1;
    if (WEIGHT_NORMS) weight_squares = block_reduce(weight_squares, 0.f, Sum());
    if (GRADIENT_NORMS) gradient_squares = block_reduce(gradient_squares, 0.f, Sum());
    if (threadIdx.x == 0) {
        if (WEIGHT_NORMS) norms[2 * blockIdx.x] = weight_squares;
        if (GRADIENT_NORMS) norms[2 * blockIdx.x + 1] = gradient_squares;
    }
}

// Clipping by global norm (Pascanu et al., arXiv:1211.5063, algorithm 1). Multiplies the factor of all gradients by
// min(1, clip_norm / (|gradient| + 1e-6)), computed from the sums of inspect_gradients. |gradient| is the norm of the
// mean gradient, without the loss scale; the 1e-6 is from torch.nn.utils.clip_grad_norm_. The kernel runs in one block,
// which adds in a fixed order.
// Shapes: state (1), norms (num_chunks, 2) fp32.
__global__ void __launch_bounds__(THREADS) clip_gradients(State *state, const float *norms, uint32 num_chunks) {
    float squares = 0;
    for (uint32 c = threadIdx.x; c < num_chunks; c += THREADS) squares += norms[2 * c + 1];
    squares = block_reduce(squares, 0.f, Sum());
    if (threadIdx.x == 0 && !state->overflow) {
        state->gradient_norm = sqrtf(squares) * (state->gradient_scale / state->loss_scale);
        // the host resets gradient_scale for each step
        state->gradient_scale *= fminf(1.f, state->clip_norm / (state->gradient_norm + 1e-6f));
    }
}

template <int SLOTS> __device__ inline void load_state(const Tensor &t, uint32 at, float (&s)[SLOTS][VEC]) {
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) load_floats(t.state[slot] + at, s[slot]);
}

template <int SLOTS> __device__ inline void store_state(const Tensor &t, uint32 at, const float (&s)[SLOTS][VEC]) {
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) store_floats(t.state[slot] + at, s[slot]);
}

// Updates the optimizer state from this step's gradients. Also writes sums of squares of each chunk to norms (chunks, 2): of
// the weights, and of the term that the learning rate will multiply. Only for rules with the norms of UPDATE.
// Shapes: tensors (number of tensors), chunks (gridDim.x), state (1), norms (gridDim.x, 2) fp32.
template <class T, class Rule>
__global__ void __launch_bounds__(THREADS)
accumulate(const Tensor *tensors, const Chunk *chunks, const State *state, float *norms) {
    const Chunk chunk = chunks[blockIdx.x];
    const Tensor t = tensors[chunk.tensor];
    if (state->overflow) return;
    const uint32 end = min(t.size, chunk.start + CHUNK);
    const Rule rule(*state);
    const float unscale = state->gradient_scale / state->loss_scale;
    float weight_squares = 0, update_squares = 0;
    for (uint32 at = chunk.start + threadIdx.x * VEC; at < end; at += THREADS * VEC) {
        float g[VEC], w[VEC], s[Rule::SLOTS][VEC];
        load_gradient<T>(t, at, g);
        load_floats(t.master + at, w);
        load_state(t, at, s);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            float kept[Rule::SLOTS];
#pragma unroll
            for (int slot = 0; slot < Rule::SLOTS; ++slot) kept[slot] = s[slot][k];
            rule.accumulate(g[k] * unscale, kept);
            const float update = rule.direction(w[k], kept, t.weight_decay);
            weight_squares += w[k] * w[k];
            update_squares += update * update;
#pragma unroll
            for (int slot = 0; slot < Rule::SLOTS; ++slot) s[slot][k] = kept[slot];
        }
        store_state(t, at, s);
    }
    weight_squares = block_reduce(weight_squares, 0.f, Sum());
    update_squares = block_reduce(update_squares, 0.f, Sum());
    if (threadIdx.x == 0) {
        norms[2 * blockIdx.x] = weight_squares;
        norms[2 * blockIdx.x + 1] = update_squares;
    }
}

// trust[t] = the factor of tensor t's learning rate: the rule's ratio for weights; 1 for other tensors, or if a norm is
// 0. One block per tensor.
// Shapes: tensors (gridDim.x), state (1), norms (chunks, 2), trust (gridDim.x) fp32.
template <class Rule>
__global__ void trust_ratios(const Tensor *tensors, const State *state, const float *norms, float *trust) {
    const Tensor t = tensors[blockIdx.x];
    float weight_squares = 0, other_squares = 0;
    for (uint32 c = threadIdx.x; c < t.num_chunks; c += blockDim.x) {
        weight_squares += norms[2 * (t.first_chunk + c)];
        other_squares += norms[2 * (t.first_chunk + c) + 1];
    }
    const float unscale = Rule::NORMS_OF == GRADIENT ? state->gradient_scale / state->loss_scale : 1.f;
    const float w = sqrtf(block_reduce(weight_squares, 0.f, Sum()));
    const float other = sqrtf(block_reduce(other_squares, 0.f, Sum())) * unscale;
    if (threadIdx.x == 0) {
        const bool adapt = t.is_weight && w > 0 && other > 0;
        trust[blockIdx.x] = adapt ? Rule(*state).trust(w, other, t.weight_decay) : 1;
    }
}

// Updates the weights and the optimizer state by the rule. Then updates the moving average of the weights, even if the
// step is skipped, because the host counts skipped steps, too.
// Shapes: tensors (number of tensors), chunks (gridDim.x), state (1), trust (number of tensors) fp32.
template <class T, class Rule>
__global__ void __launch_bounds__(THREADS)
update(const Tensor *tensors, const Chunk *chunks, const State *state, const float *trust) {
    constexpr bool ACCUMULATED = Rule::NORMS_OF == UPDATE;  // the optimizer state was updated by an earlier launch
    const Chunk chunk = chunks[blockIdx.x];
    const Tensor t = tensors[chunk.tensor];
    const bool skip = state->overflow;
    if (skip && !t.ema) return;
    const uint32 end = min(t.size, chunk.start + CHUNK);
    const Rule rule(*state);
    const float rate = state->learning_rate * t.rate_factor * (Rule::NORMS_OF == NOTHING ? 1.f : trust[chunk.tensor]);
    const float unscale = state->gradient_scale / state->loss_scale;
    for (uint32 at = chunk.start + threadIdx.x * VEC; at < end; at += THREADS * VEC) {
        float g[VEC] = {}, w[VEC], s[Rule::SLOTS][VEC];
        load_floats(t.master + at, w);
        if (!skip) {
            if (!ACCUMULATED) load_gradient<T>(t, at, g);
            load_state(t, at, s);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                float kept[Rule::SLOTS];
#pragma unroll
                for (int slot = 0; slot < Rule::SLOTS; ++slot) kept[slot] = s[slot][k];
                rule.update(w[k], g[k] * unscale, kept, rate, t.weight_decay);
#pragma unroll
                for (int slot = 0; slot < Rule::SLOTS; ++slot) s[slot][k] = kept[slot];
            }
            if (!ACCUMULATED) store_state(t, at, s);
            store_floats(t.master + at, w);
            if (t.copy) store(static_cast<T *>(t.copy) + at, pack<T>(w));
        }
        if (t.ema) update_ema(t.ema + at, w, state->ema_decay);
    }
}

// Updates the moving average of the running statistics; `size` is a multiple of VEC.
// Shapes: statistics, ema (size) fp32; state (1).
__global__ void ema_statistics(const float *statistics, float *ema, const State *state, uint32 size) {
    const uint32 at = (blockIdx.x * blockDim.x + threadIdx.x) * VEC;
    if (at >= size) return;
    float values[VEC];
    load_floats(statistics + at, values);
    update_ema(ema + at, values, state->ema_decay);
}

// Ends a step, after the update: halves the loss scale after an overflow, doubles it after growth_interval good steps
// in a row (Micikevicius et al., arXiv:1710.03740, section 3.2). One thread.
// Shapes: state (1).
__global__ void end_step(State *state) {
    if (state->overflow) {
        state->overflow = 0;
        state->skipped_steps += 1;
        state->skipped_in_a_row += 1;
        state->good_steps = 0;
        if (state->growth_interval) state->loss_scale = fmaxf(1.f, state->loss_scale / 2);
        return;
    }
    state->skipped_in_a_row = 0;
    state->good_steps += 1;
    state->updates += 1;
    if (state->growth_interval && state->good_steps >= state->growth_interval) {
        state->loss_scale = fminf(16777216.f, state->loss_scale * 2);  // 2^24, as in NVIDIA's Apex
        state->good_steps = 0;
    }
}

// Copies the master weights to the network's own weights, after the parameters have been set.
// Shapes: tensors (number of tensors), chunks (gridDim.x).
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
