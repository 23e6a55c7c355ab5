// Where the maxima of a tile's rows and of its columns lie, which decides whether they can share a
// reference: similarities up to it are exact, and of each row and column what lies down to 2^-40 of
// its maximum.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace infloss {
namespace pair {
struct Side;
}

namespace sm90 {

// A reference may lie kHeadroom below the largest similarity, as float32 has 2^127; then it may lie
// kSharedSpan - kHeadroom above a row's or column's own maximum. In units of similarity.
constexpr float kHeadroom = 60 / 1.4426950408889634f;
constexpr float kSharedSpan = 140 / 1.4426950408889634f;

struct Range {
    float top, bottom;  // of maxima; infinite where there are none, bottom -infinite for NaN
};

// Ranges of each `block` of sides [count].
void launch_ranges(const pair::Side* sides, int64_t count, int block, Range* ranges,
                   cudaStream_t stream);

}  // namespace sm90
}  // namespace infloss
