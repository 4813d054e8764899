// Synchronised BatchNorm: the GPUs of a group exchange their statistics directly, without the host.
//
// Every member has a mailbox that all members can write. A word of it is a float and the number of its exchange, stored
// together as 64 bits. A reader that finds the expected number therefore has the float, too, without flags or fences.
// (NCCL's LL protocol does the same.) A mailbox has two halves, for even and odd exchanges. A member writes words of
// exchange n + 2 only after it has received all words of exchange n + 1. The other members send words of exchange n + 1
// only after they have read all words of exchange n, so no unread word is overwritten.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int MAX_ARRAYS = 4, MAX_VALUES = 8192;  // words of one exchange
constexpr int MAX_MEMBERS = 16;
constexpr int SPINS = 256;  // number of polls of a word between two readings of the clock

struct Mailboxes { uint64 *of[MAX_MEMBERS]; };

// Address of a member's word in a mailbox of a group of `size`.
__device__ inline uint64 *word_of(uint64 *mailbox, uint32 number, int size, int member, int array, int value) {
    return mailbox + (size_t(number % 2 * size + member) * MAX_ARRAYS + array) * MAX_VALUES + value;
}

__device__ inline void send(uint64 *word, uint32 number, float value) {
    const uint64 bits = uint64(number) << 32 | __float_as_uint(value);
    asm volatile("st.relaxed.sys.u64 [%0], %1;" :: "l"(word), "l"(bits) : "memory");
}

__device__ inline uint64 nanoseconds() {
    uint64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Waits for the float of exchange `number`. Returns NaN after `limit` nanoseconds, and then sets `fault`; also returns NaN
// once another thread has set `fault`.
__device__ inline float receive(const uint64 *word, uint32 number, uint32 *fault, uint64 limit) {
    const uint64 start = nanoseconds();
    while (true) {
#pragma unroll 1
        for (int spin = 0; spin < SPINS; ++spin) {
            uint64 bits;
            asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(bits) : "l"(word) : "memory");
            if (bits >> 32 == number) return __uint_as_float(uint32(bits));
        }
        uint32 given_up;
        asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(given_up) : "l"(fault) : "memory");
        if (!given_up && nanoseconds() - start < limit) continue;
        asm volatile("st.relaxed.sys.u32 [%0], %1;" :: "l"(fault), "r"(1) : "memory");
        return NOT_A_NUMBER;
    }
}

// Sends a float to all other members.
__device__ inline void send_all(const Mailboxes &mailboxes, int own, int size, uint32 number, int array, int value, float v) {
#pragma unroll 1
    for (int i = 1; i < size; ++i) {
        // each member starts with a different receiver, to spread the writes
        uint64 *const mailbox = mailboxes.of[(own + i) % size];
        send(word_of(mailbox, number, size, own, array, value), number, v);
    }
}

// Computes the sums about the mean over all rows of the group. Each member sends its own mean and variance. All members
// compute bit-identical results. `rows` is the number of rows of one member. The other parameters are those of
// group_mean.
// Shapes: sums (2 or 3, C), result (3, C) fp32; numbers (gridDim.x); fault (1).
__global__ void __launch_bounds__(THREADS)
group_statistics(const float *sums, bool about_mean, float *result, uint32 rows, Mailboxes mailboxes, int own, int size,
                 uint32 *numbers, uint32 *fault, uint64 limit, int channels) {
    const uint32 number = numbers[blockIdx.x] + 1;
    const int c = blockIdx.x * THREADS + threadIdx.x;
    if (c < channels) {
        const float from_zero = sums[c] / rows;
        const float own_mean = about_mean ? sums[2 * channels + c] : from_zero;
        const float own_var = fmaxf(sums[channels + c] / rows - from_zero * from_zero, 0.f);
        send_all(mailboxes, own, size, number, 0, c, own_mean);
        send_all(mailboxes, own, size, number, 1, c, own_var);
        const auto of_member = [&](int member, int array, float own_value) {
            const uint64 *const word = word_of(mailboxes.of[own], number, size, member, array, c);
            return member == own ? own_value : receive(word, number, fault, limit);
        };
        // The means are summed about the first member's mean: far from zero, sums about zero would cancel.
        const float pivot = of_member(0, 0, own_mean);
        float sum = 0, var = 0;
#pragma unroll 1
        for (int member = 0; member < size; ++member) {
            const float of_mean = of_member(member, 0, own_mean) - pivot;
            sum += of_mean;
            var += of_member(member, 1, own_var) + of_mean * of_mean;
        }
        result[c] = 0;
        result[channels + c] = (var / size - sum / size * (sum / size)) * rows;
        result[2 * channels + c] = pivot + sum / size;
    }
    __syncthreads();  // all threads have read the number
    if (threadIdx.x == 0) numbers[blockIdx.x] = number;
}

// Replaces the first `values` floats of up to four arrays (the others are null) by their means over the group. The
// values are added in the order of the members, so all members compute bit-identical results. `own` is this GPU's index
// among the `size` members. `numbers` has the number of each block's latest exchange; blocks exchange independently.
// Shapes: a, b, c, d (values) fp32; numbers (gridDim.x); fault (1).
__global__ void __launch_bounds__(THREADS)
group_mean(float *a, float *b, float *c, float *d, Mailboxes mailboxes, int own, int size, uint32 *numbers,
           uint32 *fault, uint64 limit, int values) {
    float *const arrays[MAX_ARRAYS] = {a, b, c, d};
    const uint32 number = numbers[blockIdx.x] + 1;
    const int value = blockIdx.x * THREADS + threadIdx.x;
    if (value < values) {
        float own_value[MAX_ARRAYS];
#pragma unroll
        for (int array = 0; array < MAX_ARRAYS; ++array) {
            if (!arrays[array]) continue;
            own_value[array] = arrays[array][value];
            send_all(mailboxes, own, size, number, array, value, own_value[array]);
        }
#pragma unroll
        for (int array = 0; array < MAX_ARRAYS; ++array) {
            if (!arrays[array]) continue;
            float sum = 0;
#pragma unroll 1
            for (int member = 0; member < size; ++member) {
                const uint64 *const word = word_of(mailboxes.of[own], number, size, member, array, value);
                sum += member == own ? own_value[array] : receive(word, number, fault, limit);
            }
            arrays[array][value] = sum / size;
        }
    }
    __syncthreads();  // all threads have read the number
    if (threadIdx.x == 0) numbers[blockIdx.x] = number;
}
