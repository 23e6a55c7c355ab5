// Backward: each panel of coefficients is one launch, its products with both sides' features
// another.

#include "grad/backward.h"
#include "sm80/accumulate.cuh"
#include "sm80/coefficients.cuh"
#include "sm80/configure.cuh"
#include "sm80/launch.h"

namespace infloss::sm80 {
namespace {

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
struct Engine {
    using Storage = typename Tile::Storage;
    static constexpr int ROWS = Tile::BM;
    static constexpr int COLS = Tile::BN;
    static constexpr bool ROUNDS = Tile::Element::ROUNDS;

    const GradParams& params;
    const GradPlan& plan;

    static int64_t row_slots(int64_t, int64_t cols) { return cols / COLS; }
    static int64_t col_slots(int64_t rows, int64_t) { return rows / ROWS; }
    static int64_t scale_slots(int64_t rows, int64_t cols) { return rows / ROWS * (cols / COLS); }
    static int64_t extra_bytes(const GradParams&) { return 0; }

    void run_panel(const Panel& panel) const {
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
            launch_tiles<Products>(accumulate_kernel<Products>, "accumulate_kernel", products,
                                   tiles, shape_of(p), p.stream);
    }
};

}  // namespace

int64_t grad_workspace_bytes(const GradParams& params) {
    return with_tile(params.pair, [&](auto tile) {
        return backward_workspace_bytes<Engine<decltype(tile)>>(params);
    });
}

void launch_grad(const GradParams& params) {
    with_tile(params.pair, [&](auto tile) { run_backward<Engine<decltype(tile)>>(params); });
}

}  // namespace infloss::sm80
