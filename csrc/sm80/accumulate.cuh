// Backward, second half: a panel of coefficients times the features of the other side, added to
// float32 accumulators. Both gradients' products share a launch, so that one fills the tail of the
// other.

#pragma once

#include "common/panel.h"
#include "sm80/mainloop.cuh"

namespace infloss::sm80 {

// acc [rows, dim] (+)= A B + residuals mean, A [rows, k] a view of the panel.
struct Product {
    const void* coefficients;  // the panel
    int64_t coefficients_ld;   // its elements between rows
    const void* features;      // [k, dim], B
    int64_t features_stride;
    float* acc;              // [rows, acc_ld]
    int64_t acc_ld;          // at least dim, a multiple of 4
    const float* residuals;  // [slots, residual_ld]: to be summed over slots; or null
    int64_t residual_ld;
    const float* mean;  // [dim]
    int slots;
    int rows, k, dim;
    int tiles;        // CTAs of this product
    bool accumulate;  // add to acc rather than write it
};

struct AccumulateTask {
    Product x;  // A = the panel
    Product y;  // A = its transpose
};

template <class Tile, Major A>
__device__ __forceinline__ void product_tile(const Product& p, int index, char* shared) {
    using Storage = typename Tile::Storage;
    constexpr int64_t BYTES = sizeof(Storage);
    const int col_tiles = static_cast<int>(ceil_div(p.dim, Tile::BN));
    const int row0 = index / col_tiles * Tile::BM;
    const int col0 = index % col_tiles * Tile::BN;
    const auto* coefficients = static_cast<const Storage*>(p.coefficients);
    // the panel is padded to whole tiles, so that A needs no bounds
    const Operand a =
        A == Major::K ? Operand{coefficients + row0 * p.coefficients_ld, p.coefficients_ld * BYTES,
                                Tile::BM, static_cast<int>(p.coefficients_ld * BYTES)}
                      : Operand{coefficients + row0, p.coefficients_ld * BYTES,
                                static_cast<int>(round_up(p.k, Tile::BK)),
                                static_cast<int>(Tile::BM * BYTES)};
    const Operand b{static_cast<const Storage*>(p.features) + col0, p.features_stride * BYTES, p.k,
                    static_cast<int>((p.dim - col0) * BYTES)};
    float acc[Tile::MT][Tile::NT][4] = {};
    multiply<Tile, A, Major::MN, Columns::PLAIN>(acc, a, b,
                                                 static_cast<int>(ceil_div(p.k, Tile::BK)), shared);

    auto* residuals = reinterpret_cast<float*>(shared);  // [BM]
    for (int i = threadIdx.x; i < Tile::BM; i += Tile::THREADS) {
        float sum = 0;
        if (p.residuals != nullptr) {
#pragma unroll 8
            for (int slot = 0; slot < p.slots; ++slot)
                sum += p.residuals[slot * p.residual_ld + row0 + i];
        }
        residuals[i] = sum;
    }
    __syncthreads();

    const Lane<Tile> lane(threadIdx.x);
#pragma unroll
    for (int n = 0; n < Tile::NT; ++n) {
        const int col = col0 + lane.template col<Columns::PLAIN>(n);
        if (col >= p.dim) break;
        float2 mean = {0, 0};
        if (p.residuals != nullptr) mean = {p.mean[col], col + 1 < p.dim ? p.mean[col + 1] : 0.0f};
#pragma unroll
        for (int m = 0; m < Tile::MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = row0 + lane.row(m, h);
                if (row >= p.rows) continue;
                const float residual = residuals[lane.row(m, h)];
                auto* target = reinterpret_cast<float2*>(p.acc + row * p.acc_ld + col);
                float2 value = p.accumulate ? *target : float2{0, 0};
                value.x += fmaf(residual, mean.x, acc[m][n][2 * h]);
                value.y += fmaf(residual, mean.y, acc[m][n][2 * h + 1]);
                *target = value;
            }
    }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS_PER_SM)
    accumulate_kernel(const AccumulateTask task) {
    extern __shared__ __align__(128) char shared[];
    const int index = blockIdx.x;
    if (index < task.x.tiles) {
        product_tile<Tile, Major::K>(task.x, index, shared);
    } else {
        product_tile<Tile, Major::MN>(task.y, index - task.x.tiles, shared);
    }
}

}  // namespace infloss::sm80
