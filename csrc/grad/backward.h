// Backward as every architecture walks it: each panel of coefficients, then its products with both
// sides' features. Row accumulators live for one row of panels, column accumulators for the whole
// pass.
//
// An Engine says how its tiles cut a panel, and launches one:
//   ROWS, COLS                  panels are made of whole tiles of that size
//   ROUNDS                      a stored coefficient differs from its float32
//   Storage                     of a coefficient
//   row_slots, col_slots(rows, cols)   residuals kept for each row and column of a panel
//   scale_slots(rows, cols)     partial sums of logit_scale's gradient
//   extra_bytes(params)         workspace of its own
//   run_panel(params, plan, panel)

#pragma once

#include <algorithm>

#include "common/arena.h"
#include "common/check.h"
#include "common/pair.cuh"
#include "common/panel.h"
#include "grad/launch.h"

namespace infloss {

struct GradPlan {
    int64_t rows, cols;  // of a panel, whole tiles
    int64_t acc_ld;
    float* unit;
    pair::Side *row_sides, *col_sides;
    float *x_mean, *y_mean, *mean_partials;
    void* coefficients;  // [rows, cols]
    float *row_residuals, *col_residuals, *scale_slots;
    float* x_acc;  // null: dx itself
    float* y_acc;  // null: dy itself
    void* extra;   // what the Engine asked for
};

// float32 gradients whose rows are aligned for it accumulate in place.
inline bool accumulates_in_place(const GradParams& params) {
    return params.input_dtype == DType::f32 && params.pair.dim % 4 == 0;
}

// Accumulators of dx's rows [row0, ...) and of dy's [col0, ...).
inline float* x_accumulators(const GradParams& params, const GradPlan& plan, int64_t row0) {
    return plan.x_acc != nullptr ? plan.x_acc : static_cast<float*>(params.dx) + row0 * plan.acc_ld;
}

inline float* y_accumulators(const GradParams& params, const GradPlan& plan, int64_t col0) {
    float* acc = plan.y_acc != nullptr ? plan.y_acc : static_cast<float*>(params.dy);
    return acc + col0 * plan.acc_ld;
}

// Panel-sized parts of the workspace.
template <class Engine>
void take_panel(const GradParams& params, GradPlan& plan, Arena& arena) {
    if (params.dx != nullptr || params.dy != nullptr)
        plan.coefficients = arena.take<typename Engine::Storage>(plan.rows * plan.cols);
    if (Engine::ROUNDS && params.dx != nullptr)
        plan.row_residuals = arena.take<float>(plan.rows * Engine::row_slots(plan.rows, plan.cols));
    if (Engine::ROUNDS && params.dy != nullptr)
        plan.col_residuals = arena.take<float>(plan.cols * Engine::col_slots(plan.rows, plan.cols));
    if (params.dx != nullptr && !accumulates_in_place(params))
        plan.x_acc = arena.take<float>(plan.rows * plan.acc_ld);
    if (params.dscale != nullptr)
        plan.scale_slots = arena.take<float>(Engine::scale_slots(plan.rows, plan.cols));
}

// The largest panel, up to the preferred one, that fits the limit.
template <class Engine>
void choose_panel(const GradParams& params, GradPlan& plan) {
    constexpr int64_t kSide = 8192;
    const PairParams& p = params.pair;
    const auto bytes = [&] {
        Arena counter(nullptr);
        take_panel<Engine>(params, plan, counter);
        return counter.used();
    };
    plan.rows = std::min(round_up(p.m, Engine::ROWS), round_up(kSide, Engine::ROWS));
    plan.cols = std::min(round_up(p.n, Engine::COLS), round_up(kSide, Engine::COLS));
    fit_panel(plan.rows, plan.cols, Engine::ROWS, Engine::COLS, p.workspace_limit, bytes);
}

template <class Engine>
GradPlan plan_backward(const GradParams& params, Arena& arena) {
    const PairParams& p = params.pair;
    GradPlan plan{};
    plan.acc_ld = round_up(p.dim, 4);
    choose_panel<Engine>(params, plan);
    plan.unit = arena.take<float>(1);
    plan.row_sides = arena.take<pair::Side>(p.m);
    plan.col_sides = arena.take<pair::Side>(p.n);
    if (Engine::ROUNDS && params.dx != nullptr) plan.y_mean = arena.take<float>(p.dim);
    if (Engine::ROUNDS && params.dy != nullptr) plan.x_mean = arena.take<float>(p.dim);
    if (params.dy != nullptr && !accumulates_in_place(params))
        plan.y_acc = arena.take<float>(p.n * plan.acc_ld);
    plan.extra = arena.take<char>(Engine::extra_bytes(params));
    Arena before_panels = arena;
    if (Engine::ROUNDS && (params.dx != nullptr || params.dy != nullptr))
        plan.mean_partials = before_panels.take<float>(kMeanParts * p.dim);
    take_panel<Engine>(params, plan, arena);
    arena.cover(before_panels);
    return plan;
}

void prepare_backward(const GradParams& params, const GradPlan& plan);
void finish_x(const GradParams& params, const GradPlan& plan, const Panel& panel);
void finish_y(const GradParams& params, const GradPlan& plan);

template <class Engine>
void run_backward(const GradParams& params) {
    const PairParams& p = params.pair;
    Arena arena(p.workspace);
    const GradPlan plan = plan_backward<Engine>(params, arena);
    const int64_t scale_slots = Engine::scale_slots(plan.rows, plan.cols);
    if (plan.scale_slots != nullptr)
        INFLOSS_CUDA_CHECK(
            cudaMemsetAsync(plan.scale_slots, 0, scale_slots * sizeof(float), p.stream));
    prepare_backward(params, plan);
    Engine engine(params, plan);
    for (int64_t row0 = 0; row0 < p.m; row0 += plan.rows) {
        Panel panel{};
        for (int64_t col0 = 0; col0 < p.n; col0 += plan.cols) {
            panel =
                make_panel(p.m, p.n, row0, col0, plan.rows, plan.cols, Engine::ROWS, Engine::COLS);
            engine.run_panel(panel);
        }
        if (params.dx != nullptr) finish_x(params, plan, panel);
    }
    if (params.dy != nullptr) finish_y(params, plan);
    if (params.dscale != nullptr)
        launch_scale_gradient(plan.scale_slots, scale_slots, plan.unit, params.dscale, p.stream);
}

template <class Engine>
int64_t backward_workspace_bytes(const GradParams& params) {
    Arena arena(nullptr);
    plan_backward<Engine>(params, arena);
    return arena.used();
}

}  // namespace infloss
