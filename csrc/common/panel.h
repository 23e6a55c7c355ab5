// S is worked through in panels, whose size the workspace bounds; a panel is one launch, cut into
// tiles.

#pragma once

#include <algorithm>
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

// Halves a panel of whole tiles until it needs at most `limit` bytes, or is one tile.
template <class Bytes>
void fit_panel(int64_t& rows, int64_t& cols, int tile_rows, int tile_cols, int64_t limit,
               Bytes bytes) {
    while (bytes() > limit && (rows > tile_rows || cols > tile_cols)) {
        if (rows > tile_rows && (rows >= cols || cols == tile_cols)) {
            rows = round_up(rows / 2, tile_rows);
        } else {
            cols = round_up(cols / 2, tile_cols);
        }
    }
}

// The panel of at most rows x cols of an m x n matrix that starts at (row0, col0).
inline Panel make_panel(int64_t m, int64_t n, int64_t row0, int64_t col0, int64_t rows,
                        int64_t cols, int tile_rows, int tile_cols) {
    const auto height = static_cast<int>(std::min(rows, m - row0));
    const auto width = static_cast<int>(std::min(cols, n - col0));
    return {row0,
            col0,
            height,
            width,
            static_cast<int>(ceil_div(height, tile_rows)),
            static_cast<int>(ceil_div(width, tile_cols))};
}

}  // namespace infloss
