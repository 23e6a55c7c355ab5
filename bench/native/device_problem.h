// A problem on the device: inputs, outputs, workspace, and the passes over them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/check.h"
#include "common/params.h"
#include "launch.h"
#include "native/buffer.h"
#include "native/problem.h"
#include "stats/launch.h"

namespace infloss::bench {

// What the passes write. What is not wanted has no memory, and so a null pointer.
struct Outputs {
    explicit Outputs(const Case& c)
        : row_stats(2 * c.m * sizeof(float)),
          col_stats(c.cols ? 2 * c.n * sizeof(float) : 0),
          positive(c.m * sizeof(float)),
          row_hardest(c.hardest ? c.m * sizeof(float) : 0),
          col_hardest(c.hardest && c.cols ? c.n * sizeof(float) : 0),
          dx(c.want_dx ? c.m * c.dim * element_bytes(dtype_of(c.arithmetic)) : 0),
          dy(c.want_dy ? c.n * c.dim * element_bytes(dtype_of(c.arithmetic)) : 0),
          dscale(c.want_dscale ? sizeof(float) : 0) {}

    DeviceBuffer row_stats, col_stats, positive, row_hardest, col_hardest;  // of lse
    DeviceBuffer dx, dy, dscale;                                            // of grad

    std::vector<DeviceBuffer*> of_lse() {
        return {&row_stats, &col_stats, &positive, &row_hardest, &col_hardest};
    }
    std::vector<DeviceBuffer*> of_grad() { return {&dx, &dy, &dscale}; }
};

class DeviceProblem {
  public:
    explicit DeviceProblem(const HostProblem& host)
        : spec_(host.spec),
          dtype_(dtype_of(host.spec.arithmetic)),
          outputs_(host.spec),
          logit_scale_(std::vector{host.spec.logit_scale}),
          centre_(std::vector{host.centre}),
          x_inv_norm_(spec_.normalised ? spec_.m * sizeof(float) : 0),
          y_inv_norm_(spec_.normalised ? spec_.n * sizeof(float) : 0),
          target_(spec_.target_array ? host.target : std::vector<int64_t>{}),
          row_weight_(host.row_weight),
          col_weight_(host.col_weight),
          target_weight_(host.target_weight),
          workspace_(0) {
        x_.emplace_back(encode(host.x.values, spec_.m, spec_.dim, dtype_));
        y_.emplace_back(encode(host.y.values, spec_.n, spec_.dim, dtype_));
        workspace_ =
            DeviceBuffer(std::max(workspace_bytes(Pass::lse), workspace_bytes(Pass::grad)));
        normalise(0);
    }

    // Copies the features until they exceed `bytes`, so that runs over one set after another find
    // none of it in a cache of half that size. Tiny features stay below after all.
    void rotate_past(size_t bytes) {
        constexpr size_t kMostSets = 256;
        const size_t set_bytes = x_[0].bytes() + y_[0].bytes();
        while (x_.size() < kMostSets && x_.size() * set_bytes <= bytes) {
            x_.push_back(x_[0].copy());
            y_.push_back(y_[0].copy());
        }
    }

    size_t sets() const { return x_.size(); }

    // Outputs and workspace of the pass hold NaN afterwards.
    void poison(Pass pass) {
        workspace_.poison();
        if (pass == Pass::step) {
            x_inv_norm_.poison();
            y_inv_norm_.poison();
        }
        if (pass != Pass::grad)
            for (DeviceBuffer* buffer : outputs_.of_lse()) buffer->poison();
        if (pass != Pass::lse)
            for (DeviceBuffer* buffer : outputs_.of_grad()) buffer->poison();
    }

    // grad reads the statistics that an lse has left.
    void run(Pass pass, size_t set = 0) {
        if (pass == Pass::step) normalise(set);
        if (pass != Pass::grad) launch_lse(lse_params(set));
        if (pass != Pass::lse) launch_grad(grad_params(set));
    }

    const Outputs& outputs() const { return outputs_; }

    // Workspace and outputs of a pass.
    size_t peak_bytes(Pass pass) {
        if (pass == Pass::lse) return workspace_bytes(pass) + total_bytes(outputs_.of_lse());
        if (pass == Pass::grad) return workspace_bytes(pass) + total_bytes(outputs_.of_grad());
        return workspace_.bytes() + x_inv_norm_.bytes() + y_inv_norm_.bytes() +
               total_bytes(outputs_.of_lse()) + total_bytes(outputs_.of_grad());
    }

  private:
    static size_t total_bytes(const std::vector<DeviceBuffer*>& buffers) {
        size_t bytes = 0;
        for (const DeviceBuffer* buffer : buffers) bytes += buffer->bytes();
        return bytes;
    }

    size_t workspace_bytes(Pass pass) const {
        return pass == Pass::lse ? lse_workspace_bytes(lse_params(0))
                                 : grad_workspace_bytes(grad_params(0));
    }

    void normalise(size_t set) {
        if (!spec_.normalised) return;
        const int64_t stride = aligned_stride(dtype_, spec_.dim);
        launch_inv_norm({.x = x_[set].data(),
                         .out = x_inv_norm_.data(),
                         .rows = spec_.m,
                         .dim = spec_.dim,
                         .row_stride = stride,
                         .dtype = dtype_,
                         .stream = nullptr});
        launch_inv_norm({.x = y_[set].data(),
                         .out = y_inv_norm_.data(),
                         .rows = spec_.n,
                         .dim = spec_.dim,
                         .row_stride = stride,
                         .dtype = dtype_,
                         .stream = nullptr});
    }

    PairParams pair_params(size_t set) const {
        const int64_t stride = aligned_stride(dtype_, spec_.dim);
        return {.x = x_[set].data(),
                .y = y_[set].data(),
                .logit_scale = logit_scale_.as<float>(),
                .x_inv_norm = x_inv_norm_.as<float>(),
                .y_inv_norm = y_inv_norm_.as<float>(),
                .target = target_.as<int64_t>(),
                .m = spec_.m,
                .n = spec_.n,
                .dim = spec_.dim,
                .x_stride = stride,
                .y_stride = stride,
                .target_offset = spec_.target_offset,
                .target_stride = spec_.target_stride,
                .arithmetic = spec_.arithmetic,
                .path = spec_.path,
                .workspace_limit = spec_.workspace_limit,
                .workspace = workspace_.data(),
                .stream = nullptr};
    }

    LseParams lse_params(size_t set) const {
        return {.pair = pair_params(set),
                .row_stats = outputs_.row_stats.as<float>(),
                .col_stats = outputs_.col_stats.as<float>(),
                .positive = outputs_.positive.as<float>(),
                .row_hardest = outputs_.row_hardest.as<float>(),
                .col_hardest = outputs_.col_hardest.as<float>()};
    }

    GradParams grad_params(size_t set) const {
        const PairParams pair = pair_params(set);
        return {.pair = pair,
                .row_stats = outputs_.row_stats.as<float>(),
                .row_weight = row_weight_.as<float>(),
                .col_stats = outputs_.col_stats.as<float>(),
                .col_weight = col_weight_.as<float>(),
                .target_weight = target_weight_.as<float>(),
                .centre = centre_.as<float>(),
                .x_input = pair.x,
                .y_input = pair.y,
                .x_input_stride = pair.x_stride,
                .y_input_stride = pair.y_stride,
                .input_dtype = dtype_,
                .dx = outputs_.dx.data(),
                .dy = outputs_.dy.data(),
                .dscale = outputs_.dscale.as<float>()};
    }

    Case spec_;
    DType dtype_;
    Outputs outputs_;
    std::vector<DeviceBuffer> x_, y_;  // sets of equal features
    DeviceBuffer logit_scale_, centre_, x_inv_norm_, y_inv_norm_, target_;
    DeviceBuffer row_weight_, col_weight_, target_weight_, workspace_;
};

}  // namespace infloss::bench
