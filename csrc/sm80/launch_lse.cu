// Forward: panels of S, each one launch of tiles, its slots merged into the statistics.

#include "common/arena.h"
#include "sm80/configure.cuh"
#include "sm80/launch.h"
#include "sm80/lse.cuh"
#include "stats/launch.h"

namespace infloss::sm80 {
namespace {

struct LsePlan {
    int64_t rows, cols;  // of a panel, whole tiles
    float* row_slots;
    float* col_slots;
};

// The largest panel whose slots fit the limit, and where they lie.
template <class Tile>
LsePlan make_plan(const LseParams& params, Arena& arena) {
    const PairParams& p = params.pair;
    LsePlan plan{round_up(p.m, Tile::BM), round_up(p.n, Tile::BN), nullptr, nullptr};
    const auto row_floats = [&] { return 2 * plan.rows * (plan.cols / Tile::BN); };
    const auto col_floats = [&] { return 2 * plan.cols * (plan.rows / Tile::BM); };
    const auto bytes = [&] {
        return static_cast<int64_t>(sizeof(float)) *
               ((params.row_stats != nullptr ? row_floats() : 0) +
                (params.col_stats != nullptr ? col_floats() : 0));
    };
    fit_panel(plan.rows, plan.cols, Tile::BM, Tile::BN, p.workspace_limit, bytes);
    if (params.row_stats != nullptr) plan.row_slots = arena.take<float>(row_floats());
    if (params.col_stats != nullptr) plan.col_slots = arena.take<float>(col_floats());
    return plan;
}

// Merges slots [slots, 2, slot_size] into columns [first, first + count) of stats [2, size].
void merge(float* stats, int64_t size, int64_t first, int64_t count, const float* slots,
           int64_t slot_count, int64_t slot_size, bool overwrite, cudaStream_t stream) {
    launch_merge_stats({.stats = stats + first,
                        .partials = slots,
                        .rows = count,
                        .count = slot_count,
                        .stats_stride = size,
                        .partial_stride = 2 * slot_size,
                        .part_stride = slot_size,
                        .overwrite = overwrite,
                        .only_if = nullptr,
                        .dtype = DType::f32,
                        .stream = stream});
}

template <class Tile>
void run(const LseParams& params) {
    const PairParams& p = params.pair;
    Arena arena(p.workspace);
    const LsePlan plan = make_plan<Tile>(params, arena);
    const bool own_maxima = params.row_hardest != nullptr || params.col_hardest != nullptr;
    for (int64_t row0 = 0; row0 < p.m; row0 += plan.rows)
        for (int64_t col0 = 0; col0 < p.n; col0 += plan.cols) {
            const Panel panel =
                make_panel(p.m, p.n, row0, col0, plan.rows, plan.cols, Tile::BM, Tile::BN);
            const LseTask task{p,         panel, plan.row_slots, plan.col_slots, params.positive,
                               own_maxima};
            launch_tiles<Tile>(lse_kernel<Tile>, "lse_kernel", task,
                               int64_t{panel.row_tiles} * panel.col_tiles, shape_of(p), p.stream);
            if (params.row_stats != nullptr)
                merge(params.row_stats, p.m, row0, panel.rows, plan.row_slots, panel.col_tiles,
                      int64_t{panel.row_tiles} * Tile::BM, col0 == 0, p.stream);
            if (params.col_stats != nullptr)
                merge(params.col_stats, p.n, col0, panel.cols, plan.col_slots, panel.row_tiles,
                      int64_t{panel.col_tiles} * Tile::BN, row0 == 0, p.stream);
        }
    launch_join_positives(params);
}

}  // namespace

int64_t lse_workspace_bytes(const LseParams& params) {
    return with_tile(params.pair, [&](auto tile) {
        Arena arena(nullptr);
        make_plan<decltype(tile)>(params, arena);
        return arena.used();
    });
}

void launch_lse(const LseParams& params) {
    with_tile(params.pair, [&](auto tile) { run<decltype(tile)>(params); });
}

}  // namespace infloss::sm80
