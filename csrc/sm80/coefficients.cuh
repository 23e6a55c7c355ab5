// Backward, first half: one tile of S is recomputed and becomes a tile of the coefficients
//
//     G_ij = u_i P_ij + v_j Q_ij - w_i [j = t(i)],
//
// times both inverse norms, rounded and stored in the panel for the two gradient products.
//
// Rows and columns of G sum to almost nothing, so rounding it leaves an error along the mean
// feature, the larger the narrower the cone of features. Sums of what the rounding left out, each
// residual times the norm of the feature it would have multiplied, go to slots; the gradient
// products add them back times the mean unit feature.

#pragma once

#include "sm80/pair_tile.cuh"

namespace infloss::sm80 {

struct CoefficientTask {
    PairParams pair;
    Panel panel;
    const pair::Side* rows;  // [m]
    const pair::Side* cols;  // [n]
    const float* centre;     // [], or null
    void* coefficients;      // [row_tiles * BM, ld], ld = col_tiles * BN; or null: not wanted
    float* row_residuals;    // [col_tiles, row_tiles * BM], or null
    float* col_residuals;    // [row_tiles, col_tiles * BN], or null
    float* scale_slots;      // [tiles]: += sum of G_ij (cosine_ij - centre), or null
};

template <class Tile>
struct SharedSides {
    pair::Side rows[Tile::BM];
    pair::Side cols[Tile::BN];
};

// One thread's sides, fetched before the product starts and shared after it.
template <class Tile>
class SideFetch {
    static constexpr int ROWS_EACH = ceil_div(Tile::BM, Tile::THREADS);
    static constexpr int COLS_EACH = ceil_div(Tile::BN, Tile::THREADS);

  public:
    __device__ SideFetch(const CoefficientTask& task, int64_t row0, int64_t col0) {
#pragma unroll
        for (int e = 0; e < ROWS_EACH; ++e) {
            const int64_t i = row0 + threadIdx.x + e * Tile::THREADS;
            rows_[e] = i < task.pair.m ? task.rows[i] : pair::no_side();
        }
#pragma unroll
        for (int e = 0; e < COLS_EACH; ++e) {
            const int64_t j = col0 + threadIdx.x + e * Tile::THREADS;
            cols_[e] = j < task.pair.n ? task.cols[j] : pair::no_side();
        }
    }

    __device__ void share(SharedSides<Tile>& shared) const {
#pragma unroll
        for (int e = 0; e < ROWS_EACH; ++e) {
            const int i = threadIdx.x + e * Tile::THREADS;
            if (i < Tile::BM) shared.rows[i] = rows_[e];
        }
#pragma unroll
        for (int e = 0; e < COLS_EACH; ++e) {
            const int j = threadIdx.x + e * Tile::THREADS;
            if (j < Tile::BN) shared.cols[j] = cols_[e];
        }
        __syncthreads();
    }

  private:
    pair::Side rows_[ROWS_EACH], cols_[COLS_EACH];
};

// Per-tile sums of a CTA's warps.
template <class Tile>
struct SharedSums {
    float rows[Tile::WARPS_N][Tile::BM];
    float cols[Tile::WARPS_M][Tile::BN];
    float scale[Tile::THREADS / WARP];
};

// A warp's residuals of two neighbouring columns.
template <class Tile>
__device__ __forceinline__ void share_columns(const float (&residual)[2], int first_col,
                                              const Lane<Tile>& lane, SharedSums<Tile>& sums) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
        const float sum = reduce_groups(residual[b], Sum{});
        if (lane.group == 0) sums.cols[lane.warp_row / Tile::WARP_ROWS][first_col + b] = sum;
    }
}

// A warp's residuals of its rows.
template <class Tile>
__device__ __forceinline__ void share_rows(const float (&residual)[Tile::MT][2],
                                           const Lane<Tile>& lane, SharedSums<Tile>& sums) {
#pragma unroll
    for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = reduce_quad(residual[m][h], Sum{});
            if (lane.quad == 0) sums.rows[lane.warp_col / Tile::WARP_COLS][lane.row(m, h)] = sum;
        }
}

// Where the tile starts in S.
struct Corner {
    int64_t row, col;
};

// What a warp's part of the tile asks for.
struct Inspection {
    float reference;  // no similarity exceeds it
    bool shared;      // every row and column can share it
    bool special;     // some positive, or the edge of S, is here
};

// A row's maximum bounds its similarities, and so does a column's: no pass over the tile is needed.
template <class Tile>
__device__ __forceinline__ Inspection inspect(const CoefficientTask& task,
                                              const SharedSides<Tile>& sides,
                                              const Lane<Tile>& lane, const Corner& corner) {
    const int first = threadIdx.x % WARP;
    const auto tops = [first](const pair::Side* some, int count) {
        float top = -INFINITY;
        for (int i = first; i < count; i += WARP)
            if (some[i].max < INFINITY) top = fmaxf(top, some[i].max);
        return reduce_warp(top, Max{});
    };
    const pair::Side* rows = sides.rows + lane.warp_row;
    const pair::Side* cols = sides.cols + lane.warp_col;
    const float row_top = tops(rows, Tile::WARP_ROWS), col_top = tops(cols, Tile::WARP_COLS);
    const float top = row_top == -INFINITY   ? col_top
                      : col_top == -INFINITY ? row_top
                                             : fminf(row_top, col_top);
    Inspection out{pair::reference(top), true,
                   corner.row + Tile::BM > task.pair.m || corner.col + Tile::BN > task.pair.n};
    for (int i = first; i < Tile::WARP_ROWS; i += WARP) {
        const int target =
            local_target<Tile>(task.pair, corner.row + lane.warp_row + i, corner.col) -
            lane.warp_col;
        out.special |= target >= 0 && target < Tile::WARP_COLS;
        out.shared &= out.reference - rows[i].max <= pair::kSharedRange;
    }
    for (int j = first; j < Tile::WARP_COLS; j += WARP)
        out.shared &= out.reference - cols[j].max <= pair::kSharedRange;
    out.shared = __all_sync(~0u, out.shared);
    out.special = __any_sync(~0u, out.special);
    return out;
}

template <class Tile>
using Packed = typename Tile::Element::Packed[Tile::MT][2][Tile::NT];

// How a warp turns its products into coefficients, chosen once for all of them.
template <bool SHARED_, bool SPECIAL_>
struct Mode {
    static constexpr bool SHARED = SHARED_;    // one exponential against a shared reference
    static constexpr bool SPECIAL = SPECIAL_;  // some positive, or the edge of S, is here
};

// What a thread needs of its rows.
template <class Tile>
struct RowTerms {
    float inv_norm[Tile::MT][2], norm[Tile::MT][2];
    float weight[Tile::MT][2];  // against the shared reference
    int target[Tile::MT][2];    // column of the tile; -1 where none is looked for
};

template <class Tile, class Mode>
__device__ __forceinline__ RowTerms<Tile> row_terms(const CoefficientTask& task,
                                                    const SharedSides<Tile>& sides,
                                                    const Lane<Tile>& lane, const Corner& corner,
                                                    float reference) {
    RowTerms<Tile> out;
#pragma unroll
    for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const pair::Side& row = sides.rows[lane.row(m, h)];
            out.inv_norm[m][h] = row.inv_norm;
            out.norm[m][h] = pair::norm_of(row);
            out.weight[m][h] = pair::shared_weight(row, reference);
            out.target[m][h] =
                Mode::SPECIAL
                    ? local_target<Tile>(task.pair, corner.row + lane.row(m, h), corner.col)
                    : -1;
        }
    return out;
}

// What a thread needs of one of its columns.
struct ColumnTerm {
    pair::Side side;
    float norm;
    float weight;  // against the shared reference
    bool outside;  // beyond the edge of S
};

// G of one pair, by its rarer rules too.
template <class Mode>
__device__ __forceinline__ float one_coefficient(float s, float reference, float row_weight,
                                                 const pair::Side& row, const ColumnTerm& col,
                                                 bool is_target, bool outside) {
    float g = Mode::SHARED
                  ? pair::shared_coefficient((s - reference) * pair::kLog2E, row_weight, col.weight)
                  : pair::coefficient(s, row, col.side);
    if constexpr (Mode::SPECIAL) {
        if (is_target) g = pair::coefficient(s, row, col.side) - row.target_weight;
        if (outside) g = 0;
    }
    return g;
}

// Coefficients of a warp's products, packed as they are stored; what their rounding leaves out, and
// their share in logit_scale's gradient, go to `sums`.
template <class Tile, class Mode>
__device__ __forceinline__ void to_coefficients(const Accumulators<Tile>& acc, Packed<Tile>& packed,
                                                const CoefficientTask& task,
                                                const SharedSides<Tile>& sides,
                                                const Lane<Tile>& lane, const Corner& corner,
                                                float reference, SharedSums<Tile>& sums) {
    using Element = typename Tile::Element;
    const float scale = *task.pair.logit_scale;
    const float centre = task.centre != nullptr ? *task.centre : 0;
    const auto rows = row_terms<Tile, Mode>(task, sides, lane, corner, reference);
    float scale_sum = 0;
    float row_residual[Tile::MT][2] = {};
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n) {
        const int first_col = lane.template col<Columns::GATHERED>(n);
        ColumnTerm cols[2];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const pair::Side& side = sides.cols[first_col + b];
            cols[b] = {side, pair::norm_of(side), pair::shared_weight(side, reference),
                       corner.col + first_col + b >= task.pair.n};
        }
        float col_residual[2] = {0, 0};
#pragma unroll
        for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = lane.row(m, h);
                float g[2];
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    const float inv_norms = rows.inv_norm[m][h] * cols[b].side.inv_norm;
                    const float cosine = acc[m][n][2 * h + b] * inv_norms;
                    g[b] = one_coefficient<Mode>(
                        pair::similarity(cosine, scale), reference, rows.weight[m][h],
                        sides.rows[row], cols[b], rows.target[m][h] == first_col + b,
                        cols[b].outside || corner.row + row >= task.pair.m);
                    scale_sum = fmaf(g[b], cosine - centre, scale_sum);
                    g[b] *= inv_norms;
                }
                packed[m][h][n] = Element::pack(g[0], g[1]);
                if constexpr (Element::ROUNDS) {
                    const float2 rounded = Element::unpack(packed[m][h][n]);
                    const float left_out[2] = {g[0] - rounded.x, g[1] - rounded.y};
#pragma unroll
                    for (int b = 0; b < 2; ++b) {
                        row_residual[m][h] = fmaf(left_out[b], cols[b].norm, row_residual[m][h]);
                        col_residual[b] = fmaf(left_out[b], rows.norm[m][h], col_residual[b]);
                    }
                }
            }
        if constexpr (Element::ROUNDS) share_columns(col_residual, first_col, lane, sums);
    }
    if constexpr (Element::ROUNDS) share_rows(row_residual, lane, sums);
    scale_sum = reduce_warp(scale_sum, Sum{});
    if (threadIdx.x % WARP == 0) sums.scale[threadIdx.x / WARP] = scale_sum;
}

// Each thread's 16 neighbouring columns of each of its rows, in 16-byte stores.
template <class Tile>
__device__ __forceinline__ void store_coefficients(const Packed<Tile>& packed, void* coefficients,
                                                   int64_t ld, const TilePosition& tile,
                                                   const Lane<Tile>& lane) {
    using Storage = typename Tile::Storage;
    constexpr int PER_STORE = CHUNK_BYTES / sizeof(packed[0][0][0]);
    auto* origin = static_cast<Storage*>(coefficients) + int64_t{tile.row} * Tile::BM * ld +
                   int64_t{tile.col} * Tile::BN + lane.template col<Columns::GATHERED>(0);
#pragma unroll
    for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            auto* target = reinterpret_cast<uint4*>(origin + lane.row(m, h) * ld);
#pragma unroll
            for (int n = 0; n < Tile::NT; n += PER_STORE)
                target[n / PER_STORE] = reinterpret_cast<const uint4&>(packed[m][h][n]);
        }
}

// Adds the warps' sums of SIZE rows or columns up in their order.
template <int WARPS, int SIZE>
__device__ __forceinline__ void write_sums(const float (&sums)[WARPS][SIZE], float* slot) {
    for (int i = threadIdx.x; i < SIZE; i += blockDim.x) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += sums[w][i];
        slot[i] = sum;
    }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS_PER_SM)
    coefficient_kernel(const CoefficientTask task) {
    extern __shared__ __align__(128) char shared[];
    const Panel& panel = task.panel;
    const TilePosition tile(blockIdx.x, panel);
    const Corner corner{panel.row0 + int64_t{tile.row} * Tile::BM,
                        panel.col0 + int64_t{tile.col} * Tile::BN};
    const Lane<Tile> lane(threadIdx.x);
    const SideFetch<Tile> fetch(task, corner.row, corner.col);

    Accumulators<Tile> acc = {};
    inner_products<Tile>(acc, task.pair, corner.row, corner.col, shared);

    static_assert(sizeof(SharedSides<Tile>) + sizeof(SharedSums<Tile>) <= Tile::SHARED_BYTES);
    auto& sides = *reinterpret_cast<SharedSides<Tile>*>(shared);
    auto& sums = *reinterpret_cast<SharedSums<Tile>*>(shared + sizeof(SharedSides<Tile>));
    fetch.share(sides);
    const Inspection part = inspect(task, sides, lane, corner);

    alignas(CHUNK_BYTES) Packed<Tile> packed;
    const auto transform = [&](auto mode) {
        to_coefficients<Tile, decltype(mode)>(acc, packed, task, sides, lane, corner,
                                              part.reference, sums);
    };
    if (part.shared && !part.special) {
        transform(Mode<true, false>{});
    } else if (part.shared) {
        transform(Mode<true, true>{});
    } else {
        transform(Mode<false, true>{});
    }

    if (task.coefficients != nullptr) {
        store_coefficients<Tile>(packed, task.coefficients, int64_t{panel.col_tiles} * Tile::BN,
                                 tile, lane);
    }
    __syncthreads();
    if (task.row_residuals != nullptr) {
        const int64_t size = int64_t{panel.row_tiles} * Tile::BM;
        write_sums(sums.rows, task.row_residuals + tile.col * size + tile.row * Tile::BM);
    }
    if (task.col_residuals != nullptr) {
        const int64_t size = int64_t{panel.col_tiles} * Tile::BN;
        write_sums(sums.cols, task.col_residuals + tile.row * size + tile.col * Tile::BN);
    }
    if (task.scale_slots != nullptr && threadIdx.x == 0) {
        float sum = 0;
        for (const float part : sums.scale) sum += part;
        task.scale_slots[blockIdx.x] += sum;
    }
}

}  // namespace infloss::sm80
