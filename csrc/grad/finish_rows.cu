// From accumulated rows to an input's gradient: one warp a row. A normalised row's gradient is
// orthogonal to it; the projection is taken twice, since the first leaves what its rounding lost.

#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/check.h"
#include "common/convert.cuh"
#include "common/panel.h"
#include "grad/launch.h"

namespace infloss {
namespace {

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 8;
constexpr int64_t kMaxBlocks = 1 << 16;
constexpr int kScaleThreads = 1024;

__device__ float warp_sum(float value) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
        value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

// sum_d x_d (acc_d - along x_d), over a warp.
template <typename T>
__device__ float component(const T* x, const float* acc, int64_t dim, float along) {
    float sum = 0;
#pragma unroll 4
    for (int64_t d = threadIdx.x % kWarp; d < dim; d += kWarp) {
        const float value = widen(x[d]);
        sum = fmaf(value, fmaf(-along, value, acc[d]), sum);
    }
    return warp_sum(sum);
}

template <typename T>
__global__ void finish_rows_kernel(FinishRowsParams p) {
    const float factor = *p.logit_scale / *p.unit;
    const int64_t warps = int64_t{gridDim.x} * kWarpsPerBlock;
    for (int64_t i = blockIdx.x * int64_t{kWarpsPerBlock} + threadIdx.x / kWarp; i < p.rows;
         i += warps) {
        const float* acc = p.acc + i * p.acc_ld;
        const T* x = static_cast<const T*>(p.x) + i * p.x_stride;
        T* out = static_cast<T*>(p.out) + i * p.dim;
        float along = 0, rest = 0;
        if (p.inv_norm != nullptr) {
            const float square = p.inv_norm[i] * p.inv_norm[i];
            along = component(x, acc, p.dim, 0) * square;
            rest = component(x, acc, p.dim, along) * square;
        }
#pragma unroll 4
        for (int64_t d = threadIdx.x % kWarp; d < p.dim; d += kWarp) {
            const float value = widen(x[d]);
            narrow(factor * fmaf(-rest, value, fmaf(-along, value, acc[d])), out[d]);
        }
    }
}

template <typename T>
void launch(const FinishRowsParams& p) {
    const int64_t blocks = std::min(ceil_div(p.rows, kWarpsPerBlock), kMaxBlocks);
    finish_rows_kernel<T>
        <<<static_cast<unsigned>(blocks), kWarp * kWarpsPerBlock, 0, p.stream>>>(p);
    INFLOSS_LAUNCH_CHECK("finish_rows_kernel on [" + std::to_string(p.rows) + ", " +
                         std::to_string(p.dim) + "]");
}

__global__ void scale_gradient_kernel(const float* slots, int64_t count, const float* unit,
                                      float* dscale) {
    __shared__ float warps[kScaleThreads / kWarp];
    float sum = 0;
    for (int64_t i = threadIdx.x; i < count; i += kScaleThreads) sum += slots[i];
    sum = warp_sum(sum);
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = sum;
    __syncthreads();
    if (threadIdx.x >= kWarp) return;
    sum = warp_sum(warps[threadIdx.x]);
    if (threadIdx.x == 0) *dscale = sum / *unit;
}

}  // namespace

void launch_finish_rows(const FinishRowsParams& params) {
    switch (params.dtype) {
        case DType::f16:
            return launch<__half>(params);
        case DType::bf16:
            return launch<__nv_bfloat16>(params);
        case DType::f32:
            return launch<float>(params);
        case DType::f64:
            break;
    }
    throw std::logic_error("infloss: no gradient kernels of float64");
}

void launch_scale_gradient(const float* slots, int64_t count, const float* unit, float* dscale,
                           cudaStream_t stream) {
    scale_gradient_kernel<<<1, kScaleThreads, 0, stream>>>(slots, count, unit, dscale);
    INFLOSS_LAUNCH_CHECK("scale_gradient_kernel");
}

}  // namespace infloss
