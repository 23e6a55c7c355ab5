#include "grad/backward.h"

namespace infloss {
namespace {

DType operand_dtype(Arithmetic arithmetic) {
    if (arithmetic == Arithmetic::f16) return DType::f16;
    if (arithmetic == Arithmetic::bf16) return DType::bf16;
    return DType::f32;
}

}  // namespace

void prepare_backward(const GradParams& params, const GradPlan& plan) {
    const PairParams& p = params.pair;
    launch_unit(params, plan.unit);
    launch_sides(params, plan.unit, plan.row_sides, plan.col_sides);
    const DType dtype = operand_dtype(p.arithmetic);
    if (plan.x_mean != nullptr)
        launch_unit_mean({p.x, p.x_inv_norm, plan.x_mean, plan.mean_partials, p.m, p.dim,
                          p.x_stride, dtype, p.stream});
    if (plan.y_mean != nullptr)
        launch_unit_mean({p.y, p.y_inv_norm, plan.y_mean, plan.mean_partials, p.n, p.dim,
                          p.y_stride, dtype, p.stream});
}

void finish_x(const GradParams& params, const GradPlan& plan, const Panel& panel) {
    const PairParams& p = params.pair;
    const int64_t element = params.input_dtype == DType::f32 ? 4 : 2;
    const auto at = [&](const void* base, int64_t elements) {
        return static_cast<const char*>(base) + elements * element;
    };
    launch_finish_rows({.acc = x_accumulators(params, plan, panel.row0),
                        .x = at(params.x_input, panel.row0 * params.x_input_stride),
                        .out = const_cast<char*>(at(params.dx, panel.row0 * p.dim)),
                        .inv_norm = p.x_inv_norm != nullptr ? p.x_inv_norm + panel.row0 : nullptr,
                        .logit_scale = p.logit_scale,
                        .unit = plan.unit,
                        .rows = panel.rows,
                        .dim = p.dim,
                        .acc_ld = plan.acc_ld,
                        .x_stride = params.x_input_stride,
                        .dtype = params.input_dtype,
                        .stream = p.stream});
}

void finish_y(const GradParams& params, const GradPlan& plan) {
    const PairParams& p = params.pair;
    launch_finish_rows({.acc = y_accumulators(params, plan, 0),
                        .x = params.y_input,
                        .out = params.dy,
                        .inv_norm = p.y_inv_norm,
                        .logit_scale = p.logit_scale,
                        .unit = plan.unit,
                        .rows = p.n,
                        .dim = p.dim,
                        .acc_ld = plan.acc_ld,
                        .x_stride = params.y_input_stride,
                        .dtype = params.input_dtype,
                        .stream = p.stream});
}

}  // namespace infloss
