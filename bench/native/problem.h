// One row of the benchmark: what is asked, and its inputs on the host.

#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "common/params.h"
#include "native/element.h"
#include "native/parallel.h"
#include "native/random.h"

namespace infloss::bench {

// step: inverse norms, then lse, then grad, as one training step takes them.
enum class Pass { lse, grad, step };

constexpr Pass kPasses[] = {Pass::lse, Pass::grad, Pass::step};

inline const char* name_of(Pass pass) {
    return pass == Pass::lse ? "lse" : pass == Pass::grad ? "grad" : "step";
}

struct Case {
    std::string what;  // why the row is there
    int64_t m, n, dim;
    Arithmetic arithmetic = Arithmetic::bf16;
    Path path = Path::sm80;
    float logit_scale = 1 / 0.07f;
    bool normalised = true;
    bool cols = true;      // statistics of columns too
    bool hardest = false;  // the hardest negatives too
    bool cone = false;     // unrelated rows have cosine 0.9, as real embeddings do
    bool want_dx = true, want_dy = true, want_dscale = true;
    bool target_array = false;                     // some of its targets are no column
    int64_t target_offset = 0, target_stride = 1;  // without an array
    int64_t workspace_limit = int64_t{256} << 20;  // bytes
};

// Floating-point operations of the products that a pass cannot do without.
inline double flops_of(const Case& c, Pass pass) {
    const double products = pass == Pass::lse ? 1 : pass == Pass::grad ? 3 : 4;
    return products * 2 * static_cast<double>(c.m) * c.n * c.dim;
}

// Bytes moved if every input is read once and every output written once.
inline double fewest_bytes_of(const Case& c, Pass pass) {
    const double features =
        static_cast<double>(c.m + c.n) * c.dim * element_bytes(dtype_of(c.arithmetic));
    const double norms = c.normalised ? c.m + c.n : 0;
    const double sides = c.cols ? c.m + c.n : c.m;
    const double stats = 2 * sides, positive = c.m, weights = sides + c.m;
    if (pass == Pass::lse) return features + sizeof(float) * (norms + stats + positive);
    if (pass == Pass::grad) return 2 * features + sizeof(float) * (norms + stats + weights);
    return 2 * features + sizeof(float) * (norms + stats + positive + weights);
}

struct Features {
    int64_t rows, dim;
    std::vector<float> values;     // [rows, dim], already rounded to what the device will see
    std::vector<double> inv_norm;  // [rows], 1 where rows are not normalised

    const float* row(int64_t i) const { return values.data() + i * dim; }
};

struct HostProblem {
    Case spec;
    Features x, y;
    std::vector<int64_t> target;       // [m]: t(i), a column or not
    std::vector<float> row_weight;     // [m], u
    std::vector<float> col_weight;     // [n], v; empty without columns
    std::vector<float> target_weight;  // [m], w
    float centre = 0.125f;

    bool has_positive(int64_t i) const { return target[i] >= 0 && target[i] < spec.n; }
};

// Streams of random values.
enum Seed : uint64_t { kSeedX = 1, kSeedY, kSeedMean, kSeedTarget, kSeedRowWeight, kSeedColWeight };

// Feature d of a direction that is unrelated to all others but for the cone's mean.
inline float raw_feature(const Case& c, uint64_t seed, int64_t i, int64_t d) {
    constexpr float kMean = 3;  // cosine 9 / (9 + 1)
    const float noise = normal(seed, i * c.dim + d);
    return c.cone ? noise + kMean * normal(kSeedMean, d) : noise;
}

// Rows of differing norms: around sqrt(dim) where they will be normalised, around 1 where not.
template <class Value>
Features make_features(const Case& c, uint64_t seed, int64_t rows, Value value) {
    Features features{rows, c.dim, std::vector<float>(rows * c.dim),
                      std::vector<double>(rows, 1.0)};
    const float unit = c.normalised ? 1 : 1 / std::sqrt(static_cast<float>(c.dim));
    const DType dtype = dtype_of(c.arithmetic);
    parallel_for(rows, [&](int64_t i) {
        const float length = unit * uniform(0.5f, 1.5f, ~seed, i);
        double square = 0;
        for (int64_t d = 0; d < c.dim; ++d) {
            float& out = features.values[i * c.dim + d];
            out = rounded_to(dtype, length * value(i, d));
            square += static_cast<double>(out) * out;
        }
        if (c.normalised) features.inv_norm[i] = 1 / std::sqrt(square);
    });
    return features;
}

inline std::vector<int64_t> make_targets(const Case& c) {
    std::vector<int64_t> target(c.m);
    for (int64_t i = 0; i < c.m; ++i) {
        const auto drawn = static_cast<int64_t>(random_word(kSeedTarget, i) % (c.n + c.n / 4 + 1));
        target[i] = c.target_array ? drawn - c.n / 8 : c.target_offset + i * c.target_stride;
    }
    return target;
}

// Row whose positive is column j, or -1; of several, the last.
inline std::vector<int64_t> sources_of(const Case& c, const std::vector<int64_t>& target) {
    std::vector<int64_t> source(c.n, -1);
    for (int64_t i = 0; i < c.m; ++i)
        if (target[i] >= 0 && target[i] < c.n) source[target[i]] = i;
    return source;
}

// Pairs match weakly: where they match well the gradient all but vanishes, and its error with it.
// Weights are those of a summed loss, each pair with its own upstream gradient; a mean over many
// rows would push float16 gradients below float16's range, which a gradient scaler prevents.
inline HostProblem make_problem(const Case& c) {
    constexpr float kMatch = 0.3f;
    HostProblem problem;
    problem.spec = c;
    problem.target = make_targets(c);
    const std::vector<int64_t> source = sources_of(c, problem.target);
    problem.x = make_features(c, kSeedX, c.m,
                              [&](int64_t i, int64_t d) { return raw_feature(c, kSeedX, i, d); });
    problem.y = make_features(c, kSeedY, c.n, [&](int64_t j, int64_t d) {
        const float noise = raw_feature(c, kSeedY, j, d);
        return source[j] < 0 ? noise : noise + kMatch * raw_feature(c, kSeedX, source[j], d);
    });
    problem.row_weight = random_values(c.m, 0.25f, 0.75f, kSeedRowWeight);
    if (c.cols) problem.col_weight = random_values(c.n, 0.25f, 0.75f, kSeedColWeight);
    problem.target_weight = problem.row_weight;
    for (int64_t i = 0; i < c.m; ++i)
        if (c.cols && problem.has_positive(i))
            problem.target_weight[i] += problem.col_weight[problem.target[i]];
    return problem;
}

}  // namespace infloss::bench
