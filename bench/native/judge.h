// Compares what the device wrote with the reference: everything where that is cheap, otherwise a
// sample of rows and columns.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "native/compare.h"
#include "native/device_problem.h"
#include "native/reference.h"

namespace infloss::bench {

constexpr int64_t kWholeReference = int64_t{1} << 26;  // most products m n dim to compute in full
constexpr int64_t kSampled = 16;                       // rows, and columns, beyond that

// Error of a similarity as a part of its bound scale |x| |y|.
//
// bf16, f16: products of the rounded features are exact in float32; the tensor cores truncate as
//   they add them up, at most 2^-23 of the sum at each of dim / 16 steps. 1e-5 is enough up to a
//   dim of 1,300 whatever the signs, and far beyond that in practice.
// tf32x3: what three products leave out is 2^-22 of each term; sums are rounded.
// tf32: each operand is off by up to 2^-11, the bound is off by twice that. Over many features the
//   errors average out: 5 standard deviations of the mean of dim of them.
constexpr double kHalfSimilarity = 1e-5;
constexpr double kTf32x3Similarity = 2e-6;
constexpr double kTf32Similarity = 0x1p-10;
constexpr double kTf32Deviations = 2e-3;  // 5 sqrt(2/3) 2^-11

// Error of a gradient, ||out - exact|| / ||exact||, from rounding coefficients and features, and
// the result where it is stored in half; what the similarities' errors add comes on top.
//
// bf16: each rounding is off by up to 2^-8, by 1.6e-3 in the root mean square, by sqrt(2) of that
//   where one coefficient, the positive's, makes most of a row. f16: an eighth of it; some more for
//   what lies below its range. Small shapes average little, so each has some room.
// tf32, tf32x3: gradients are products of three TF32 terms, whatever S was made of. One term would
//   be off by 3e-4, two roundings to 11 bits, each 2e-4 in the root mean square. At logit scale 14
//   what tf32's S adds would hide that; "hardly scaled" in bench_kernels.cpp, where it adds 2.5e-5,
//   does not.
constexpr double kBf16Gradient = 4e-3;
constexpr double kF16Gradient = 8e-4;
constexpr double kFloat32Gradient = 5e-5;

// Error of the gradient of logit_scale, as a part of the sum of its terms' magnitudes.
constexpr double kScaleGradient = 1e-5;

// A gradient may cancel to nothing (one pair alone; rows of one feature). Then its error is
// measured against this part of what cancelled.
constexpr double kCancellation = 1e-3;

inline double similarity_tolerance(const Case& c) {
    switch (c.arithmetic) {
        case Arithmetic::bf16:
        case Arithmetic::f16:
            return kHalfSimilarity;
        case Arithmetic::tf32x3:
            return kTf32x3Similarity;
        case Arithmetic::tf32:
            return std::min(kTf32Similarity, kTf32Deviations / std::sqrt(double(c.dim)));
    }
    throw std::logic_error("unknown arithmetic");
}

inline double gradient_rounding(Arithmetic arithmetic) {
    switch (arithmetic) {
        case Arithmetic::bf16:
            return kBf16Gradient;
        case Arithmetic::f16:
            return kF16Gradient;
        case Arithmetic::tf32:
        case Arithmetic::tf32x3:
            return kFloat32Gradient;
    }
    throw std::logic_error("unknown arithmetic");
}

struct Check {
    std::string what;
    double error;
    double tolerance;

    bool ok() const { return error <= tolerance; }
    // Errors in units of what is allowed, to compare checks by.
    double severity() const {
        if (ok()) return tolerance > 0 ? error / tolerance : 0;
        return std::numeric_limits<double>::infinity();
    }
};

// [2, size] (max, sum of exp(s - max)) as log-sum-exps.
inline std::vector<double> to_lses(const std::vector<float>& stats) {
    const size_t size = stats.size() / 2;
    std::vector<double> lses(size);
    for (size_t i = 0; i < size; ++i) lses[i] = stats[i] + std::log(double(stats[size + i]));
    return lses;
}

template <class Value>
Check count_unwritten(const std::string& what, const std::vector<Value>& values) {
    const auto finite = [](Value value) { return std::isfinite(value); };
    return {what + " not finite",
            double(values.size()) - double(std::count_if(values.begin(), values.end(), finite)), 0};
}

class Judge {
  public:
    explicit Judge(const HostProblem& problem)
        : p_(problem),
          c_(problem.spec),
          reference_(problem),
          bound_(reference_.similarity_bound()) {
        const double products = double(c_.m) * c_.n * c_.dim;
        whole_ = products <= kWholeReference;
        rows_ = chosen(c_.m);
        cols_ = chosen(c_.n);
        row_stats_ = reference_.stats(Side::rows, rows_);
        col_stats_ = reference_.stats(Side::cols, cols_);
    }

    std::vector<Check> lse(const Outputs& out) const {
        std::vector<Check> checks;
        check_stats("row", out.row_stats, out.row_hardest, rows_, row_stats_, checks);
        if (c_.cols) check_stats("col", out.col_stats, out.col_hardest, cols_, col_stats_, checks);
        check_positives(out.positive.download<float>(), checks);
        return checks;
    }

    // The device's own log-sum-exps, which lse() has checked, stand in where the reference has only
    // a sample of them.
    std::vector<Check> grad(const Outputs& out) {
        if (!exact_) exact_ = exact_gradients(out);
        std::vector<Check> checks;
        if (c_.want_dx) check_gradient("dx", out.dx, rows_, exact_->rows, checks);
        if (c_.want_dy) check_gradient("dy", out.dy, cols_, exact_->cols, checks);
        if (c_.want_dscale) check_scale_gradient(out.dscale.download<float>(), checks);
        return checks;
    }

  private:
    struct Gradients {
        std::vector<LineGradient> rows, cols;
    };

    // All lines, or a sample with the first and the last.
    std::vector<int64_t> chosen(int64_t count) const {
        std::vector<int64_t> lines;
        for (int64_t k = 0; k < (whole_ ? count : std::min(count, kSampled)); ++k)
            lines.push_back(whole_ || count <= kSampled ? k
                                                        : int64_t(random_word(count, k) % count));
        if (lines.size() < size_t(count)) {
            lines.front() = 0;
            lines.back() = count - 1;
        }
        return lines;
    }

    void check_stats(const std::string& side, const DeviceBuffer& stats,
                     const DeviceBuffer& hardest, const std::vector<int64_t>& lines,
                     const std::vector<LineStats>& exact, std::vector<Check>& checks) const {
        const std::vector<double> lses = to_lses(stats.download<float>());
        const std::vector<float> maxima = hardest.download<float>();
        double lse_error = 0, hardest_error = 0;
        for (size_t k = 0; k < lines.size(); ++k) {
            lse_error = std::max(lse_error, difference(lses[lines[k]], exact[k].lse));
            if (!maxima.empty())
                hardest_error =
                    std::max(hardest_error, difference(maxima[lines[k]], exact[k].hardest));
        }
        checks.push_back(count_unwritten(side + " lse", lses));
        checks.push_back({side + " lse", lse_error / bound_, similarity_tolerance(c_)});
        if (!maxima.empty())
            checks.push_back({side + " hardest", hardest_error / bound_, similarity_tolerance(c_)});
    }

    void check_positives(const std::vector<float>& positives, std::vector<Check>& checks) const {
        int64_t misplaced = 0;
        for (int64_t i = 0; i < c_.m; ++i)
            misplaced += std::isnan(positives[i]) == p_.has_positive(i);
        double error = 0;
        for (size_t k = 0; k < rows_.size(); ++k)
            error = std::max(error, difference(positives[rows_[k]], row_stats_[k].positive));
        checks.push_back({"positives misplaced", double(misplaced), 0});
        checks.push_back({"positive", error / bound_, similarity_tolerance(c_)});
    }

    Gradients exact_gradients(const Outputs& out) const {
        Lses lses;
        if (whole_) {
            for (const LineStats& line : row_stats_) lses.rows.push_back(line.lse);
            if (c_.cols)
                for (const LineStats& line : col_stats_) lses.cols.push_back(line.lse);
        } else {
            lses.rows = to_lses(out.row_stats.download<float>());
            lses.cols = to_lses(out.col_stats.download<float>());
        }
        return {reference_.gradients(Side::rows, rows_, lses),
                reference_.gradients(Side::cols, cols_, lses)};
    }

    // An error of s is one of exp(s) as well; those of a log-sum-exp's many terms average out.
    double spread() const { return bound_ * similarity_tolerance(c_); }

    void check_gradient(const std::string& what, const DeviceBuffer& out,
                        const std::vector<int64_t>& lines, const std::vector<LineGradient>& exact,
                        std::vector<Check>& checks) const {
        const std::vector<float> values =
            decode(out.download<std::byte>(), dtype_of(c_.arithmetic));
        double wrong = 0, norm = 0, magnitude = 0;
        for (size_t k = 0; k < lines.size(); ++k) {
            for (int64_t d = 0; d < c_.dim; ++d) {
                const double error = difference(values[lines[k] * c_.dim + d], exact[k].values[d]);
                wrong += error * error;
                norm += exact[k].values[d] * exact[k].values[d];
            }
            magnitude += exact[k].magnitude * exact[k].magnitude;
        }
        const double base = std::max(std::sqrt(norm), kCancellation * std::sqrt(magnitude));
        checks.push_back(count_unwritten(what, values));
        checks.push_back(
            {what, std::sqrt(wrong) / base, gradient_rounding(c_.arithmetic) + spread()});
    }

    // A sample of rows says nothing about the sum over all.
    void check_scale_gradient(const std::vector<float>& dscale, std::vector<Check>& checks) const {
        checks.push_back(count_unwritten("dscale", dscale));
        if (!whole_) return;
        double exact = 0, magnitude = 0;
        for (const LineGradient& line : exact_->rows) {
            exact += line.scale;
            magnitude += line.scale_magnitude;
        }
        checks.push_back(
            {"dscale", difference(dscale[0], exact) / magnitude, kScaleGradient + spread()});
    }

    const HostProblem& p_;
    const Case& c_;
    Reference reference_;
    double bound_;
    bool whole_ = false;
    std::vector<int64_t> rows_, cols_;
    std::vector<LineStats> row_stats_, col_stats_;
    std::optional<Gradients> exact_;
};

// Runs a pass over poisoned outputs and workspace, and judges what it wrote.
inline std::vector<Check> verify(DeviceProblem& problem, Judge& judge, Pass pass) {
    if (pass == Pass::grad) problem.run(Pass::lse);
    problem.poison(pass);
    problem.run(pass);
    INFLOSS_CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<Check> checks = judge.lse(problem.outputs());
    if (pass != Pass::lse)
        for (Check& check : judge.grad(problem.outputs())) checks.push_back(std::move(check));
    return checks;
}

}  // namespace infloss::bench
