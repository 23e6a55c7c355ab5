// Forward: one tile of S becomes one partial log-sum-exp for each of its rows and columns. The
// positive is left out of the partials and written by itself; it joins them at the end, where it
// costs a well-matched pair no digits.

#pragma once

#include "sm80/pair_tile.cuh"

namespace infloss::sm80 {

struct LseTask {
    PairParams pair;
    Panel panel;
    float* row_slots;  // [col_tiles, 2, row_tiles * BM] (max, sum), or null
    float* col_slots;  // [row_tiles, 2, col_tiles * BN], or null
    float* positive;   // [m]
    bool own_maxima;   // partials hold the true maximum of every row and column
};

// A warp's partials of its rows and columns. After the reductions all lanes that share a row or
// column hold the same.
template <class Tile>
struct WarpPartials {
    float row_max[Tile::MT][2], row_sum[Tile::MT][2];
    float col_max[Tile::NT][2], col_sum[Tile::NT][2];
};

// Turns products into similarities.
template <class Tile>
__device__ __forceinline__ void to_similarities(Accumulators<Tile>& acc, const PairParams& p,
                                                const Lane<Tile>& lane, int64_t row0,
                                                int64_t col0) {
    const float scale = *p.logit_scale;
    const auto inv_norm = [](const float* values, int64_t i, int64_t size) {
        return values != nullptr && i < size ? values[i] : 1.0f;
    };
    float x_inv_norm[Tile::MT][2];
#pragma unroll
    for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            x_inv_norm[m][h] = inv_norm(p.x_inv_norm, row0 + lane.row(m, h), p.m);
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const float y_inv_norm =
                inv_norm(p.y_inv_norm, col0 + lane.template col<Columns::GATHERED>(n) + b, p.n);
#pragma unroll
            for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float& value = acc[m][n][2 * h + b];
                    value =
                        pair::similarity(pair::cosine(value, x_inv_norm[m][h], y_inv_norm), scale);
                }
        }
}

// Writes positives out, and takes them and what lies beyond the edges of S out of the sums.
template <class Tile>
__device__ __forceinline__ void mask(Accumulators<Tile>& acc, const LseTask& task,
                                     const Lane<Tile>& lane, int64_t row0, int64_t col0) {
    const PairParams& p = task.pair;
    const bool at_edge = row0 + Tile::BM > p.m || col0 + Tile::BN > p.n;
    int target[Tile::MT][2];
    bool any = at_edge;
#pragma unroll
    for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            target[m][h] = local_target<Tile>(p, row0 + lane.row(m, h), col0) - lane.warp_col;
            any |= target[m][h] >= 0 && target[m][h] < Tile::WARP_COLS;
        }
    if (!__any_sync(~0u, any)) return;
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const int col = lane.template col<Columns::GATHERED>(n) + b;
            const bool outside = col0 + col >= p.n;
#pragma unroll
            for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float& value = acc[m][n][2 * h + b];
                    const int64_t row = row0 + lane.row(m, h);
                    const bool positive = target[m][h] == col - lane.warp_col;
                    if (positive) task.positive[row] = value;
                    if (positive || outside || row >= p.m) value = -INFINITY;
                }
        }
}

// One exponential an element, against the warp's maximum. False where a row or column lies so far
// below it that its sum would lose digits; then the partials are not to be used.
template <class Tile>
__device__ __forceinline__ bool shared_reference(const Accumulators<Tile>& s, bool cols,
                                                 WarpPartials<Tile>& out) {
    float max = -INFINITY;
#pragma unroll
    for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
        for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
            for (int w = 0; w < 4; ++w) max = fmaxf(max, s[m][n][w]);
    max = reduce_warp(max, Max{});
    const float reference = pair::reference(max);

#pragma unroll
    for (int m = 0; m < Tile::MT; ++m) out.row_sum[m][0] = out.row_sum[m][1] = 0;
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            float sum = 0;
#pragma unroll
            for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float e = pair::term(s[m][n][2 * h + b], reference);
                    out.row_sum[m][h] += e;
                    sum += e;
                }
            out.col_sum[n][b] = reduce_groups(sum, Sum{});
        }

    bool safe = true;
#pragma unroll
    for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            out.row_max[m][h] = max;
            out.row_sum[m][h] = reduce_quad(out.row_sum[m][h], Sum{});
            safe &= out.row_sum[m][h] >= pair::kSharedFloor;
        }
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            out.col_max[n][b] = max;
            safe &= !cols || out.col_sum[n][b] >= pair::kSharedFloor;
        }
    return __all_sync(~0u, safe);
}

// Every row and every column against its own maximum.
template <class Tile>
__device__ __forceinline__ void own_references(const Accumulators<Tile>& s, bool cols,
                                               WarpPartials<Tile>& out) {
#pragma unroll
    for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float max = -INFINITY, sum = 0;
#pragma unroll
            for (int n = 0; n < Tile::NT; ++n)
                max = fmaxf(max, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            max = reduce_quad(max, Max{});
            const float reference = pair::reference(max);
#pragma unroll
            for (int n = 0; n < Tile::NT; ++n)
                sum += pair::term(s[m][n][2 * h], reference) +
                       pair::term(s[m][n][2 * h + 1], reference);
            out.row_max[m][h] = max;
            out.row_sum[m][h] = reduce_quad(sum, Sum{});
        }
    if (!cols) return;
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            float max = -INFINITY, sum = 0;
#pragma unroll
            for (int m = 0; m < Tile::MT; ++m) max = fmaxf(max, fmaxf(s[m][n][b], s[m][n][2 + b]));
            max = reduce_groups(max, Max{});
            const float reference = pair::reference(max);
#pragma unroll
            for (int m = 0; m < Tile::MT; ++m)
                sum += pair::term(s[m][n][b], reference) + pair::term(s[m][n][2 + b], reference);
            out.col_max[n][b] = max;
            out.col_sum[n][b] = reduce_groups(sum, Sum{});
        }
}

// Partials of the CTA's warps, side by side in shared memory.
template <class Tile>
struct SharedPartials {
    float2 rows[Tile::WARPS_N][Tile::BM];
    float2 cols[Tile::WARPS_M][Tile::BN];
};

template <class Tile>
__device__ __forceinline__ void share(const WarpPartials<Tile>& partials, const Lane<Tile>& lane,
                                      SharedPartials<Tile>& shared) {
    if (lane.quad == 0) {
        auto& rows = shared.rows[lane.warp_col / Tile::WARP_COLS];
#pragma unroll
        for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                rows[lane.row(m, h)] = {partials.row_max[m][h], partials.row_sum[m][h]};
    }
    if (lane.group == 0) {
        auto& cols = shared.cols[lane.warp_row / Tile::WARP_ROWS];
#pragma unroll
        for (int n = 0; n < Tile::NT; ++n)
#pragma unroll
            for (int b = 0; b < 2; ++b)
                cols[lane.template col<Columns::GATHERED>(n) + b] = {partials.col_max[n][b],
                                                                     partials.col_sum[n][b]};
    }
    __syncthreads();
}

// Merges the warps' partials of SIZE rows or columns into a slot [2, slot_size].
template <int WARPS, int SIZE>
__device__ __forceinline__ void write_slot(const float2 (&partials)[WARPS][SIZE], float* slot,
                                           int64_t slot_size) {
    for (int i = threadIdx.x; i < SIZE; i += blockDim.x) {
        float max = partials[0][i].x;
#pragma unroll
        for (int w = 1; w < WARPS; ++w) max = fmaxf(max, partials[w][i].x);
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w)
            sum += pair::rescaled(partials[w][i].x, partials[w][i].y, max);
        slot[i] = max;
        slot[slot_size + i] = sum;
    }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS_PER_SM)
    lse_kernel(const LseTask task) {
    extern __shared__ __align__(128) char shared[];
    const Panel& panel = task.panel;
    const TilePosition tile(blockIdx.x, panel);
    const int64_t row0 = panel.row0 + int64_t{tile.row} * Tile::BM;
    const int64_t col0 = panel.col0 + int64_t{tile.col} * Tile::BN;
    const Lane<Tile> lane(threadIdx.x);

    Accumulators<Tile> acc = {};
    inner_products<Tile>(acc, task.pair, row0, col0, shared);
    to_similarities(acc, task.pair, lane, row0, col0);
    mask(acc, task, lane, row0, col0);

    const bool cols = task.col_slots != nullptr;
    WarpPartials<Tile> partials;
    if (task.own_maxima || !shared_reference(acc, cols, partials)) {
        own_references(acc, cols, partials);
    }
    static_assert(sizeof(SharedPartials<Tile>) <= Tile::SHARED_BYTES);
    auto& all = *reinterpret_cast<SharedPartials<Tile>*>(shared);
    share(partials, lane, all);
    if (task.row_slots != nullptr) {
        const int64_t size = int64_t{panel.row_tiles} * Tile::BM;
        write_slot(all.rows, task.row_slots + tile.col * 2 * size + tile.row * Tile::BM, size);
    }
    if (cols) {
        const int64_t size = int64_t{panel.col_tiles} * Tile::BN;
        write_slot(all.cols, task.col_slots + tile.row * 2 * size + tile.col * Tile::BN, size);
    }
}

}  // namespace infloss::sm80
