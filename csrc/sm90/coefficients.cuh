// Backward, first half: a tile of S becomes a tile of coefficients G times both inverse norms,
// rounded and stored in the panel. What the rounding leaves out is summed for each row and column,
// times the norm of the feature that it would have met; the gradient products add it back.

#pragma once

#include "sm90/pair_kernel.cuh"
#include "sm90/ranges.h"

namespace infloss::sm90 {

struct CoefficientArgs {
    PairParams pair;
    const pair::Side* rows;   // [m]
    const pair::Side* cols;   // [n]
    const Range* row_ranges;  // of each BM rows
    const Range* col_ranges;  // of each BN columns
    const float* centre;      // [], or null
    CUtensorMap coefficients;
    bool store;            // coefficients are wanted
    float* row_residuals;  // [strips, row_ld], or null
    float* col_residuals;  // [sweeps of a strip * CLUSTER * WARPS, col_ld], or null
    int64_t row_ld, col_ld;
    float* scale_slots;  // [CTAs * WARPS]: += sum of G_ij (cosine_ij - centre), or null
};

// A column as every row of the tile meets it. Its weight is that of its term against the tile's
// reference, or where the tile has none, against its own maximum.
struct alignas(16) ColumnTerm {
    float inv_norm, norm, weight, max;
};

class Coefficients {
  public:
    using Args = CoefficientArgs;
    struct Extra {
        pair::Side sides[BN];  // of a sweep's columns
        ColumnTerm terms[BN];  // of a tile's
    };

    __device__ __forceinline__ static bool skips(const Args&) { return false; }

    __device__ __forceinline__ Coefficients(const Args& args, Shared<Extra>& shared,
                                            const Lane& lane)
        : args_(args),
          lane_(lane),
          sides_(shared.extra[lane.warpgroup].sides),
          terms_(shared.extra[lane.warpgroup].terms),
          staging_(ptx::shared_address(shared.staging[lane.warp])),
          scale_(*args.pair.logit_scale),
          centre_(args.centre != nullptr ? *args.centre : 0),
          scale_sum_(0) {}

    __device__ __forceinline__ void enter() {
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) col_residuals_[j][0] = col_residuals_[j][1] = 0;
    }

    __device__ __forceinline__ void prepare(const PairTile& tile) {
        choose_reference(tile);
        const pair::Side rows[2] = {row_side(tile, 0), row_side(tile, 1)};
        lane_.sync_warpgroup();  // everyone is done with the last tile
        for (int j = lane_.thread; j < BN; j += WARPGROUP) {
            if (tile.first) sides_[j] = column_side(tile.col + j);
            terms_[j] = column_term(sides_[j]);
        }
        lane_.sync_warpgroup();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            row_inv_norm_[h] = rows[h].inv_norm;
            row_weight_[h] = pair::shared_weight(rows[h], reference_);
        }
        special_ = is_special(args_.pair, tile, lane_);
    }

    template <class Element>
    __device__ __forceinline__ void finish(Element, const float (&acc)[BN / 2],
                                           const PairTile& tile) {
        float row_residuals[2] = {0, 0};
        if (shared_ && !special_) {
            transform<Element, true, false>(acc, tile, row_residuals);
        } else if (shared_) {
            transform<Element, true, true>(acc, tile, row_residuals);
        } else {
            transform<Element, false, true>(acc, tile, row_residuals);
        }
        if (args_.row_residuals == nullptr) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = reduce_quad(row_residuals[h], Sum{});
            if (lane_.quad == 0)
                args_.row_residuals[tile.strip * args_.row_ld + tile.local_row + lane_.row(h)] =
                    sum;
        }
    }

    __device__ __forceinline__ void leave(const Sweep& sweep) {
        if (args_.col_residuals == nullptr) return;
        const int slot = (sweep.index * CLUSTER + ptx::cluster_rank()) * WARPS + lane_.warp;
        write_column_sums(col_residuals_, lane_,
                          args_.col_residuals + slot * args_.col_ld + sweep.strip * BN);
    }

    __device__ __forceinline__ void close() {
        if (threadIdx.x % WARP == 0) ptx::tensor_store_wait();
        if (args_.scale_slots == nullptr) return;
        const float sum = reduce_groups(reduce_quad(scale_sum_, Sum{}), Sum{});
        if (threadIdx.x % WARP == 0) args_.scale_slots[blockIdx.x * WARPS + lane_.warp] += sum;
    }

  private:
    static constexpr int CHUNK = 8;  // blocks of columns that a warp stores at a time

    // No similarity of the tile exceeds its reference by more than the headroom.
    __device__ __forceinline__ void choose_reference(const PairTile& tile) {
        const Range row = args_.row_ranges[tile.row / BM], col = args_.col_ranges[tile.col / BN];
        const float top = fminf(row.top, col.top);
        shared_ = top - fminf(row.bottom, col.bottom) <= kSharedSpan;
        reference_ = top - kHeadroom;
    }

    __device__ __forceinline__ pair::Side row_side(const PairTile& tile, int h) const {
        const int64_t i = tile.row + lane_.row(h);
        return i < args_.pair.m ? args_.rows[i] : pair::no_side();
    }

    __device__ __forceinline__ pair::Side column_side(int64_t j) const {
        return j < args_.pair.n ? args_.cols[j] : pair::no_side();
    }

    __device__ __forceinline__ ColumnTerm column_term(const pair::Side& side) const {
        return {side.inv_norm, pair::norm_of(side),
                shared_ ? pair::shared_weight(side, reference_) : side.weight, side.max};
    }

    // What only the rarer tiles ask for.
    struct Rare {
        RowPositions positions;
        pair::Side rows[2];
    };

    // G of one pair, by its rarer rules too.
    template <bool SHARED, bool SPECIAL>
    __device__ __forceinline__ float coefficient(float cosine, int h, int col, const ColumnTerm& y,
                                                 const PairTile& tile, const Rare& rare) const {
        const float s = pair::similarity(cosine, scale_);
        float g;
        if constexpr (SHARED) {
            const float power = fmaf(cosine, scale_ * pair::kLog2E, -reference_ * pair::kLog2E);
            g = pair::shared_coefficient(power, row_weight_[h], y.weight);
        } else {
            g = pair::coefficient(s, rare.rows[h], {y.inv_norm, y.max, y.weight, 0});
        }
        if constexpr (SPECIAL) {
            if (rare.positions.target[h] == col)
                g = pair::coefficient(s, rare.rows[h], sides_[col]) - rare.rows[h].target_weight;
            if (rare.positions.row[h] >= args_.pair.m || tile.col + col >= args_.pair.n) g = 0;
        }
        return g;
    }

    template <class Element, bool SHARED, bool SPECIAL>
    __device__ __forceinline__ void transform(const float (&acc)[BN / 2], const PairTile& tile,
                                              float (&row_residuals)[2]) {
        const Rare rare{RowPositions(args_.pair, tile, lane_),
                        {row_side(tile, 0), row_side(tile, 1)}};
        const float row_norm[2] = {pair::norm_of(row_inv_norm_[0]),
                                   pair::norm_of(row_inv_norm_[1])};
#pragma unroll
        for (int chunk = 0; chunk < BLOCKS; chunk += CHUNK) {
            uint32_t packed[CHUNK][2];
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                const int j = chunk + i, col = lane_.col(j);
                const ColumnTerm y[2] = {terms_[col], terms_[col + 1]};
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float g[2];
#pragma unroll
                    for (int b = 0; b < 2; ++b) {
                        const float inv_norms = row_inv_norm_[h] * y[b].inv_norm;
                        const float cosine = acc[4 * j + 2 * h + b] * inv_norms;
                        g[b] = coefficient<SHARED, SPECIAL>(cosine, h, col + b, y[b], tile, rare);
                        scale_sum_ = fmaf(g[b], cosine - centre_, scale_sum_);
                        g[b] *= inv_norms;
                    }
                    packed[i][h] = Element::pack(g[0], g[1]);
                    const float2 rounded = Element::unpack(packed[i][h]);
                    const float left_out[2] = {g[0] - rounded.x, g[1] - rounded.y};
#pragma unroll
                    for (int b = 0; b < 2; ++b) {
                        row_residuals[h] = fmaf(left_out[b], y[b].norm, row_residuals[h]);
                        col_residuals_[j][b] = fmaf(left_out[b], row_norm[h], col_residuals_[j][b]);
                    }
                }
            }
            if (args_.store) store(packed, tile, chunk);
        }
    }

    // A warp's 16 rows of 64 columns, by way of its staging.
    __device__ __forceinline__ void store(const uint32_t (&packed)[CHUNK][2], const PairTile& tile,
                                          int chunk) const {
        const int lane = threadIdx.x % WARP;
        const int row = lane % 16, line = staging_ + row * 128;
        if (lane == 0) ptx::tensor_store_wait_read();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < CHUNK; i += 2) {
            const int position = (i + lane / 16) ^ (row % 8);
            ptx::store_matrix_x4(line + position * 16, packed[i][0], packed[i][1], packed[i + 1][0],
                                 packed[i + 1][1]);
        }
        ptx::async_proxy_fence();
        __syncwarp();
        if (lane == 0) {
            ptx::tensor_store(args_.coefficients, staging_, tile.strip * BN + chunk * 8,
                              tile.local_row + lane_.warp * 16);
            ptx::tensor_store_commit();
        }
    }

    const Args& args_;
    const Lane& lane_;
    pair::Side* sides_;
    ColumnTerm* terms_;
    uint32_t staging_;
    float scale_, centre_, scale_sum_;
    float reference_;
    bool shared_;
    bool special_;
    float row_inv_norm_[2], row_weight_[2];
    float col_residuals_[BLOCKS][2];
};

}  // namespace infloss::sm90
