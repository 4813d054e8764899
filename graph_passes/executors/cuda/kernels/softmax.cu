// The end of a classifier: bias, softmax, cross entropy with label smoothing, its gradient, top-1 and top-5.
#include "labels.cuh"

struct Metrics {
    double loss_sum;
    uint64 top1, top5, count;
};

// One block per row. The first `classes` elements of a row of `scores` (rows, pitch) are used; the bias is added here,
// in fp32. labels.cuh defines the targets and the ranked label. With WEIGHTED, each class's target is multiplied by the
// class's weight. Outputs (each is skipped if its pointer is null): probabilities (rows, classes) fp32 gradient (rows,
// pitch): (probability * sum of targets - target) * gradient_scale * *loss_scale, 0 beyond `classes` row_loss (rows):
// cross entropy against the targets; NaN for a label outside the classes, so that the error is noticed
//   row_rank (rows): number of classes ranked before the ranked label: 0 is a top-1 hit, below 5 a top-5 hit
// Shapes: scores, gradient (N, pitch); bias (K), labels (N), own_share (1), probabilities (N, K), row_loss (N), loss_scale
// (1), class_weights (K) fp32; row_rank (N). One row an image, classes = K.
template <class T, bool WEIGHTED>
__global__ void softmax_cross_entropy(const T *scores, const float *bias, const float *labels, const float *own_share,
                                      float *probabilities, T *gradient, float *row_loss, int *row_rank,
                                      const float *loss_scale, float gradient_scale, float smoothing, int classes,
                                      int pitch, const float *class_weights) {
    extern __shared__ float score[];  // scores of this row, later exp(score - maximum)
    const int row = blockIdx.x;
    float largest = -INF;
    for (int c = threadIdx.x; c < classes; c += blockDim.x) {
        score[c] = to_float(scores[size_t(row) * pitch + c]) + (bias ? bias[c] : 0);
        largest = fmaxf(largest, score[c]);
    }
    largest = block_reduce(largest, -INF, Max());

    const auto [label, partner, own, valid, ranked] = labels_of_row(labels, own_share, classes);
    const float ranked_score = valid ? score[ranked] : 0;
    float exp_sum = 0, score_sum = 0, rank = 0, weight_sum = 0;
    for (int c = threadIdx.x; c < classes; c += blockDim.x) {
        exp_sum += expf(score[c] - largest);
        if (WEIGHTED) {
            score_sum += class_weights[c] * (score[c] - largest);
            weight_sum += class_weights[c];
        } else {
            score_sum += score[c] - largest;
        }
        rank += score[c] > ranked_score || (score[c] == ranked_score && c < ranked);
    }
    exp_sum = block_reduce(exp_sum, 0.f, Sum());
    score_sum = block_reduce(score_sum, 0.f, Sum());
    rank = block_reduce(rank, 0.f, Sum());
    weight_sum = WEIGHTED ? block_reduce(weight_sum, 0.f, Sum()) : classes;

    const float other = classes > 1 ? smoothing / (classes - 1) : 0;
    const float label_part = WEIGHTED && valid ? own * class_weights[label] : own;
    const float partner_part = WEIGHTED && valid ? (1 - own) * class_weights[partner] : 1 - own;
    const float parts = WEIGHTED ? label_part + partner_part : 1;
    if (threadIdx.x == 0 && row_loss) {
        // -sum of target * log(probability), with log(probability) = score - largest - log(exp_sum)
        const float log_sum = logf(exp_sum);
        const float label_score = valid ? score[label] : 0, partner_score = valid ? score[partner] : 0;
        const float log_label = label_part * label_score + partner_part * partner_score - parts * largest -
                                parts * log_sum;
        const float log_others = score_sum - weight_sum * log_sum - log_label;
        row_loss[row] = valid ? -(1 - smoothing) * log_label - other * log_others : NOT_A_NUMBER;
        row_rank[row] = valid && ranked_score == ranked_score ? int(rank) : classes;
    }
    const float scale = gradient ? gradient_scale * *loss_scale : 0;
    const float target_sum = WEIGHTED ? (1 - smoothing - other) * parts + other * weight_sum : 1;
    for (int c = threadIdx.x; c < pitch; c += blockDim.x) {
        const float p = c < classes ? expf(score[c] - largest) / exp_sum : 0;
        if (probabilities && c < classes) probabilities[size_t(row) * classes + c] = p;
        if (gradient) {
            const float hit = own * (c == label) + (1 - own) * (c == partner);
            float target = c < classes ? other + (1 - smoothing - other) * hit : 0;
            if (WEIGHTED && c < classes) target *= class_weights[c];
            gradient[size_t(row) * pitch + c] = from_float<T>((p * target_sum - target) * scale);
        }
    }
}

// Adds the first `*num_valid` rows to the metrics, always in the same order. One block.
// Shapes: row_loss (N) fp32; row_rank (N), num_valid (1), metrics (1).
__global__ void add_metrics(const float *row_loss, const int *row_rank, const int *num_valid, Metrics *metrics) {
    __shared__ double loss_of[WARP];
    float top1 = 0, top5 = 0;
    double loss = 0;
    for (int row = threadIdx.x; row < *num_valid; row += blockDim.x) {
        loss += row_loss[row];
        top1 += row_rank[row] < 1;
        top5 += row_rank[row] < 5;
    }
    top1 = block_reduce(top1, 0.f, Sum());
    top5 = block_reduce(top5, 0.f, Sum());
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) loss += __shfl_xor_sync(0xffffffff, loss, d);
    if (threadIdx.x % WARP == 0) loss_of[threadIdx.x / WARP] = loss;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 0; warp < blockDim.x / WARP; ++warp) metrics->loss_sum += loss_of[warp];
        metrics->top1 += uint64(top1);
        metrics->top5 += uint64(top5);
        metrics->count += *num_valid;
    }
}

// bias_gradient[c] = sum of gradient (rows, pitch) over the rows. One block of 32 x 32 threads per 32 classes.
// Shapes: gradient (N, pitch); sum (K) fp32. rows = N, classes = K.
template <class T>
__global__ void bias_gradient(const T *gradient, float *sum, int rows, int classes, int pitch) {
    __shared__ float partial[WARP][WARP + 1];
    const int c = blockIdx.x * WARP + threadIdx.x;
    float total = 0;
    if (c < classes)
        for (int row = threadIdx.y; row < rows; row += WARP) total += to_float(gradient[size_t(row) * pitch + c]);
    partial[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y == 0 && c < classes) {
        total = 0;
        for (int y = 0; y < WARP; ++y) total += partial[y][threadIdx.x];
        sum[c] = total;
    }
}
