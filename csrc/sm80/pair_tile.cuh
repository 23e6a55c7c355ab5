// What both passes over S share: a tile's raster position, its operands, its cosines.

#pragma once

#include "common/pair.cuh"
#include "common/panel.h"
#include "common/params.h"
#include "sm80/mainloop.cuh"

namespace infloss::sm80 {

// Tiles of a panel in an order that keeps what runs at one time close together in both directions,
// so that operands are read from L2.
struct TilePosition {
    int row, col;

    __device__ TilePosition(int index, const Panel& panel) {
        constexpr int kGroup = 12;
        const int group = index / (kGroup * panel.col_tiles);
        const int height = min(kGroup, panel.row_tiles - group * kGroup);
        const int within = index - group * kGroup * panel.col_tiles;
        row = group * kGroup + within % height;
        col = within / height;
    }
};

// Lines of `rows` features from row `first` on.
template <class Storage>
__device__ __forceinline__ Operand feature_rows(const void* features, int64_t first, int64_t rows,
                                                int64_t stride, int64_t dim) {
    return {static_cast<const Storage*>(features) + first * stride,
            stride * static_cast<int64_t>(sizeof(Storage)), static_cast<int>(rows),
            static_cast<int>(dim * sizeof(Storage))};
}

template <class Tile>
using Accumulators = float[Tile::MT][Tile::NT][4];

// acc = <x_i, y_j> for the tile whose first row and column are given.
template <class Tile>
__device__ __forceinline__ void inner_products(Accumulators<Tile>& acc, const PairParams& p,
                                               int64_t row0, int64_t col0, char* shared) {
    using Storage = typename Tile::Storage;
    const Operand x =
        feature_rows<Storage>(p.x, row0, min(int64_t{Tile::BM}, p.m - row0), p.x_stride, p.dim);
    const Operand y =
        feature_rows<Storage>(p.y, col0, min(int64_t{Tile::BN}, p.n - col0), p.y_stride, p.dim);
    const int k_tiles = static_cast<int>(ceil_div(p.dim, Tile::BK));
    multiply<Tile, Major::K, Major::K, Columns::GATHERED>(acc, x, y, k_tiles, shared);
}

// Each row's positive as a column of the tile; any value outside [0, BN) where it is elsewhere.
template <class Tile>
__device__ __forceinline__ int local_target(const PairParams& p, int64_t row, int64_t col0) {
    if (row >= p.m) return -1;
    const int64_t local = pair::target_of(row, p.target, p.target_offset, p.target_stride) - col0;
    return local >= 0 && local < Tile::BN && local < p.n - col0 ? static_cast<int>(local) : -1;
}

template <class Operation>
__device__ __forceinline__ float reduce_quad(float value, Operation operation) {
    value = operation(value, __shfl_xor_sync(~0u, value, 1));
    return operation(value, __shfl_xor_sync(~0u, value, 2));
}

// Over the 8 lanes of a warp that share their columns.
template <class Operation>
__device__ __forceinline__ float reduce_groups(float value, Operation operation) {
    value = operation(value, __shfl_xor_sync(~0u, value, 4));
    value = operation(value, __shfl_xor_sync(~0u, value, 8));
    return operation(value, __shfl_xor_sync(~0u, value, 16));
}

template <class Operation>
__device__ __forceinline__ float reduce_warp(float value, Operation operation) {
    return reduce_groups(reduce_quad(value, operation), operation);
}

struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

}  // namespace infloss::sm80
