// The passes in double on the host, one row or column of S at a time, from the same rounded
// features that the device sees.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "native/parallel.h"
#include "native/problem.h"

namespace infloss::bench {

// A line of S: a row, or a column.
enum class Side { rows, cols };

struct LineStats {
    double lse;
    double hardest;   // largest that is no positive; -inf for none
    double positive;  // NaN where the line has none
};

struct LineGradient {
    std::vector<double> values;  // [dim], of the row of x or y
    double magnitude;            // what they would reach without cancellation
    double scale;                // the line's part in the gradient of logit_scale
    double scale_magnitude;
};

// Log-sum-exps that a gradient starts from.
struct Lses {
    std::vector<double> rows, cols;  // [m], [n]; cols are empty without a column term
};

class Reference {
  public:
    explicit Reference(const HostProblem& problem) : p_(problem), c_(problem.spec) {}

    std::vector<LineStats> stats(Side side, const std::vector<int64_t>& lines) const {
        std::vector<LineStats> out(lines.size());
        parallel_for(lines.size(), [&](int64_t k) { out[k] = line_stats(side, lines[k]); });
        return out;
    }

    std::vector<LineGradient> gradients(Side side, const std::vector<int64_t>& lines,
                                        const Lses& lses) const {
        std::vector<LineGradient> out(lines.size());
        parallel_for(lines.size(),
                     [&](int64_t k) { out[k] = line_gradient(side, lines[k], lses); });
        return out;
    }

    // No similarity exceeds this (Cauchy-Schwarz); what its rounding costs is measured against it.
    double similarity_bound() const { return c_.logit_scale * longest(p_.x) * longest(p_.y); }

  private:
    const Features& own(Side side) const { return side == Side::rows ? p_.x : p_.y; }
    const Features& other(Side side) const { return side == Side::rows ? p_.y : p_.x; }

    bool is_positive(Side side, int64_t line, int64_t k) const {
        return side == Side::rows ? p_.target[line] == k : p_.target[k] == line;
    }

    // Independent partial sums, which a compiler may vectorise without reordering any.
    static double dot(const float* a, const float* b, int64_t dim) {
        constexpr int kLanes = 8;
        double sums[kLanes] = {};
        int64_t d = 0;
        for (; d + kLanes <= dim; d += kLanes)
            for (int lane = 0; lane < kLanes; ++lane)
                sums[lane] += static_cast<double>(a[d + lane]) * b[d + lane];
        for (; d < dim; ++d) sums[0] += static_cast<double>(a[d]) * b[d];
        double sum = 0;
        for (const double part : sums) sum += part;
        return sum;
    }

    static double longest(const Features& features) {
        double longest = 0;
        for (int64_t i = 0; i < features.rows; ++i) {
            const double square = dot(features.row(i), features.row(i), features.dim);
            longest = std::max(longest, std::sqrt(square) * features.inv_norm[i]);
        }
        return longest;
    }

    std::vector<double> cosines(Side side, int64_t line) const {
        const Features &a = own(side), &b = other(side);
        std::vector<double> out(b.rows);
        for (int64_t k = 0; k < b.rows; ++k)
            out[k] = dot(a.row(line), b.row(k), c_.dim) * a.inv_norm[line] * b.inv_norm[k];
        return out;
    }

    LineStats line_stats(Side side, int64_t line) const {
        constexpr double kInfinity = std::numeric_limits<double>::infinity();
        LineStats out{0, -kInfinity, std::numeric_limits<double>::quiet_NaN()};
        std::vector<double> s = cosines(side, line);
        for (int64_t k = 0; k < static_cast<int64_t>(s.size()); ++k) {
            s[k] *= c_.logit_scale;
            if (is_positive(side, line, k)) {
                out.positive = s[k];
            } else {
                out.hardest = std::max(out.hardest, s[k]);
            }
        }
        const double max = *std::max_element(s.begin(), s.end());
        double sum = 0;
        for (const double value : s) sum += std::exp(value - max);
        out.lse = max + std::log(sum);
        return out;
    }

    struct Coefficient {
        double value;
        double magnitude;  // of its terms
    };

    // G_ij = u_i exp(s - lse_i) + v_j exp(s - lse_j) - w_i [j = t(i)].
    Coefficient coefficient(int64_t i, int64_t j, double s, const Lses& lses) const {
        double terms = p_.row_weight[i] * std::exp(s - lses.rows[i]);
        if (!lses.cols.empty()) terms += p_.col_weight[j] * std::exp(s - lses.cols[j]);
        const double positive = p_.target[i] == j ? p_.target_weight[i] : 0;
        return {terms - positive, terms + positive};
    }

    LineGradient line_gradient(Side side, int64_t line, const Lses& lses) const {
        const Features& b = other(side);
        LineGradient out{std::vector<double>(c_.dim), 0, 0, 0};
        const std::vector<double> cosine = cosines(side, line);
        for (int64_t k = 0; k < b.rows; ++k) {
            const int64_t i = side == Side::rows ? line : k, j = side == Side::rows ? k : line;
            const Coefficient g = coefficient(i, j, c_.logit_scale * cosine[k], lses);
            const double weight = g.value * b.inv_norm[k];
            for (int64_t d = 0; d < c_.dim; ++d) out.values[d] += weight * b.row(k)[d];
            const double length = std::sqrt(dot(b.row(k), b.row(k), c_.dim)) * b.inv_norm[k];
            out.magnitude += g.magnitude * length;
            out.scale += g.value * (cosine[k] - p_.centre);
            out.scale_magnitude += g.magnitude * std::abs(cosine[k] - p_.centre);
        }
        if (c_.normalised) project(own(side), line, out.values);
        const double factor = c_.logit_scale * own(side).inv_norm[line];
        for (double& value : out.values) value *= factor;
        out.magnitude *= factor;
        return out;
    }

    // Takes the component along a row out: a normalised row's length does not matter.
    void project(const Features& features, int64_t i, std::vector<double>& values) const {
        const double square = features.inv_norm[i] * features.inv_norm[i];
        double along = 0;
        for (int64_t d = 0; d < c_.dim; ++d) along += values[d] * features.row(i)[d];
        for (int64_t d = 0; d < c_.dim; ++d) values[d] -= along * square * features.row(i)[d];
    }

    const HostProblem& p_;
    const Case& c_;
};

}  // namespace infloss::bench
