// Puts the positives into the log-sum-exps of the negatives. Where a positive outweighs them it
// becomes the maximum and its own term exactly 1, so that a well-matched pair's loss, the logarithm
// of the sum, keeps the digits of its negatives and is never below zero.

#include <algorithm>
#include <string>

#include "common/check.h"
#include "common/pair.cuh"
#include "common/panel.h"
#include "stats/launch.h"

namespace infloss {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 16;

// Writes a log-sum-exp of no dominant term. A maximum shared with other rows may lie far above its
// own terms; it is brought down to where they are, so that what reads the pair may rely on it.
__device__ void write(float* stats, int64_t size, int64_t i, float max, float sum) {
    const float top = sum > 0 && sum < 1 ? max + logf(sum) : max;
    stats[i] = top;
    stats[size + i] = pair::rescaled(max, sum, top);
}

__device__ void join(float* stats, float* hardest, int64_t size, int64_t i, float positive) {
    const float max = stats[i], sum = stats[size + i];
    if (hardest != nullptr) hardest[i] = isnan(sum) ? sum : max;
    const float negatives = pair::rescaled(max, sum, positive);
    if (isnan(positive)) {
        write(stats, size, i, max, sum);
    } else if (negatives <= 1) {
        stats[i] = positive;
        stats[size + i] = 1 + negatives;
    } else {
        write(stats, size, i, max, sum + pair::term(positive, max));
    }
}

// Row whose positive is column j, or -1.
__device__ int64_t row_of(const LseParams& p, int64_t j) {
    const int64_t distance = j - p.pair.target_offset;
    if (distance < 0 || distance % p.pair.target_stride != 0) return -1;
    const int64_t row = distance / p.pair.target_stride;
    return row < p.pair.m ? row : -1;
}

__global__ void join_positives_kernel(LseParams p) {
    const int64_t stride = int64_t{gridDim.x} * kThreads;
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < p.pair.m + p.pair.n;
         i += stride) {
        if (i < p.pair.m) {
            if (p.row_stats != nullptr)
                join(p.row_stats, p.row_hardest, p.pair.m, i, p.positive[i]);
        } else if (p.col_stats != nullptr) {
            const int64_t j = i - p.pair.m, row = row_of(p, j);
            join(p.col_stats, p.col_hardest, p.pair.n, j, row < 0 ? NAN : p.positive[row]);
        }
    }
}

}  // namespace

void launch_join_positives(const LseParams& params) {
    const int64_t blocks = std::min(ceil_div(params.pair.m + params.pair.n, kThreads), kMaxBlocks);
    join_positives_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, params.pair.stream>>>(
        params);
    INFLOSS_LAUNCH_CHECK("join_positives_kernel on " + std::to_string(params.pair.m) + " x " +
                         std::to_string(params.pair.n));
}

}  // namespace infloss
