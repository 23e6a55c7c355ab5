// Backward: each panel of coefficients is one launch, its products with both sides' features
// another. Row accumulators live for one row of panels, column accumulators for the whole pass.

#include <algorithm>

#include "common/arena.h"
#include "common/pair.cuh"
#include "grad/launch.h"
#include "sm80/accumulate.cuh"
#include "sm80/coefficients.cuh"
#include "sm80/configure.cuh"
#include "sm80/launch.h"

namespace infloss::sm80 {
namespace {

constexpr int64_t kPanelSide = 8192;

struct GradPlan {
    int64_t rows, cols;  // of a panel, whole tiles
    int64_t acc_ld;
    float* unit;
    pair::Side *row_sides, *col_sides;
    float *x_mean, *y_mean, *mean_partials;
    void* coefficients;
    float *row_residuals, *col_residuals, *scale_slots;
    float* x_acc;  // null: dx itself
    float* y_acc;  // null: dy itself
};

// float32 gradients whose rows are aligned for it accumulate in place.
bool accumulates_in_place(const GradParams& params) {
    return params.input_dtype == DType::f32 && params.pair.dim % 4 == 0;
}

// Panel-sized parts of the workspace.
template <class Tile>
void take_panel(const GradParams& params, GradPlan& plan, Arena& arena) {
    using Element = typename Tile::Element;
    const int64_t row_tiles = plan.rows / Tile::BM, col_tiles = plan.cols / Tile::BN;
    if (params.dx != nullptr || params.dy != nullptr)
        plan.coefficients = arena.take<typename Tile::Storage>(plan.rows * plan.cols);
    if (Element::ROUNDS && params.dx != nullptr)
        plan.row_residuals = arena.take<float>(plan.rows * col_tiles);
    if (Element::ROUNDS && params.dy != nullptr)
        plan.col_residuals = arena.take<float>(plan.cols * row_tiles);
    if (params.dx != nullptr && !accumulates_in_place(params))
        plan.x_acc = arena.take<float>(plan.rows * plan.acc_ld);
    if (params.dscale != nullptr) plan.scale_slots = arena.take<float>(row_tiles * col_tiles);
}

// The largest panel, up to the preferred one, that fits the limit.
template <class Tile>
void choose_panel(const GradParams& params, GradPlan& plan) {
    const PairParams& p = params.pair;
    const auto bytes = [&] {
        Arena counter(nullptr);
        take_panel<Tile>(params, plan, counter);
        return counter.used();
    };
    plan.rows = std::min(round_up(p.m, Tile::BM), round_up(kPanelSide, Tile::BM));
    plan.cols = std::min(round_up(p.n, Tile::BN), round_up(kPanelSide, Tile::BN));
    while (bytes() > p.workspace_limit && (plan.rows > Tile::BM || plan.cols > Tile::BN)) {
        if (plan.rows > Tile::BM && (plan.rows >= plan.cols || plan.cols == Tile::BN)) {
            plan.rows = round_up(plan.rows / 2, Tile::BM);
        } else {
            plan.cols = round_up(plan.cols / 2, Tile::BN);
        }
    }
}

template <class Tile>
GradPlan plan(const GradParams& params, Arena& arena) {
    using Element = typename Tile::Element;
    const PairParams& p = params.pair;
    GradPlan plan{};
    plan.acc_ld = round_up(p.dim, 4);
    choose_panel<Tile>(params, plan);
    plan.unit = arena.take<float>(1);
    plan.row_sides = arena.take<pair::Side>(p.m);
    plan.col_sides = arena.take<pair::Side>(p.n);
    if (Element::ROUNDS && params.dx != nullptr) plan.y_mean = arena.take<float>(p.dim);
    if (Element::ROUNDS && params.dy != nullptr) plan.x_mean = arena.take<float>(p.dim);
    if (Element::ROUNDS) plan.mean_partials = arena.take<float>(MEAN_PARTS * p.dim);
    if (params.dy != nullptr && !accumulates_in_place(params))
        plan.y_acc = arena.take<float>(p.n * plan.acc_ld);
    take_panel<Tile>(params, plan, arena);
    return plan;
}

DType operand_dtype(Arithmetic arithmetic) {
    if (arithmetic == Arithmetic::f16) return DType::f16;
    if (arithmetic == Arithmetic::bf16) return DType::bf16;
    return DType::f32;
}

void prepare(const GradParams& params, const GradPlan& plan) {
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

// Accumulators of dx's rows [row0, ...) and of dy's [col0, ...).
float* x_accumulators(const GradParams& params, const GradPlan& plan, int64_t row0) {
    return plan.x_acc != nullptr ? plan.x_acc : static_cast<float*>(params.dx) + row0 * plan.acc_ld;
}

float* y_accumulators(const GradParams& params, const GradPlan& plan, int64_t col0) {
    float* acc = plan.y_acc != nullptr ? plan.y_acc : static_cast<float*>(params.dy);
    return acc + col0 * plan.acc_ld;
}

// How the gradients' products see their operands. Features rounded to one TF32 term would leave
// errors that matched pairs and cones magnify, as rows of G sum to nothing; so float32 always takes
// three.
template <class Tile>
struct ProductTile {
    using type = Tile;
};

template <>
struct ProductTile<SquareTile<Tf32>> {
    using type = SquareTile<Tf32x3>;
};

template <class Tile>
int product_tiles(int64_t rows, int64_t dim) {
    return static_cast<int>(ceil_div(rows, Tile::BM) * ceil_div(dim, Tile::BN));
}

template <class Tile>
Product x_product(const GradParams& params, const GradPlan& plan, const Panel& panel) {
    if (params.dx == nullptr) return {};
    using Storage = typename Tile::Storage;
    const PairParams& p = params.pair;
    return {.coefficients = plan.coefficients,
            .coefficients_ld = int64_t{panel.col_tiles} * Tile::BN,
            .features = static_cast<const Storage*>(p.y) + panel.col0 * p.y_stride,
            .features_stride = p.y_stride,
            .acc = x_accumulators(params, plan, panel.row0),
            .acc_ld = plan.acc_ld,
            .residuals = plan.row_residuals,
            .residual_ld = int64_t{panel.row_tiles} * Tile::BM,
            .mean = plan.y_mean,
            .slots = panel.col_tiles,
            .rows = panel.rows,
            .k = panel.cols,
            .dim = static_cast<int>(p.dim),
            .tiles = product_tiles<Tile>(panel.rows, p.dim),
            .accumulate = panel.col0 > 0};
}

template <class Tile>
Product y_product(const GradParams& params, const GradPlan& plan, const Panel& panel) {
    if (params.dy == nullptr) return {};
    using Storage = typename Tile::Storage;
    const PairParams& p = params.pair;
    return {.coefficients = plan.coefficients,
            .coefficients_ld = int64_t{panel.col_tiles} * Tile::BN,
            .features = static_cast<const Storage*>(p.x) + panel.row0 * p.x_stride,
            .features_stride = p.x_stride,
            .acc = y_accumulators(params, plan, panel.col0),
            .acc_ld = plan.acc_ld,
            .residuals = plan.col_residuals,
            .residual_ld = int64_t{panel.col_tiles} * Tile::BN,
            .mean = plan.x_mean,
            .slots = panel.row_tiles,
            .rows = panel.cols,
            .k = panel.rows,
            .dim = static_cast<int>(p.dim),
            .tiles = product_tiles<Tile>(panel.cols, p.dim),
            .accumulate = panel.row0 > 0};
}

template <class Tile>
void run_panel(const GradParams& params, const GradPlan& plan, const Panel& panel) {
    const PairParams& p = params.pair;
    const CoefficientTask coefficients{p,
                                       panel,
                                       plan.row_sides,
                                       plan.col_sides,
                                       params.centre,
                                       plan.coefficients,
                                       plan.row_residuals,
                                       plan.col_residuals,
                                       plan.scale_slots};
    launch_tiles<Tile>(coefficient_kernel<Tile>, "coefficient_kernel", coefficients,
                       int64_t{panel.row_tiles} * panel.col_tiles, shape_of(p), p.stream);
    const AccumulateTask products{x_product<Tile>(params, plan, panel),
                                  y_product<Tile>(params, plan, panel)};
    const int64_t tiles = int64_t{products.x.tiles} + products.y.tiles;
    using Products = typename ProductTile<Tile>::type;
    if (tiles > 0)
        launch_tiles<Products>(accumulate_kernel<Products>, "accumulate_kernel", products, tiles,
                               shape_of(p), p.stream);
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

template <class Tile>
void run(const GradParams& params) {
    const PairParams& p = params.pair;
    Arena arena(p.workspace);
    const GradPlan plan = sm80::plan<Tile>(params, arena);
    const int64_t scale_slots = (plan.rows / Tile::BM) * (plan.cols / Tile::BN);
    if (plan.scale_slots != nullptr)
        INFLOSS_CUDA_CHECK(
            cudaMemsetAsync(plan.scale_slots, 0, scale_slots * sizeof(float), p.stream));
    prepare(params, plan);
    for (int64_t row0 = 0; row0 < p.m; row0 += plan.rows) {
        Panel panel{};
        for (int64_t col0 = 0; col0 < p.n; col0 += plan.cols) {
            const int rows = static_cast<int>(std::min(plan.rows, p.m - row0));
            const int cols = static_cast<int>(std::min(plan.cols, p.n - col0));
            panel = {row0,
                     col0,
                     rows,
                     cols,
                     static_cast<int>(ceil_div(rows, Tile::BM)),
                     static_cast<int>(ceil_div(cols, Tile::BN))};
            run_panel<Tile>(params, plan, panel);
        }
        if (params.dx != nullptr) finish_x(params, plan, panel);
    }
    if (params.dy != nullptr) finish_y(params, plan);
    if (params.dscale != nullptr)
        launch_scale_gradient(plan.scale_slots, scale_slots, plan.unit, params.dscale, p.stream);
}

}  // namespace

int64_t grad_workspace_bytes(const GradParams& params) {
    return with_tile(params.pair, [&](auto tile) {
        Arena arena(nullptr);
        plan<decltype(tile)>(params, arena);
        return arena.used();
    });
}

void launch_grad(const GradParams& params) {
    with_tile(params.pair, [&](auto tile) { run<decltype(tile)>(params); });
}

}  // namespace infloss::sm80
