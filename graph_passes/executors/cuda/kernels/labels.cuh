// What the classifier is to say of an image, for softmax.cu and sigmoid.cu: its label and, where images are mixed, another's.
#pragma once
#include "common.cuh"

struct Labels {
    int label, partner;
    float own;   // the label's share
    bool valid;  // whether both are classes
    int ranked;  // the one with the larger share, of equal shares the smaller
};

// Of the block's row, one block a row. Targets are 1 - smoothing for the label and smoothing / (classes - 1) for every other
// class, as MXNet's SoftmaxOutput has them. Where images are mixed (`own_share` not null and below 1) a row's target is
// `*own_share` of that for its label and the rest of that for its partner: the label of the row at the same place from the end.
// Shapes: labels (N), own_share (1) fp32.
__device__ inline Labels labels_of_row(const float *labels, const float *own_share, int classes) {
    const int row = blockIdx.x;
    const int label = labels ? int(labels[row]) : -1;
    const float own = own_share ? *own_share : 1;
    const int partner = own < 1 ? int(labels[gridDim.x - 1 - row]) : label;
    const bool valid = label >= 0 && label < classes && partner >= 0 && partner < classes;
    const int ranked = own > 0.5f || (own == 0.5f && label < partner) ? label : partner;
    return {label, partner, own, valid, ranked};
}
