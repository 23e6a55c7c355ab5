// Mean of the unit rows: each block adds up a share of the rows, then one kernel the shares.

#include <stdexcept>
#include <string>

#include "common/check.h"
#include "common/convert.cuh"
#include "common/panel.h"
#include "grad/launch.h"

namespace infloss {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void partial_mean_kernel(const T* x, const float* inv_norm, float* partials,
                                    int64_t rows, int64_t dim, int64_t row_stride) {
    const int64_t share = ceil_div(rows, kMeanParts);
    const int64_t first = blockIdx.x * share, last = min(first + share, rows);
    const int64_t d = blockIdx.y * int64_t{kThreads} + threadIdx.x;
    if (d >= dim) return;
    float sum = 0;
#pragma unroll 8
    for (int64_t i = first; i < last; ++i)
        sum = fmaf(widen(x[i * row_stride + d]), inv_norm != nullptr ? inv_norm[i] : 1.0f, sum);
    partials[blockIdx.x * dim + d] = sum;
}

__global__ void mean_kernel(const float* partials, float* mean, int64_t rows, int64_t dim) {
    const int64_t d = blockIdx.x * int64_t{kThreads} + threadIdx.x;
    if (d >= dim) return;
    float sum = 0;
#pragma unroll 16
    for (int64_t part = 0; part < kMeanParts; ++part) sum += partials[part * dim + d];
    mean[d] = sum / static_cast<float>(rows);
}

template <typename T>
void launch(const UnitMeanParams& p) {
    const unsigned columns = static_cast<unsigned>(ceil_div(p.dim, kThreads));
    partial_mean_kernel<<<dim3(kMeanParts, columns), kThreads, 0, p.stream>>>(
        static_cast<const T*>(p.x), p.inv_norm, p.partials, p.rows, p.dim, p.row_stride);
    mean_kernel<<<columns, kThreads, 0, p.stream>>>(p.partials, p.mean, p.rows, p.dim);
    INFLOSS_LAUNCH_CHECK("unit_mean on [" + std::to_string(p.rows) + ", " + std::to_string(p.dim) +
                         "]");
}

}  // namespace

void launch_unit_mean(const UnitMeanParams& params) {
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

}  // namespace infloss
