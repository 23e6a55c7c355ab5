// The pair policy of the contrastive losses: how a similarity s becomes a term of a log-sum-exp,
// and how it becomes a coefficient G of the gradient. Tile kernels of every architecture call it
// from their epilogues; a loss of another form is another such policy.
//
// A log-sum-exp is a pair (max, sum of exp(s - max)). The difference s - max is taken first and
// scaled to a power of two after: so the maximum's own term is exactly 1.
//
// One exponential serves a row and a column where both can share a reference: SHARED_RANGE says how
// far a reference may lie above a row's or column's own without loss: a factor of 2^80, where
// float32 has 2^126; what is lost is 2^-46 of a sum that is at least 2^-80.

#pragma once

#include <cmath>
#include <cstdint>

namespace infloss::pair {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float SHARED_RANGE = 80 / LOG2_E;  // of similarities
constexpr float SHARED_FLOOR = 0x1p-80f;     // of sums

__device__ __forceinline__ float exp2_approx(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// A product of its own: fused into a later subtraction, s would differ from the s that is a
// maximum.
__device__ __forceinline__ float similarity(float cosine, float logit_scale) {
    return __fmul_rn(cosine, logit_scale);
}

// exp(s - reference).
__device__ __forceinline__ float term(float s, float reference) {
    return exp2_approx((s - reference) * LOG2_E);
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

// Column of row i's positive.
__device__ __forceinline__ int64_t target_of(int64_t i, const int64_t* target, int64_t offset,
                                             int64_t stride) {
    return target != nullptr ? target[i] : offset + i * stride;
}

}  // namespace infloss::pair
