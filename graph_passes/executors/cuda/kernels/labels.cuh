// The targets of softmax.cu and sigmoid.cu: an image's label and, if images are mixed, its partner's label.
#pragma once
#include "common.cuh"

struct Labels {
    int label, partner;
    float own;   // weight of `label`; the partner has the rest
    bool valid;  // whether both labels are classes
    int ranked;  // the label with the larger weight; if equal, the smaller label
};

// The labels of the block's row; one block per row. As in MXNet's SoftmaxOutput, targets are 1 - smoothing for the label and
// smoothing / (classes - 1) for every other class. If images are mixed (`own_share` is not null and below 1), a row's target
// is
//     own_share * (target for its label) + (1 - own_share) * (target for its partner)
// The partner is the label of the row at the mirrored position, counted from the end.
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
