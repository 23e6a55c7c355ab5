// The certificate of a forward pass that measures all of S against one reference.
//
// Sums are kept in units of 2^reference, below a bound on S by a headroom that float32 has above 1.
// What a term loses underflows below 2^-126; a row or column whose sum reaches 2^-86 lost at most
// 2^-40 a term. Where one does not reach it, or nothing is finite, the flag is set, and the exact
// kernel, launched in any case, does the work again.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/params.h"

namespace infloss::sm90 {

// reference = log2(e) |logit_scale| max ||x_i|| max ||y_j|| - headroom, of rows not normalised by
// their norms [m], [n] as inverses; null inverses: norms are 1. Clears the flag.
void launch_reference(const PairParams& pair, const float* x_inv_norm, const float* y_inv_norm,
                      float* reference, int* flag);

struct AddSlotsParams {
    const float* slots;  // [count, ld]
    float* sums;         // [size]
    int64_t count, ld, size;
    bool overwrite;  // sums hold nothing yet
    cudaStream_t stream;
};

// sums (+)= slots, added up in their order.
void launch_add_slots(const AddSlotsParams& params);

// Turns the sums in the second half of row_stats and col_stats into (max, sum) pairs, and sets the
// flag where they cannot be relied on.
void launch_certify(const LseParams& params, const float* reference, int* flag);

}  // namespace infloss::sm90
