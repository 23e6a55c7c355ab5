#include "sm90/ranges.h"

#include <string>

#include "common/check.h"
#include "common/pair.cuh"
#include "common/panel.h"

namespace infloss::sm90 {
namespace {

constexpr int kWarp = 32;

__global__ void ranges_kernel(const pair::Side* sides, int64_t count, int block, Range* ranges) {
    const int64_t first = int64_t{blockIdx.x} * block, last = min(first + block, count);
    float top = -INFINITY, bottom = INFINITY;
    for (int64_t i = first + threadIdx.x; i < last; i += kWarp) {
        const float max = sides[i].max;
        if (max == INFINITY) continue;  // no statistics, no weight
        top = fmaxf(top, max);
        bottom = isnan(max) ? -INFINITY : fminf(bottom, max);
    }
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
        top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
        bottom = fminf(bottom, __shfl_xor_sync(~0u, bottom, offset));
    }
    if (threadIdx.x == 0) ranges[blockIdx.x] = {top == -INFINITY ? INFINITY : top, bottom};
}

}  // namespace

void launch_ranges(const pair::Side* sides, int64_t count, int block, Range* ranges,
                   cudaStream_t stream) {
    const auto blocks = static_cast<unsigned>(ceil_div(count, block));
    ranges_kernel<<<blocks, kWarp, 0, stream>>>(sides, count, block, ranges);
    INFLOSS_LAUNCH_CHECK("ranges_kernel on " + std::to_string(count));
}

}  // namespace infloss::sm90
