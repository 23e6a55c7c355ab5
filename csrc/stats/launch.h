// O(B) statistics kernels that every path shares: row norms, the merge of partial log-sum-exps, and
// the positives that join them.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/params.h"

namespace infloss {

struct InvNormParams {
    const void* x;  // [rows, dim] of dtype, unit column stride
    void* out;      // [rows] float, or double for f64
    int64_t rows;
    int64_t dim;
    int64_t row_stride;  // elements
    DType dtype;
    cudaStream_t stream;
};

// out[i] = 1 / ||x_i||, and 0 where the norm is at most 1e-12.
void launch_inv_norm(const InvNormParams& params);

struct MergeStatsParams {
    void* stats;           // [2, rows] (max, sum of exp(s - max)), f32 or f64; updated in place
    const void* partials;  // [count, 2, rows]
    int64_t rows;
    int64_t count;
    int64_t stats_stride;    // elements between max and sum
    int64_t partial_stride;  // elements between partials
    int64_t part_stride;     // elements between a partial's max and sum
    bool overwrite;          // stats hold nothing yet
    const int* only_if;      // [] not 0, or null: always
    DType dtype;
    cudaStream_t stream;
};

// Merges the partials into stats in their order.
void launch_merge_stats(const MergeStatsParams& params);

// Joins the positives to row_stats and col_stats of their negatives, in place; before that, writes
// the negatives' maxima to row_hardest and col_hardest where those are wanted.
void launch_join_positives(const LseParams& params);

}  // namespace infloss
