// Checks and times the statistics kernels without torch: each result against a CPU loop in double,
// then the time of one launch and the bandwidth it stands for. A row whose check fails prints no
// speed. Exit status: 0 all right, 1 a check failed, 77 no CUDA device.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "native/buffer.h"
#include "native/compare.h"
#include "native/random.h"
#include "native/timer.h"
#include "stats/launch.h"

namespace {

using infloss::bench::DeviceBuffer;
using infloss::bench::difference;
using infloss::bench::median_us;
using infloss::bench::random_values;

constexpr int kExitSkipped = 77;
constexpr double kTolerance = 1e-6;

double relative_error(double out, double exact) {
    return difference(out, exact) / std::max(std::abs(exact), 1e-30);
}

bool report(const char* kernel, const char* shape, double error, double us, double bytes) {
    const bool ok = error <= kTolerance;
    if (ok) {
        std::printf("%-12s %-18s %10.1e %10.1f %10.0f\n", kernel, shape, error, us,
                    bytes / us / 1e3);
    } else {
        std::printf("%-12s %-18s %10.1e      WRONG\n", kernel, shape, error);
    }
    return ok;
}

bool check_inv_norm(int64_t rows, int64_t dim) {
    const auto x = random_values(rows * dim, -1, 1, 1);
    const DeviceBuffer device_x(x);
    const DeviceBuffer device_out(std::vector<float>(rows, NAN));
    const infloss::InvNormParams params{
        device_x.data(), device_out.data(), rows, dim, dim, infloss::DType::f32, nullptr};
    infloss::launch_inv_norm(params);
    const auto out = device_out.download<float>();
    double error = 0;
    for (int64_t i = 0; i < rows; ++i) {
        double sum = 0;
        for (int64_t d = 0; d < dim; ++d) sum += double(x[i * dim + d]) * x[i * dim + d];
        error = std::max(error, relative_error(out[i], 1 / std::sqrt(sum)));
    }
    char shape[64];
    std::snprintf(shape, sizeof shape, "%lld x %lld", (long long)rows, (long long)dim);
    const double us = median_us([&] { infloss::launch_inv_norm(params); });
    return report("inv_norm", shape, error, us, sizeof(float) * double(rows) * (dim + 1));
}

bool check_merge_stats(int64_t count, int64_t rows) {
    auto stats = random_values(2 * rows, -20, 20, 2);
    auto partials = random_values(count * 2 * rows, -20, 20, 3);
    for (int64_t i = 0; i < rows; ++i) stats[rows + i] = 1 + std::abs(stats[rows + i]);
    for (int64_t k = 0; k < count; ++k)
        for (int64_t i = 0; i < rows; ++i) {
            float& sum = partials[(2 * k + 1) * rows + i];
            sum = 1 + std::abs(sum);
        }
    DeviceBuffer device_stats(stats);
    const DeviceBuffer device_partials(partials);
    const infloss::MergeStatsParams params{.stats = device_stats.data(),
                                           .partials = device_partials.data(),
                                           .rows = rows,
                                           .count = count,
                                           .stats_stride = rows,
                                           .partial_stride = 2 * rows,
                                           .part_stride = rows,
                                           .overwrite = false,
                                           .only_if = nullptr,
                                           .dtype = infloss::DType::f32,
                                           .stream = nullptr};
    infloss::launch_merge_stats(params);
    const auto out = device_stats.download<float>();
    double error = 0;
    for (int64_t i = 0; i < rows; ++i) {
        double sum = stats[rows + i] * std::exp(double(stats[i]));
        for (int64_t k = 0; k < count; ++k)
            sum += partials[(2 * k + 1) * rows + i] * std::exp(double(partials[2 * k * rows + i]));
        const double lse = out[i] + std::log(double(out[rows + i]));
        error = std::max(error, difference(std::exp(lse - std::log(sum)), 1));
    }
    char shape[64];
    std::snprintf(shape, sizeof shape, "%lld x 2 x %lld", (long long)count, (long long)rows);
    const double us = median_us([&] { infloss::launch_merge_stats(params); });
    return report("merge_stats", shape, error, us, sizeof(float) * 2 * double(rows) * (count + 2));
}

}  // namespace

int main() {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("no CUDA device: nothing checked\n");
        return kExitSkipped;
    }
    std::printf("%-12s %-18s %10s %10s %10s\n", "# kernel", "shape", "max error", "us", "GB/s");
    bool ok = true;
    for (const int64_t dim : {1, 7, 96, 768, 1001}) ok &= check_inv_norm(4099, dim);
    ok &= check_inv_norm(65536, 768);
    for (const int64_t count : {1, 3, 64}) ok &= check_merge_stats(count, 4099);
    ok &= check_merge_stats(64, 65536);
    return ok ? 0 : 1;
}
