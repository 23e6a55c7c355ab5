#include "sm90/certify.h"

#include <algorithm>
#include <string>

#include "common/check.h"
#include "common/pair.cuh"
#include "common/panel.h"

namespace infloss::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kReferenceThreads = 1024;
constexpr int kWarp = 32;
constexpr int64_t kMaxBlocks = 1 << 16;
constexpr float kHeadroom = 96;  // 2^31 terms of 2^96 are finite
constexpr float kFloor = 0x1p-86f;
constexpr float kRoundings = 1.0001f;  // of norms and cosines
constexpr double kLn2 = 0.693147180559945309;

// Largest norm over a block; 1 without inverses.
__device__ float largest_norm(const float* inv_norm, int64_t size) {
    __shared__ float warps[kReferenceThreads / kWarp];
    if (inv_norm == nullptr) return 1;
    float top = 0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < size; i += kReferenceThreads)
        if (inv_norm[i] > 0) top = fmaxf(top, 1 / inv_norm[i]);
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
    __syncthreads();
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = top;
    __syncthreads();
    for (const float other : warps) top = fmaxf(top, other);
    return top;
}

__global__ void reference_kernel(const float* logit_scale, const float* x_inv_norm,
                                 const float* y_inv_norm, int64_t m, int64_t n, float* reference,
                                 int* flag) {
    const float norms = largest_norm(x_inv_norm, m) * largest_norm(y_inv_norm, n);
    if (threadIdx.x != 0) return;
    *reference = fabsf(*logit_scale) * norms * pair::kLog2E * kRoundings - kHeadroom;
    *flag = 0;
}

__global__ void add_slots_kernel(AddSlotsParams p) {
    const int64_t stride = int64_t{gridDim.x} * kThreads;
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < p.size; i += stride) {
        float sum = p.overwrite ? 0 : p.sums[i];
#pragma unroll 16
        for (int64_t slot = 0; slot < p.count; ++slot) sum += p.slots[slot * p.ld + i];
        p.sums[i] = sum;
    }
}

// In double, so that the pair has the digits of the sum.
__device__ void certify(float* stats, int64_t size, int64_t i, float reference, int* flag) {
    const double sum = stats[size + i];
    if (!(sum >= kFloor && isfinite(sum))) {
        *flag = 1;
        return;
    }
    const double lse = (reference + log2(sum)) * kLn2;
    const auto max = static_cast<float>(lse);
    stats[i] = max;
    stats[size + i] = static_cast<float>(exp(lse - max));
}

__global__ void certify_kernel(LseParams p, const float* reference, int* flag) {
    const int64_t m = p.pair.m, n = p.pair.n;
    const int64_t stride = int64_t{gridDim.x} * kThreads;
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < m + n; i += stride) {
        if (i < m && p.row_stats != nullptr) certify(p.row_stats, m, i, *reference, flag);
        if (i >= m && p.col_stats != nullptr) certify(p.col_stats, n, i - m, *reference, flag);
    }
}

unsigned blocks_for(int64_t size) {
    return static_cast<unsigned>(std::min(ceil_div(size, kThreads), kMaxBlocks));
}

}  // namespace

void launch_reference(const PairParams& pair, const float* x_inv_norm, const float* y_inv_norm,
                      float* reference, int* flag) {
    reference_kernel<<<1, kReferenceThreads, 0, pair.stream>>>(
        pair.logit_scale, x_inv_norm, y_inv_norm, pair.m, pair.n, reference, flag);
    INFLOSS_LAUNCH_CHECK("reference_kernel");
}

void launch_add_slots(const AddSlotsParams& params) {
    add_slots_kernel<<<blocks_for(params.size), kThreads, 0, params.stream>>>(params);
    INFLOSS_LAUNCH_CHECK("add_slots_kernel on [" + std::to_string(params.count) + ", " +
                         std::to_string(params.size) + "]");
}

void launch_certify(const LseParams& params, const float* reference, int* flag) {
    const PairParams& p = params.pair;
    certify_kernel<<<blocks_for(p.m + p.n), kThreads, 0, p.stream>>>(params, reference, flag);
    INFLOSS_LAUNCH_CHECK("certify_kernel on " + std::to_string(p.m) + " x " + std::to_string(p.n));
}

}  // namespace infloss::sm90
