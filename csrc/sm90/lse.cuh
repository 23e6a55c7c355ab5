// Forward against one reference for all of S: one exponential serves a row and a column, and a
// sweep's column sums stay in registers. The reference comes from a bound on S; whether it lost any
// row or column is seen from the sums (see certify.cu).

#pragma once

#include "sm90/pair_kernel.cuh"

namespace infloss::sm90 {

struct SharedLseArgs {
    PairParams pair;
    const float* reference;  // [], as a power of two
    float* row_sums;         // [strips, row_ld], of 2^(s log2(e) - reference); or null
    float* col_sums;         // [sweeps of a strip * CLUSTER * WARPS, col_ld], or null
    int64_t row_ld, col_ld;
    float* positive;  // [m]
};

class SharedLse {
  public:
    using Args = SharedLseArgs;
    struct Extra {
        float col_inv_norm[BN];
    };

    __device__ __forceinline__ static bool skips(const Args&) { return false; }

    __device__ __forceinline__ SharedLse(const Args& args, Shared<Extra>& shared, const Lane& lane)
        : args_(args),
          lane_(lane),
          col_inv_norm_(shared.extra[lane.warpgroup].col_inv_norm),
          scale_(*args.pair.logit_scale),
          reference_(*args.reference) {}

    __device__ __forceinline__ void enter() {
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) col_sums_[j][0] = col_sums_[j][1] = 0;
    }

    __device__ __forceinline__ void prepare(const PairTile& tile) {
        const PairParams& p = args_.pair;
        if (tile.first) {
            lane_.sync_warpgroup();
            for (int j = lane_.thread; j < BN; j += WARPGROUP)
                col_inv_norm_[j] = inv_norm_at(p.y_inv_norm, tile.col + j, p.n);
            lane_.sync_warpgroup();
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
            row_inv_norm_[h] = inv_norm_at(p.x_inv_norm, tile.row + lane_.row(h), p.m);
        special_ = is_special(p, tile, lane_);
    }

    template <class Element>
    __device__ __forceinline__ void finish(Element, const float (&acc)[BN / 2],
                                           const PairTile& tile) {
        if (special_) {
            add_terms<true>(acc, tile);
        } else {
            add_terms<false>(acc, tile);
        }
    }

    __device__ __forceinline__ void leave(const Sweep& sweep) {
        if (args_.col_sums == nullptr) return;
        const int slot = (sweep.index * CLUSTER + ptx::cluster_rank()) * WARPS + lane_.warp;
        write_column_sums(col_sums_, lane_,
                          args_.col_sums + slot * args_.col_ld + sweep.strip * BN);
    }

    __device__ __forceinline__ void close() {}

  private:
    template <bool SPECIAL>
    __device__ __forceinline__ void add_terms(const float (&acc)[BN / 2], const PairTile& tile) {
        const PairParams& p = args_.pair;
        const RowPositions rows(p, tile, lane_);
        const float factor = scale_ * pair::kLog2E;
        const float row_factor[2] = {row_inv_norm_[0] * factor, row_inv_norm_[1] * factor};
        float row_sums[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
            const int col = lane_.col(j);
            const float2 y = *reinterpret_cast<const float2*>(col_inv_norm_ + col);
            const float y_inv_norm[2] = {y.x, y.y};
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    const float product = acc[4 * j + 2 * h + b];
                    float term =
                        ptx::exp2_approx(fmaf(product * row_factor[h], y_inv_norm[b], -reference_));
                    if constexpr (SPECIAL) {
                        const bool positive = rows.target[h] == col + b;
                        if (positive)
                            args_.positive[rows.row[h]] = pair::similarity(
                                pair::cosine(product, row_inv_norm_[h], y_inv_norm[b]), scale_);
                        if (positive || rows.row[h] >= p.m || tile.col + col + b >= p.n) term = 0;
                    }
                    row_sums[h] += term;
                    col_sums_[j][b] += term;
                }
        }
        if (args_.row_sums == nullptr) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = reduce_quad(row_sums[h], Sum{});
            if (lane_.quad == 0)
                args_.row_sums[tile.strip * args_.row_ld + tile.local_row + lane_.row(h)] = sum;
        }
    }

    const Args& args_;
    const Lane& lane_;
    float* col_inv_norm_;
    float scale_, reference_;
    bool special_;
    float row_inv_norm_[2];
    float col_sums_[BLOCKS][2];
};

// Every row and column against its own maximum: the exact path, and the one that knows the hardest
// negatives.
struct OwnLseArgs {
    PairParams pair;
    const int* only_if;  // [] not 0, or null: always
    float* row_slots;    // [strips, 2, row_ld] (max, sum), or null
    float* col_slots;    // [sweeps of a strip * CLUSTER, 2, col_ld], or null
    int64_t row_ld, col_ld;
    float* positive;  // [m]
};

class OwnLse {
  public:
    using Args = OwnLseArgs;
    struct Extra {
        float col_inv_norm[BN];
    };

    __device__ __forceinline__ static bool skips(const Args& args) {
        return args.only_if != nullptr && *args.only_if == 0;
    }

    __device__ __forceinline__ OwnLse(const Args& args, Shared<Extra>& shared, const Lane& lane)
        : args_(args),
          lane_(lane),
          col_inv_norm_(shared.extra[lane.warpgroup].col_inv_norm),
          partials_(reinterpret_cast<float2 (*)[BN]>(shared.staging)),
          scale_(*args.pair.logit_scale) {
        static_assert(sizeof(shared.staging) == sizeof(float2[WARPS][BN]));
    }

    __device__ __forceinline__ void enter() { column_ = {-INFINITY, 0}; }

    __device__ __forceinline__ void prepare(const PairTile& tile) {
        const PairParams& p = args_.pair;
        if (tile.first) {
            lane_.sync_warpgroup();
            for (int j = lane_.thread; j < BN; j += WARPGROUP)
                col_inv_norm_[j] = inv_norm_at(p.y_inv_norm, tile.col + j, p.n);
            lane_.sync_warpgroup();
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
            row_inv_norm_[h] = inv_norm_at(p.x_inv_norm, tile.row + lane_.row(h), p.m);
    }

    template <class Element>
    __device__ __forceinline__ void finish(Element, float (&acc)[BN / 2], const PairTile& tile) {
        to_similarities(acc, tile);
        reduce_rows(acc, tile);
        if (args_.col_slots != nullptr) reduce_columns(acc);
    }

    __device__ __forceinline__ void leave(const Sweep& sweep) {
        if (args_.col_slots == nullptr) return;
        const int64_t slot = sweep.index * CLUSTER + ptx::cluster_rank();
        float* out = args_.col_slots + slot * 2 * args_.col_ld + sweep.strip * BN + consumer();
        out[0] = column_.x;
        out[args_.col_ld] = column_.y;
    }

    __device__ __forceinline__ void close() {}

  private:
    static constexpr int ALL_CONSUMERS = 1 + CONSUMERS;  // a named barrier

    __device__ __forceinline__ static int consumer() { return threadIdx.x - WARPGROUP; }

    __device__ __forceinline__ void to_similarities(float (&acc)[BN / 2], const PairTile& tile) {
        const PairParams& p = args_.pair;
        const RowPositions rows(p, tile, lane_);
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j) {
            const int col = lane_.col(j);
            const float2 y = *reinterpret_cast<const float2*>(col_inv_norm_ + col);
            const float y_inv_norm[2] = {y.x, y.y};
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    float& s = acc[4 * j + 2 * h + b];
                    s = pair::similarity(pair::cosine(s, row_inv_norm_[h], y_inv_norm[b]), scale_);
                    const bool positive = rows.target[h] == col + b;
                    if (positive) args_.positive[rows.row[h]] = s;
                    if (positive || rows.row[h] >= p.m || tile.col + col + b >= p.n) s = -INFINITY;
                }
        }
    }

    __device__ __forceinline__ void reduce_rows(const float (&s)[BN / 2], const PairTile& tile) {
        if (args_.row_slots == nullptr) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float max = -INFINITY, sum = 0;
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j)
                max = fmaxf(max, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
            max = reduce_quad(max, Max{});
            const float reference = pair::reference(max);
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j)
                sum += pair::term(s[4 * j + 2 * h], reference) +
                       pair::term(s[4 * j + 2 * h + 1], reference);
            sum = reduce_quad(sum, Sum{});
            if (lane_.quad != 0) continue;
            float* out = args_.row_slots + int64_t{tile.strip} * 2 * args_.row_ld + tile.local_row +
                         lane_.row(h);
            out[0] = max;
            out[args_.row_ld] = sum;
        }
    }

    // Each thread keeps what the sweep has seen of one column.
    __device__ __forceinline__ void reduce_columns(const float (&s)[BN / 2]) {
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j)
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const float upper = s[4 * j + b], lower = s[4 * j + 2 + b];
                const float max = reduce_groups(fmaxf(upper, lower), Max{});
                const float reference = pair::reference(max);
                const float sum = reduce_groups(
                    pair::term(upper, reference) + pair::term(lower, reference), Sum{});
                if (lane_.group == 0) partials_[lane_.warp][lane_.col(j) + b] = {max, sum};
            }
        ptx::named_barrier_sync(ALL_CONSUMERS, CONSUMERS * WARPGROUP);
        float max = column_.x;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) max = fmaxf(max, partials_[w][consumer()].x);
        float sum = pair::rescaled(column_.x, column_.y, max);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float2 other = partials_[w][consumer()];
            sum += pair::rescaled(other.x, other.y, max);
        }
        column_ = {max, sum};
        ptx::named_barrier_sync(ALL_CONSUMERS, CONSUMERS * WARPGROUP);
    }

    const Args& args_;
    const Lane& lane_;
    float* col_inv_norm_;
    float2 (*partials_)[BN];
    float scale_;
    float row_inv_norm_[2];
    float2 column_;  // (max, sum)
};

}  // namespace infloss::sm90
