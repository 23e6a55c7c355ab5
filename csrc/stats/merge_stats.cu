// Merge of partial log-sum-exps: one thread a row walks its partials in order, so the result does
// not depend on the launch.

#include <algorithm>
#include <string>

#include "common/check.h"
#include "common/pair.cuh"
#include "stats/launch.h"

namespace infloss {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 16;

// Sum relative to another maximum; equal maxima may both be infinite.
__device__ double rescaled(double max, double sum, double top) {
    return max == top ? sum : sum * exp(max - top);
}
__device__ float rescaled(float max, float sum, float top) {
    return pair::rescaled(max, sum, top);
}

template <typename T>
__global__ void merge_stats_kernel(T* stats, const T* partials, int64_t rows, int64_t count,
                                   int64_t stats_stride, int64_t partial_stride,
                                   int64_t part_stride, bool overwrite, const int* only_if) {
    if (only_if != nullptr && *only_if == 0) return;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
    for (int64_t row = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; row < rows;
         row += threads) {
        T max = overwrite ? T(-INFINITY) : stats[row];
        T sum = overwrite ? T(0) : stats[stats_stride + row];
#pragma unroll 8
        for (int64_t k = 0; k < count; ++k) {
            const T* partial = partials + k * partial_stride + row;
            const T other_max = partial[0];
            const T top = other_max > max ? other_max : max;
            sum = rescaled(max, sum, top) + rescaled(other_max, partial[part_stride], top);
            max = top;
        }
        stats[row] = max;
        stats[stats_stride + row] = sum;
    }
}

template <typename T>
void launch(const MergeStatsParams& p) {
    const int64_t blocks = std::min((p.rows + kThreads - 1) / kThreads, kMaxBlocks);
    merge_stats_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, p.stream>>>(
        static_cast<T*>(p.stats), static_cast<const T*>(p.partials), p.rows, p.count,
        p.stats_stride, p.partial_stride, p.part_stride, p.overwrite, p.only_if);
    INFLOSS_LAUNCH_CHECK("merge_stats_kernel on [" + std::to_string(p.count) + ", 2, " +
                         std::to_string(p.rows) + "]");
}

}  // namespace

void launch_merge_stats(const MergeStatsParams& params) {
    if (params.rows == 0 || params.count == 0) return;
    if (params.dtype == DType::f64) {
        launch<double>(params);
    } else {
        launch<float>(params);
    }
}

}  // namespace infloss
