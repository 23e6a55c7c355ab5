// Inverse row norms: one warp a row, 16-byte loads where the rows are aligned for them.

#include <algorithm>
#include <string>
#include <type_traits>

#include "common/check.h"
#include "common/convert.cuh"
#include "stats/launch.h"

namespace infloss {
namespace {

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 8;
constexpr int64_t kMaxBlocks = 1 << 16;
constexpr double kNormFloor = 1e-12;

template <typename T>
using Accum = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
struct alignas(16) Pack {
    static constexpr int SIZE = 16 / sizeof(T);
    T values[SIZE];
};

// A lane's share of a row's sum of squares.
template <typename T, bool VECTORISED>
__device__ Accum<T> lane_square_sum(const T* row, int64_t dim, int lane) {
    Accum<T> sum = 0;
    if constexpr (VECTORISED) {
        const auto* packs = reinterpret_cast<const Pack<T>*>(row);
        for (int64_t p = lane; p < dim / Pack<T>::SIZE; p += kWarp) {
            const Pack<T> pack = packs[p];
#pragma unroll
            for (T raw : pack.values) {
                const Accum<T> value = widen(raw);
                sum += value * value;
            }
        }
    } else {
        for (int64_t d = lane; d < dim; d += kWarp) {
            const Accum<T> value = widen(row[d]);
            sum += value * value;
        }
    }
    return sum;
}

template <typename A>
__device__ A warp_sum(A value) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
}

template <typename T, bool VECTORISED>
__global__ void inv_norm_kernel(const T* x, Accum<T>* out, int64_t rows, int64_t dim,
                                int64_t row_stride) {
    const int lane = threadIdx.x % kWarp;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock;
    for (int64_t row = blockIdx.x * static_cast<int64_t>(kWarpsPerBlock) + threadIdx.x / kWarp;
         row < rows; row += warps) {
        const auto sum = warp_sum(lane_square_sum<T, VECTORISED>(x + row * row_stride, dim, lane));
        const auto norm = sqrt(sum);
        if (lane == 0) {
            out[row] = norm <= static_cast<Accum<T>>(kNormFloor) ? Accum<T>(0) : Accum<T>(1) / norm;
        }
    }
}

template <typename T>
bool rows_are_aligned(const InvNormParams& p) {
    constexpr int64_t size = Pack<T>::SIZE;
    return reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.dim % size == 0 &&
           p.row_stride % size == 0;
}

template <typename T>
void launch(const InvNormParams& p) {
    const auto* x = static_cast<const T*>(p.x);
    auto* out = static_cast<Accum<T>*>(p.out);
    const int64_t blocks = std::min((p.rows + kWarpsPerBlock - 1) / kWarpsPerBlock, kMaxBlocks);
    const dim3 grid(static_cast<unsigned>(blocks));
    const dim3 block(kWarp * kWarpsPerBlock);
    if (rows_are_aligned<T>(p)) {
        inv_norm_kernel<T, true><<<grid, block, 0, p.stream>>>(x, out, p.rows, p.dim, p.row_stride);
    } else {
        inv_norm_kernel<T, false>
            <<<grid, block, 0, p.stream>>>(x, out, p.rows, p.dim, p.row_stride);
    }
    INFLOSS_LAUNCH_CHECK("inv_norm_kernel on [" + std::to_string(p.rows) + ", " +
                         std::to_string(p.dim) + "]");
}

}  // namespace

void launch_inv_norm(const InvNormParams& params) {
    if (params.rows == 0) return;
    switch (params.dtype) {
        case DType::f16:
            return launch<__half>(params);
        case DType::bf16:
            return launch<__nv_bfloat16>(params);
        case DType::f32:
            return launch<float>(params);
        case DType::f64:
            return launch<double>(params);
    }
}

}  // namespace infloss
