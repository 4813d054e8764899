// Embedding: gathers rows of a matrix by number; and the gradient of the matrix.
#include "common.cuh"

// The row of a token; numbers out of range are clamped.
__device__ inline uint32 row_of(float token, uint32 words) {
    return uint32(fminf(fmaxf(token, 0.0f), float(words - 1)));
}

// y = weight[tokens]; one thread per vector.
// Shapes: tokens (count), fp32; weight (words, C); y (count, C), with C = 8 * row_vectors.
template <class T>
__global__ void embedding(const float *tokens, const Packed<T> *weight, Packed<T> *y, uint32 vectors, uint32 row_vectors,
                          uint32 words) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    y[at] = weight[row_of(tokens[at / row_vectors], words) * row_vectors + at % row_vectors];
}

// dweight[word] = sum of dy over all tokens equal to `word`, in the order of the tokens, so equal inputs give equal
// bits. blockIdx.x is the word, blockIdx.y a tile of its channels. Each lane of a warp compares one of 32 tokens; then
// all lanes add the rows of the matching tokens.
// Shapes: dy (count, C), tokens (count), fp32; dweight (words, C), with C = 8 * row_vectors.
template <class T>
__global__ void embedding_wgrad(const Packed<T> *dy, const float *tokens, Packed<T> *dweight, uint32 count,
                                uint32 row_vectors, uint32 words) {
    const uint32 word = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x, lane = threadIdx.x % WARP;
    float sum[VEC] = {}, v[VEC];
    for (uint32 first = 0; first < count; first += WARP) {
        const bool is_it = first + lane < count && row_of(tokens[first + lane], words) == word;
        for (uint32 found = __ballot_sync(0xffffffff, is_it); found; found &= found - 1) {
            if (column >= row_vectors) continue;
            unpack(dy[(first + __ffs(found) - 1) * row_vectors + column], v);
#pragma unroll
            for (int k = 0; k < VEC; ++k) sum[k] += v[k];
        }
    }
    if (column < row_vectors) dweight[word * row_vectors + column] = pack<T>(sum);
}
