// Backward: each panel of coefficients is one launch, its products with both sides' features
// another.

#include "grad/backward.h"
#include "sm90/accumulate.cuh"
#include "sm90/coefficients.cuh"
#include "sm90/configure.cuh"
#include "sm90/launch.h"

namespace infloss::sm90 {
namespace {

Sweeps sweeps_of(int64_t rows, int64_t cols) {
    return make_sweeps(static_cast<int>(ceil_div(rows, CLUSTER_ROWS)),
                       static_cast<int>(ceil_div(cols, BN)), cluster_count());
}

template <class Element>
class Engine {
  public:
    using Storage = typename Element::Storage;
    static constexpr int ROWS = CLUSTER_ROWS;
    static constexpr int COLS = BN;
    static constexpr bool ROUNDS = true;

    static int64_t row_slots(int64_t, int64_t cols) { return cols / COLS; }
    static int64_t col_slots(int64_t rows, int64_t cols) {
        return int64_t{sweeps_of(rows, cols).per_strip} * CLUSTER * WARPS;
    }
    static int64_t scale_slots(int64_t, int64_t) {
        return int64_t{cluster_count()} * CLUSTER * WARPS;
    }
    static int64_t extra_bytes(const GradParams& params) {
        return sizeof(Range) * (ceil_div(params.pair.m, BM) + ceil_div(params.pair.n, BN));
    }

    Engine(const GradParams& params, const GradPlan& plan)
        : params_(params),
          plan_(plan),
          row_ranges_(static_cast<Range*>(plan.extra)),
          col_ranges_(row_ranges_ + ceil_div(params.pair.m, BM)) {
        const PairParams& p = params.pair;
        launch_ranges(plan.row_sides, p.m, BM, row_ranges_, p.stream);
        launch_ranges(plan.col_sides, p.n, BN, col_ranges_, p.stream);
        x_ = features_map(p.x, p.m, p.x_stride, p);
        y_ = features_map(p.y, p.n, p.y_stride, p);
        if (plan.coefficients != nullptr) {
            const Matrix panel{plan.coefficients, plan.rows, plan.cols, plan.cols,
                               dtype_of(p.arithmetic)};
            panel_out_ = tensor_map(panel, STAGING_ROWS);
            panel_in_ = tensor_map(panel, BOX);
        }
        if (params.dx != nullptr)
            x_acc_ = accumulator_map(x_accumulators(params, plan, 0), in_place() ? p.m : plan.rows);
        if (params.dy != nullptr) y_acc_ = accumulator_map(y_accumulators(params, plan, 0), p.n);
    }

    void run_panel(const Panel& panel) const {
        launch_coefficients(panel);
        if (plan_.coefficients != nullptr) launch_products(panel);
    }

  private:
    // dx is float32 and its own accumulator.
    bool in_place() const { return plan_.x_acc == nullptr; }

    CUtensorMap accumulator_map(const float* acc, int64_t rows) const {
        return tensor_map({acc, rows, params_.pair.dim, plan_.acc_ld, DType::f32}, STAGING_ROWS);
    }

    void launch_coefficients(const Panel& panel) const {
        const PairParams& p = params_.pair;
        const Sweeps sweeps = sweeps_of(panel.rows, panel.cols);
        const PairTask<CoefficientArgs> task{
            x_,
            y_,
            panel,
            sweeps,
            static_cast<int>(ceil_div(p.dim, BK)),
            {p, plan_.row_sides, plan_.col_sides, row_ranges_, col_ranges_, params_.centre,
             panel_out_, plan_.coefficients != nullptr, plan_.row_residuals, plan_.col_residuals,
             plan_.rows, plan_.cols, plan_.scale_slots}};
        launch_clusters(pair_kernel<Element, Coefficients>, "coefficient_kernel", task,
                        sweeps.units(), SHARED_BYTES<Coefficients::Extra>, shape_of(p), p.stream);
    }

    void launch_products(const Panel& panel) const {
        const PairParams& p = params_.pair;
        const AccumulateTask task{panel_in_, x_product(panel), y_product(panel),
                                  static_cast<int>(p.dim), static_cast<int>(ceil_div(p.dim, BN))};
        launch_clusters(accumulate_kernel<Element>, "accumulate_kernel", task, task.units(),
                        SHARED_BYTES<AccumulateShared>, shape_of(p), p.stream);
    }

    Product x_product(const Panel& panel) const {
        if (params_.dx == nullptr) return {};
        return {.features = y_,
                .acc = x_acc_,
                .feature_row = static_cast<int>(panel.col0),
                .acc_row = in_place() ? static_cast<int>(panel.row0) : 0,
                .residuals = plan_.row_residuals,
                .mean = plan_.y_mean,
                .residual_ld = plan_.rows,
                .slots = static_cast<int>(ceil_div(panel.cols, BN)),
                .row_tiles = static_cast<int>(ceil_div(panel.rows, CLUSTER_ROWS)),
                .k_tiles = static_cast<int>(ceil_div(panel.cols, BK)),
                .accumulate = panel.col0 > 0};
    }

    Product y_product(const Panel& panel) const {
        if (params_.dy == nullptr) return {};
        return {.features = x_,
                .acc = y_acc_,
                .feature_row = static_cast<int>(panel.row0),
                .acc_row = static_cast<int>(panel.col0),
                .residuals = plan_.col_residuals,
                .mean = plan_.x_mean,
                .residual_ld = plan_.cols,
                .slots = sweeps_of(panel.rows, panel.cols).per_strip * CLUSTER * WARPS,
                .row_tiles = static_cast<int>(ceil_div(panel.cols, CLUSTER_ROWS)),
                .k_tiles = static_cast<int>(ceil_div(panel.rows, BK)),
                .accumulate = panel.row0 > 0};
    }

    const GradParams& params_;
    const GradPlan& plan_;
    Range *row_ranges_, *col_ranges_;
    CUtensorMap x_, y_, panel_out_{}, panel_in_{}, x_acc_{}, y_acc_{};
};

}  // namespace

int64_t grad_workspace_bytes(const GradParams& params) {
    if (params.pair.arithmetic == Arithmetic::f16)
        return backward_workspace_bytes<Engine<F16>>(params);
    return backward_workspace_bytes<Engine<Bf16>>(params);
}

void launch_grad(const GradParams& params) {
    if (params.pair.arithmetic == Arithmetic::f16) {
        run_backward<Engine<F16>>(params);
    } else {
        run_backward<Engine<Bf16>>(params);
    }
}

}  // namespace infloss::sm90
