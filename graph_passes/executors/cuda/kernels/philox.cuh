// Random bits: Philox4x32-10 (Salmon et al., 'Parallel random numbers: as easy as 1, 2, 3', SC'11).
#pragma once

// The first output word of Philox for the counter (element, number, 0, 0) and a two-word key, like `philox` of
// operators/dropout.py.
__device__ inline uint32 random_word(uint32 element, uint32 number, uint32 key_0, uint32 key_1) {
    uint32 counter[4] = {element, number, 0, 0};
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64 first = uint64(0xD2511F53u) * counter[0], second = uint64(0xCD9E8D57u) * counter[2];
        counter[0] = uint32(second >> 32) ^ counter[1] ^ key_0;
        counter[1] = uint32(second);
        counter[2] = uint32(first >> 32) ^ counter[3] ^ key_1;
        counter[3] = uint32(first);
        key_0 += 0x9E3779B9u;
        key_1 += 0xBB67AE85u;
    }
    return counter[0];
}
