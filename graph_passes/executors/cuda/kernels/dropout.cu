// Dropout of whole images (stochastic depth, per sample) and of single elements. The seed alone determines which images
// or elements are dropped.
//
// An image or element is kept if its random word is at least `threshold` = p * 2^32, and is then multiplied by `scale` = 1 /
// (1 - p).
#include "common.cuh"
#include "philox.cuh"

constexpr int MAX_DROPOUTS = 128;  // limit of per-image Dropouts in a network

struct Rates {
    uint32 threshold[MAX_DROPOUTS];
    float scale[MAX_DROPOUTS];
    uint32 number[MAX_DROPOUTS];  // number of each Dropout, which gives each Dropout its own random bits
};

// Computes the factor of each image in each Dropout. One thread per factor. With `per_batch` all images have the factor
// of the first image.
// Shapes: seed (2); factors (dropouts, N) fp32, with images = N.
__global__ void dropout_factors(const uint32 *seed, float *factors, Rates rates, uint32 dropouts, uint32 images, bool per_batch) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x, row = at / images;
    if (row >= dropouts) return;
    const uint32 word = random_word(per_batch ? 0 : at % images, rates.number[row], seed[0], seed[1]);
    factors[at] = word >= rates.threshold[row] ? rates.scale[row] : 0;
}

// y = x times its image's factor; `first` is the index of the first image's factor. y may alias x.
// Shapes: x, y (N, H*W*C / 8) vectors; factors (dropouts, N) fp32. vectors: number of vectors of x; image_vectors =
// H*W*C / 8.
template <class T>
__global__ void dropout_images(const Packed<T> *x, const float *factors, Packed<T> *y, uint32 first, uint32 vectors,
                               uint32 image_vectors) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    const float factor = factors[first + at / image_vectors];
    float v[VEC];
    unpack(x[at], v);
#pragma unroll
    for (int k = 0; k < VEC; ++k) v[k] *= factor;
    y[at] = pack<T>(v);
}

// y = x * scale if the element is kept, otherwise 0. y may alias x.
// Shapes: seed (2); x, y (8 * vectors).
template <class T>
__global__ void dropout_elements(const Packed<T> *x, const uint32 *seed, Packed<T> *y, uint32 threshold, float scale,
                                 uint32 number, uint32 vectors) {
    const uint32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= vectors) return;
    float v[VEC];
    unpack(x[at], v);
#pragma unroll
    for (int k = 0; k < VEC; ++k) v[k] *= random_word(at * VEC + k, number, seed[0], seed[1]) >= threshold ? scale : 0;
    y[at] = pack<T>(v);
}
