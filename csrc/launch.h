// Both passes over S on the path that the params name: the one place where it matters.

#pragma once

#include <cstdint>

#include "common/params.h"

namespace infloss {

// Bytes of workspace that a launch with the same sizes, arithmetic, path and limit needs; pointers
// other than those that say what is wanted are not read.
int64_t lse_workspace_bytes(const LseParams& params);
int64_t grad_workspace_bytes(const GradParams& params);

// Both work on the current device and on the params' stream, and never wait for it.
void launch_lse(const LseParams& params);
void launch_grad(const GradParams& params);

}  // namespace infloss
