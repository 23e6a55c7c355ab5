// S is worked through in panels, whose size the workspace bounds; a panel is one launch, cut into
// tiles.

#pragma once

#include <cstdint>

namespace infloss {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

constexpr int64_t round_up(int64_t value, int64_t unit) {
    return ceil_div(value, unit) * unit;
}

struct Panel {
    int64_t row0, col0;  // where it starts in S
    int rows, cols;      // its extent, ragged at the edges of S
    int row_tiles, col_tiles;
};

}  // namespace infloss
