// Calls body(0) ... body(count - 1) on all cores of the host.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace infloss::bench {

template <class Body>
void parallel_for(int64_t count, const Body& body) {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t i = next++; i < count; i = next++) body(i);
    };
    const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::jthread> helpers;
    for (int64_t t = 1; t < std::min(cores, count); ++t) helpers.emplace_back(work);
    work();
}

}  // namespace infloss::bench
