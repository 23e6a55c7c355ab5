// The Hopper path: compute capability 9.0, bfloat16 and float16.

#pragma once

#include <cstdint>

#include "common/params.h"

namespace infloss::sm90 {

// Bytes of workspace that a launch with the same sizes, arithmetic and limit needs; pointers other
// than those that say what is wanted are not read.
int64_t lse_workspace_bytes(const LseParams& params);
int64_t grad_workspace_bytes(const GradParams& params);

// Both work on the current device and on the params' stream, and never wait for it.
void launch_lse(const LseParams& params);
void launch_grad(const GradParams& params);

}  // namespace infloss::sm90
