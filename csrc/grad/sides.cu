// Each row's and column's part in G, from statistics and upstream weights.

#include <algorithm>
#include <string>

#include "common/check.h"
#include "common/pair.cuh"
#include "common/panel.h"
#include "grad/launch.h"

namespace infloss {
namespace {

constexpr int kThreads = 256;
constexpr int kUnitThreads = 1024;
constexpr int kWarp = 32;
constexpr int kHalfTop = 14;  // float16 ends at 2^16
constexpr int kWeightTop = 40;

// Largest magnitude of values [size] over a block; 1 without values.
__device__ float block_max_magnitude(const float* values, int64_t size) {
    __shared__ float warps[kUnitThreads / kWarp];
    if (values == nullptr) return 1;
    float top = 0;
    for (int64_t i = threadIdx.x; i < size; i += kUnitThreads) top = fmaxf(top, fabsf(values[i]));
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    __syncthreads();
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = top;
    __syncthreads();
    for (const float other : warps) top = fmaxf(top, other);
    return top;
}

__global__ void unit_kernel(GradParams p, float* unit) {
    float power = 1;
    if (p.pair.arithmetic == Arithmetic::f16) {
        float weight = block_max_magnitude(p.target_weight, p.pair.m);
        if (p.row_weight != nullptr) weight += block_max_magnitude(p.row_weight, p.pair.m);
        if (p.col_weight != nullptr) weight += block_max_magnitude(p.col_weight, p.pair.n);
        const float top = weight * block_max_magnitude(p.pair.x_inv_norm, p.pair.m) *
                          block_max_magnitude(p.pair.y_inv_norm, p.pair.n);
        if (top > 0 && isfinite(top)) {
            const int wanted = kHalfTop - static_cast<int>(ceilf(log2f(top)));
            // a weight in these units still meets exponentials of up to 2^80
            const int most = kWeightTop - static_cast<int>(ceilf(log2f(weight)));
            power = exp2f(static_cast<float>(max(min(wanted, most), -100)));
        }
    }
    if (threadIdx.x == 0) *unit = power;
}

struct SideInputs {
    const float* inv_norm;
    const float* stats;
    const float* weight;
    const float* target_weight;
    int64_t size;
    pair::Side* out;
};

__device__ void write_side(const SideInputs& side, int64_t i, float unit) {
    pair::Side out{1, INFINITY, 0, 0};
    if (side.inv_norm != nullptr) out.inv_norm = side.inv_norm[i];
    if (side.stats != nullptr) {
        out.max = side.stats[i];
        out.weight = side.weight[i] / side.stats[side.size + i] * unit;
    }
    if (side.target_weight != nullptr) out.target_weight = side.target_weight[i] * unit;
    side.out[i] = out;
}

__global__ void sides_kernel(SideInputs rows, SideInputs cols, const float* unit) {
    const int64_t stride = int64_t{gridDim.x} * kThreads;
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < rows.size + cols.size;
         i += stride) {
        if (i < rows.size) {
            write_side(rows, i, *unit);
        } else {
            write_side(cols, i - rows.size, *unit);
        }
    }
}

}  // namespace

void launch_unit(const GradParams& params, float* unit) {
    unit_kernel<<<1, kUnitThreads, 0, params.pair.stream>>>(params, unit);
    INFLOSS_LAUNCH_CHECK("unit_kernel");
}

void launch_sides(const GradParams& params, const float* unit, pair::Side* rows, pair::Side* cols) {
    const PairParams& p = params.pair;
    const SideInputs row_inputs{
        p.x_inv_norm, params.row_stats, params.row_weight, params.target_weight, p.m, rows};
    const SideInputs col_inputs{p.y_inv_norm, params.col_stats, params.col_weight, nullptr, p.n,
                                cols};
    const int64_t blocks = std::min<int64_t>(ceil_div(p.m + p.n, kThreads), 1 << 16);
    sides_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, p.stream>>>(row_inputs, col_inputs,
                                                                           unit);
    INFLOSS_LAUNCH_CHECK("sides_kernel on " + std::to_string(p.m) + " + " + std::to_string(p.n));
}

}  // namespace infloss
