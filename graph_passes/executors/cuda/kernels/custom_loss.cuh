// The end of a classifier with a plug-in's loss, whose struct Formula precedes this code.
// graph_passes/operators/formula.py writes that struct.
#pragma once

// The bias is added here, in fp32; labels.cuh defines the targets.
template <class T> struct ElementsOfRow {
    struct Element { float score, target; };
    const T *scores;
    const float *bias;
    Labels wanted;
    float smoothing, other;  // smoothing: share of all wrong classes together; other: share of one wrong class

    __device__ Element operator()(int c) const {
        const float hit = wanted.own * (c == wanted.label) + (1 - wanted.own) * (c == wanted.partner);
        return {to_float(scores[c]) + (bias ? bias[c] : 0), other + (1 - smoothing - other) * hit};
    }
};

// One block per row. Arguments, targets, ranks and outputs are those of sigmoid_cross_entropy in sigmoid.cu, with the
// formula's loss, gradient and probabilities.
// Shapes: scores, gradient (N, pitch); bias (K), labels (N), own_share (1), probabilities (N, K), row_loss (N), loss_scale
// (1) fp32; row_rank (N). One row an image, classes = K.
template <class T>
__global__ void custom_loss(const T *scores, const float *bias, const float *labels, const float *own_share,
                            float *probabilities, T *gradient, float *row_loss, int *row_rank, const float *loss_scale,
                            float gradient_scale, float smoothing, int classes, int pitch) {
    const int row = blockIdx.x;
    const float other = classes > 1 ? smoothing / (classes - 1) : 0;
    const ElementsOfRow<T> elements{scores + size_t(row) * pitch, bias, labels_of_row(labels, own_share, classes),
                                    smoothing, other};
    const Formula<ElementsOfRow<T>> formula(elements, classes);
    const int ranked = elements.wanted.ranked;
    const bool valid = elements.wanted.valid;
    const float ranked_score = valid ? elements(ranked).score : 0;
    const float scale = gradient ? gradient_scale * *loss_scale : 0;
    float rank = 0;
    for (int c = threadIdx.x; c < pitch; c += blockDim.x) {
        float slope = 0;
        if (c < classes) {
            const auto element = elements(c);
            rank += element.score > ranked_score || (element.score == ranked_score && c < ranked);
            if (probabilities) probabilities[size_t(row) * classes + c] = formula.probabilities(element);
            if (gradient) slope = formula.gradient(element) * scale;
        }
        if (gradient) gradient[size_t(row) * pitch + c] = from_float<T>(slope);
    }
    rank = block_reduce(rank, 0.f, Sum());
    if (threadIdx.x == 0 && row_loss) {
        row_loss[row] = valid ? formula.loss() : NOT_A_NUMBER;
        row_rank[row] = valid && ranked_score == ranked_score ? int(rank) : classes;
    }
}
