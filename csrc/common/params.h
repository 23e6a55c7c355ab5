// What the two passes over S are asked to do: plain structs that room 3 fills and room 4 reads.
//
// S_ij = logit_scale <x_i, y_j> x_inv_norm_i y_inv_norm_j; t(i) = target[i], or
// target_offset + i * target_stride without a target. Rows of x and y start on 16-byte boundaries.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"

namespace infloss {

// How the tensor cores see the features. float32 takes three TF32 products, which keep its
// accuracy, or, for S, one.
enum class Arithmetic { f16, bf16, tf32, tf32x3 };

// Which kernels: of compute capability 8.0 and later, or of 9.0.
enum class Path { sm80, sm90 };

struct PairParams {
    const void* x;             // [m, dim]
    const void* y;             // [n, dim]
    const float* logit_scale;  // []
    const float* x_inv_norm;   // [m], or null: 1
    const float* y_inv_norm;   // [n], or null: 1
    const int64_t* target;     // [m], or null
    int64_t m, n, dim;
    int64_t x_stride, y_stride;  // elements between rows
    int64_t target_offset, target_stride;
    Arithmetic arithmetic;
    Path path;
    int64_t workspace_limit;  // bytes of tiles and slots, beyond vectors and accumulators
    void* workspace;          // as many bytes as the launcher's *_workspace_bytes says
    cudaStream_t stream;
};

struct LseParams {
    PairParams pair;
    float* row_stats;  // [2, m] (max, sum of exp(s - max)), or null
    float* col_stats;  // [2, n], or null; then target is null
    float* positive;   // [m] S_{i,t(i)}; unwritten where t(i) is no column: the caller presets NaN
    float* row_hardest;  // [m] largest S_ij, j != t(i), or null
    float* col_hardest;  // [n], or null
};

struct GradParams {
    PairParams pair;
    const float* row_stats;      // [2, m], or null: no row term
    const float* row_weight;     // [m], u
    const float* col_stats;      // [2, n], or null: no column term
    const float* col_weight;     // [n], v
    const float* target_weight;  // [m], w
    const float* centre;         // [], or null: 0
    const void* x_input;         // [m, dim] of input_dtype, what dx is the gradient of
    const void* y_input;         // [n, dim]
    int64_t x_input_stride, y_input_stride;
    DType input_dtype;
    void* dx;       // [m, dim] of input_dtype, contiguous, or null
    void* dy;       // [n, dim], or null
    float* dscale;  // [], or null
};

}  // namespace infloss
