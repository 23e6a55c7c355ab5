// How a panel's tiles are dealt to clusters: in sweeps of `length` cluster tiles down one strip of
// columns, so that what belongs to columns stays in registers. Sweeps that run at one time share
// their rows among neighbouring strips, and their strips in L2.

#pragma once

#include <algorithm>

#include "common/panel.h"

namespace infloss::sm90 {

struct Sweep {
    int index;  // among those of its strip
    int strip;
    int first, last;  // cluster tiles
};

struct Sweeps {
    static constexpr int kNeighbours = 12;  // strips

    int steps;  // cluster tiles of a strip
    int strips;
    int length;
    int per_strip;

    __host__ __device__ int units() const { return strips * per_strip; }

    __device__ Sweep at(int unit) const {
        const int group = unit / (kNeighbours * per_strip);
        const int width = min(kNeighbours, strips - group * kNeighbours);
        const int within = unit - group * kNeighbours * per_strip;
        const int index = within / width;
        return {index, group * kNeighbours + within % width, index * length,
                min((index + 1) * length, steps)};
    }
};

// The length that keeps `clusters` busiest; a sweep's end costs about a sixth of a tile.
inline Sweeps make_sweeps(int steps, int strips, int clusters) {
    constexpr int kLongest = 16;
    constexpr double kEnd = 1.0 / 6;
    const auto of_length = [&](int length) {
        return Sweeps{steps, strips, length, static_cast<int>(ceil_div(steps, length))};
    };
    const auto cost = [&](int length) {
        return static_cast<double>(ceil_div(of_length(length).units(), clusters)) * (length + kEnd);
    };
    int best = 1;
    for (int length = 2; length <= std::min(kLongest, steps); ++length)
        if (cost(length) <= cost(best)) best = length;
    return of_length(best);
}

}  // namespace infloss::sm90
