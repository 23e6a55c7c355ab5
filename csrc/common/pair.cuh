// The pair policy of the contrastive losses: how a similarity s becomes a term of a log-sum-exp,
// and how it becomes a coefficient G of the gradient. Tile kernels of every architecture call it
// from their epilogues; a loss of another form is another such policy.
//
// A log-sum-exp is a pair (max, sum of exp(s - max)). The difference s - max is taken first and
// scaled to a power of two after: so the maximum's own term is exactly 1.
//
// One exponential serves a row and a column where both can share a reference: kSharedRange says how
// far a reference may lie above a row's or column's own without loss: a factor of 2^80, where
// float32 has 2^126; a term that is lost is less than 2^-46 of a sum, which is at least 2^-80.

#pragma once

#include <cmath>
#include <cstdint>

#include "ptx/ampere.cuh"

namespace infloss::pair {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kSharedRange = 80 / kLog2E;  // of similarities
constexpr float kSharedFloor = 0x1p-80f;     // of sums

__device__ __forceinline__ float cosine(float product, float x_inv_norm, float y_inv_norm) {
    return product * (x_inv_norm * y_inv_norm);
}

// A product of its own: fused into a later subtraction, s would differ from the s that is a
// maximum.
__device__ __forceinline__ float similarity(float cosine, float logit_scale) {
    return __fmul_rn(cosine, logit_scale);
}

// exp(s - reference).
__device__ __forceinline__ float term(float s, float reference) {
    return ptx::exp2_approx((s - reference) * kLog2E);
}

// The reference for a group of similarities whose largest is `max`: 0 for a group of none.
__device__ __forceinline__ float reference(float max) {
    return max == -INFINITY ? 0.0f : max;
}

// A sum relative to another maximum; equal maxima may both be infinite.
__device__ __forceinline__ float rescaled(float max, float sum, float top) {
    return max == top ? sum : sum * term(max, top);
}

// One row's (or column's) part in G: weight exp(s - max), weight = upstream / sum.
struct Side {
    float inv_norm;
    float max;
    float weight;
    float target_weight;  // subtracted at the positive; of rows only
};

// Coefficient from each side's own exponential; the positive's less its target_weight.
__device__ __forceinline__ float coefficient(float s, const Side& row, const Side& col) {
    return term(s, row.max) * row.weight + term(s, col.max) * col.weight;
}

// The same from one exponential, a power of two, against a reference that both share; the weights
// are theirs against it.
__device__ __forceinline__ float shared_coefficient(float power, float row_weight,
                                                    float col_weight) {
    return ptx::exp2_approx(power) * (row_weight + col_weight);
}

// Weight of a side against a shared reference.
__device__ __forceinline__ float shared_weight(const Side& side, float reference) {
    return side.weight * term(reference, side.max);
}

// What does not belong to S: no weight, and infinitely far below any reference.
__device__ __forceinline__ Side no_side() {
    return {0, INFINITY, 0, 0};
}

// Norm that belongs to an inverse.
__device__ __forceinline__ float norm_of(float inv_norm) {
    return inv_norm > 0 ? __fdividef(1, inv_norm) : 0;
}
__device__ __forceinline__ float norm_of(const Side& side) {
    return norm_of(side.inv_norm);
}

// Column of row i's positive.
__device__ __forceinline__ int64_t target_of(int64_t i, const int64_t* target, int64_t offset,
                                             int64_t stride) {
    return target != nullptr ? target[i] : offset + i * stride;
}

}  // namespace infloss::pair
