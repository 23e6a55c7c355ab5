// What surrounds the tile kernels of a backward pass, for every architecture: each row's and
// column's part in G, mean features, and the step from accumulated rows to an input's gradient.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/params.h"

namespace infloss {

namespace pair {
struct Side;
}

// The power of two that G is stored in units of: 1, but for float16, whose range is narrow, one
// that brings the largest coefficient that can occur near 2^14.
void launch_unit(const GradParams& params, float* unit);

// rows [m] and cols [n], weights in `unit`s.
void launch_sides(const GradParams& params, const float* unit, pair::Side* rows, pair::Side* cols);

struct UnitMeanParams {
    const void* x;          // [rows, dim] of dtype
    const float* inv_norm;  // [rows], or null: 1
    float* mean;            // [dim]
    float* partials;        // [kMeanParts, dim]
    int64_t rows, dim;
    int64_t row_stride;  // elements
    DType dtype;
    cudaStream_t stream;
};

constexpr int64_t kMeanParts = 256;

// mean_d = sum_j inv_norm_j x_jd / rows.
void launch_unit_mean(const UnitMeanParams& params);

struct FinishRowsParams {
    const float* acc;          // [rows, acc_ld]: inv_norm_i sum_j G_ij y_j / ||y_j||, in units
    const void* x;             // [rows, dim] of dtype
    void* out;                 // [rows, dim] of dtype, contiguous; may be acc
    const float* inv_norm;     // [rows], or null: rows were not normalised
    const float* logit_scale;  // []
    const float* unit;         // []
    int64_t rows, dim;
    int64_t acc_ld, x_stride;
    DType dtype;
    cudaStream_t stream;
};

// out_i = logit_scale * (acc_i, less its component along x_i where rows were normalised).
void launch_finish_rows(const FinishRowsParams& params);

// dscale = sum of slots [count] / unit, added up in a fixed order.
void launch_scale_gradient(const float* slots, int64_t count, const float* unit, float* dscale,
                           cudaStream_t stream);

}  // namespace infloss
