#include "launch.h"

#include "sm80/launch.h"
#include "sm90/launch.h"

namespace infloss {
namespace {

// float32 is the general kernels' on every device.
bool on_hopper(const PairParams& pair) {
    return pair.path == Path::sm90 &&
           (pair.arithmetic == Arithmetic::bf16 || pair.arithmetic == Arithmetic::f16);
}

}  // namespace

int64_t lse_workspace_bytes(const LseParams& params) {
    return on_hopper(params.pair) ? sm90::lse_workspace_bytes(params)
                                  : sm80::lse_workspace_bytes(params);
}

int64_t grad_workspace_bytes(const GradParams& params) {
    return on_hopper(params.pair) ? sm90::grad_workspace_bytes(params)
                                  : sm80::grad_workspace_bytes(params);
}

void launch_lse(const LseParams& params) {
    on_hopper(params.pair) ? sm90::launch_lse(params) : sm80::launch_lse(params);
}

void launch_grad(const GradParams& params) {
    on_hopper(params.pair) ? sm90::launch_grad(params) : sm80::launch_grad(params);
}

}  // namespace infloss
