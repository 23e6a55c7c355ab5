// Forward: panels of S against one reference, and, where that cannot be relied on or hardest
// negatives are wanted, against every row's and column's own maximum.

#include "common/arena.h"
#include "sm90/certify.h"
#include "sm90/configure.cuh"
#include "sm90/launch.h"
#include "sm90/lse.cuh"
#include "stats/launch.h"

namespace infloss::sm90 {
namespace {

struct LsePlan {
    int64_t rows, cols;              // of a panel, whole tiles
    float *x_inv_norm, *y_inv_norm;  // of rows that are not normalised, for their bound
    float* reference;
    int* flag;
    float *row_slots, *col_slots;  // of either kernel
};

Sweeps sweeps_of(int64_t rows, int64_t cols) {
    return make_sweeps(static_cast<int>(ceil_div(rows, CLUSTER_ROWS)),
                       static_cast<int>(ceil_div(cols, BN)), cluster_count());
}

bool wants_hardest(const LseParams& params) {
    return params.row_hardest != nullptr || params.col_hardest != nullptr;
}

// The largest panel whose slots fit the limit, and where they lie.
LsePlan make_plan(const LseParams& params, Arena& arena) {
    const PairParams& p = params.pair;
    LsePlan plan{};
    plan.rows = round_up(p.m, CLUSTER_ROWS);
    plan.cols = round_up(p.n, BN);
    // (max, sum) for either kernel's rows; for columns, one sum a warp outweighs one pair a CTA
    const auto row_floats = [&] { return 2 * plan.rows * (plan.cols / BN); };
    const auto col_floats = [&] {
        return plan.cols * sweeps_of(plan.rows, plan.cols).per_strip * CLUSTER * WARPS;
    };
    const auto bytes = [&] {
        return static_cast<int64_t>(sizeof(float)) *
               ((params.row_stats != nullptr ? row_floats() : 0) +
                (params.col_stats != nullptr ? col_floats() : 0));
    };
    fit_panel(plan.rows, plan.cols, CLUSTER_ROWS, BN, p.workspace_limit, bytes);
    plan.reference = arena.take<float>(1);
    plan.flag = arena.take<int>(1);
    if (p.x_inv_norm == nullptr) plan.x_inv_norm = arena.take<float>(p.m);
    if (p.y_inv_norm == nullptr) plan.y_inv_norm = arena.take<float>(p.n);
    if (params.row_stats != nullptr) plan.row_slots = arena.take<float>(row_floats());
    if (params.col_stats != nullptr) plan.col_slots = arena.take<float>(col_floats());
    return plan;
}

// Norms that the rows keep, as inverses; null: normalised.
const float* kept_norms(const float* given, float* own, const void* rows, int64_t count,
                        int64_t stride, const PairParams& p) {
    if (given != nullptr) return nullptr;
    launch_inv_norm({rows, own, count, p.dim, stride, dtype_of(p.arithmetic), p.stream});
    return own;
}

void prepare(const LseParams& params, const LsePlan& plan) {
    const PairParams& p = params.pair;
    launch_reference(p, kept_norms(p.x_inv_norm, plan.x_inv_norm, p.x, p.m, p.x_stride, p),
                     kept_norms(p.y_inv_norm, plan.y_inv_norm, p.y, p.n, p.y_stride, p),
                     plan.reference, plan.flag);
}

template <class Epilogue>
PairTask<typename Epilogue::Args> task_of(const PairParams& p, const Panel& panel,
                                          const typename Epilogue::Args& args) {
    return {features_map(p.x, p.m, p.x_stride, p), features_map(p.y, p.n, p.y_stride, p), panel,
            sweeps_of(panel.rows, panel.cols),     static_cast<int>(ceil_div(p.dim, BK)), args};
}

template <class Epilogue>
void launch_panel(const char* name, const PairParams& p, const Panel& panel,
                  const typename Epilogue::Args& args) {
    const auto task = task_of<Epilogue>(p, panel, args);
    const auto launch = [&](auto kernel) {
        launch_clusters(kernel, name, task, task.sweeps.units(),
                        SHARED_BYTES<typename Epilogue::Extra>, shape_of(p), p.stream);
    };
    if (p.arithmetic == Arithmetic::f16) {
        launch(pair_kernel<F16, Epilogue>);
    } else {
        launch(pair_kernel<Bf16, Epilogue>);
    }
}

void shared_panel(const LseParams& params, const LsePlan& plan, const Panel& panel) {
    const PairParams& p = params.pair;
    const int64_t row_ld = round_up(panel.rows, CLUSTER_ROWS), col_ld = round_up(panel.cols, BN);
    launch_panel<SharedLse>(
        "lse_kernel", p, panel,
        {p, plan.reference, plan.row_slots, plan.col_slots, row_ld, col_ld, params.positive});
    const Sweeps sweeps = sweeps_of(panel.rows, panel.cols);
    if (params.row_stats != nullptr)
        launch_add_slots({plan.row_slots, params.row_stats + p.m + panel.row0, sweeps.strips,
                          row_ld, panel.rows, panel.col0 == 0, p.stream});
    if (params.col_stats != nullptr)
        launch_add_slots({plan.col_slots, params.col_stats + p.n + panel.col0,
                          int64_t{sweeps.per_strip} * CLUSTER * WARPS, col_ld, panel.cols,
                          panel.row0 == 0, p.stream});
}

// Merges slots [count, 2, ld] into columns [first, first + size) of stats [2, whole].
void merge(float* stats, int64_t whole, int64_t first, int64_t size, const float* slots,
           int64_t count, int64_t ld, bool overwrite, const int* only_if, cudaStream_t stream) {
    launch_merge_stats({.stats = stats + first,
                        .partials = slots,
                        .rows = size,
                        .count = count,
                        .stats_stride = whole,
                        .partial_stride = 2 * ld,
                        .part_stride = ld,
                        .overwrite = overwrite,
                        .only_if = only_if,
                        .dtype = DType::f32,
                        .stream = stream});
}

void own_panel(const LseParams& params, const LsePlan& plan, const Panel& panel,
               const int* only_if) {
    const PairParams& p = params.pair;
    const int64_t row_ld = round_up(panel.rows, CLUSTER_ROWS), col_ld = round_up(panel.cols, BN);
    launch_panel<OwnLse>(
        "own_lse_kernel", p, panel,
        {p, only_if, plan.row_slots, plan.col_slots, row_ld, col_ld, params.positive});
    const Sweeps sweeps = sweeps_of(panel.rows, panel.cols);
    if (params.row_stats != nullptr)
        merge(params.row_stats, p.m, panel.row0, panel.rows, plan.row_slots, sweeps.strips, row_ld,
              panel.col0 == 0, only_if, p.stream);
    if (params.col_stats != nullptr)
        merge(params.col_stats, p.n, panel.col0, panel.cols, plan.col_slots,
              int64_t{sweeps.per_strip} * CLUSTER, col_ld, panel.row0 == 0, only_if, p.stream);
}

template <class Visit>
void for_each_panel(const PairParams& p, const LsePlan& plan, Visit visit) {
    for (int64_t row0 = 0; row0 < p.m; row0 += plan.rows)
        for (int64_t col0 = 0; col0 < p.n; col0 += plan.cols)
            visit(make_panel(p.m, p.n, row0, col0, plan.rows, plan.cols, CLUSTER_ROWS, BN));
}

}  // namespace

int64_t lse_workspace_bytes(const LseParams& params) {
    Arena arena(nullptr);
    make_plan(params, arena);
    return arena.used();
}

void launch_lse(const LseParams& params) {
    const PairParams& p = params.pair;
    Arena arena(p.workspace);
    const LsePlan plan = make_plan(params, arena);
    const int* only_if = nullptr;
    if (!wants_hardest(params)) {
        prepare(params, plan);
        for_each_panel(p, plan, [&](const Panel& panel) { shared_panel(params, plan, panel); });
        launch_certify(params, plan.reference, plan.flag);
        only_if = plan.flag;
    }
    for_each_panel(p, plan, [&](const Panel& panel) { own_panel(params, plan, panel, only_if); });
    launch_join_positives(params);
}

}  // namespace infloss::sm90
