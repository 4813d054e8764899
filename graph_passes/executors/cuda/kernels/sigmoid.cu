// The end of a classifier with an independent yes or no per class: bias, sigmoid, binary cross entropy, gradient of the
// loss, hits.
#include "labels.cuh"

// One block per row. Arguments, targets, ranks and outputs are those of softmax_cross_entropy in softmax.cu, except:
//   with `threshold` above 0, targets above the threshold become 1, all other targets 0 probabilities: 1 / (1 +
//   exp(-score)) row_loss: the mean over the classes of -target * log(probability) - (1 - target) * log(1 -
//   probability)
// Shapes: scores, gradient (N, pitch); bias (K), labels (N), own_share (1), probabilities (N, K), row_loss (N), loss_scale
// (1) fp32; row_rank (N). One row an image, classes = K.
template <class T>
__global__ void sigmoid_cross_entropy(const T *scores, const float *bias, const float *labels, const float *own_share,
                                      float *probabilities, T *gradient, float *row_loss, int *row_rank,
                                      const float *loss_scale, float gradient_scale, float smoothing, int classes,
                                      int pitch, float threshold) {
    const int row = blockIdx.x;
    const T *row_scores = scores + size_t(row) * pitch;
    const Labels wanted = labels_of_row(labels, own_share, classes);
    const int ranked = wanted.ranked;
    const bool valid = wanted.valid;
    const float ranked_score = valid ? to_float(row_scores[ranked]) + (bias ? bias[ranked] : 0) : 0;
    const float other = classes > 1 ? smoothing / (classes - 1) : 0;
    const float scale = gradient ? gradient_scale * *loss_scale : 0;
    float loss = 0, rank = 0;
    for (int c = threadIdx.x; c < pitch; c += blockDim.x) {
        float slope = 0;
        if (c < classes) {
            const float score = to_float(row_scores[c]) + (bias ? bias[c] : 0);
            const float hit = wanted.own * (c == wanted.label) + (1 - wanted.own) * (c == wanted.partner);
            float target = other + (1 - smoothing - other) * hit;
            if (threshold > 0) target = target > threshold;
            // Avoids the logarithm of a probability that was rounded to 0 or 1.
            loss += fmaxf(score, 0) - score * target + log1pf(expf(-fabsf(score)));
            rank += score > ranked_score || (score == ranked_score && c < ranked);
            const float p = 1 / (1 + expf(-score));
            if (probabilities) probabilities[size_t(row) * classes + c] = p;
            slope = (p - target) * scale;
        }
        if (gradient) gradient[size_t(row) * pitch + c] = from_float<T>(slope);
    }
    loss = block_reduce(loss, 0.f, Sum());
    rank = block_reduce(rank, 0.f, Sum());
    if (threadIdx.x == 0 && row_loss) {
        row_loss[row] = valid ? loss / classes : NOT_A_NUMBER;
        row_rank[row] = valid && ranked_score == ranked_score ? int(rank) : classes;
    }
}
