// Times of launches on the default stream, by CUDA events.
//
// A GPU that runs into its power limit under long matrix work has two speeds: burst, the median of
// a few calls queued right after idling, and sustained, the mean over a window of calls back to
// back. What is compared is timed in turns, so that clocks and temperature weigh on all alike.

#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <thread>
#include <vector>

#include "common/check.h"

namespace infloss::bench {

using Launch = std::function<void()>;

constexpr int kRounds = 3;
constexpr int kBurstCalls = 5;
constexpr std::chrono::milliseconds kIdle{400};
constexpr double kWindowUs = 600e3;

class Event {
  public:
    Event() { INFLOSS_CUDA_CHECK(cudaEventCreate(&event_)); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    void record() { INFLOSS_CUDA_CHECK(cudaEventRecord(event_)); }

    // Waits for this event.
    double us_since(const Event& start) const {
        INFLOSS_CUDA_CHECK(cudaEventSynchronize(event_));
        float ms = 0;
        INFLOSS_CUDA_CHECK(cudaEventElapsedTime(&ms, start.event_, event_));
        return 1e3 * ms;
    }

  private:
    cudaEvent_t event_;
};

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const size_t half = values.size() / 2;
    return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// Microseconds of each of `calls` calls, queued without waiting between them.
inline std::vector<double> laps_us(const Launch& launch, int calls) {
    std::vector<Event> marks(calls + 1);
    marks[0].record();
    for (int call = 0; call < calls; ++call) {
        launch();
        marks[call + 1].record();
    }
    std::vector<double> laps(calls);
    for (int call = 0; call < calls; ++call) laps[call] = marks[call + 1].us_since(marks[call]);
    return laps;
}

// Median of `repeats` calls, each waited for.
inline double median_us(const Launch& launch, int repeats = 20) {
    std::vector<double> times(repeats);
    for (double& time : times) time = laps_us(launch, 1).front();
    return median(std::move(times));
}

inline double burst_us(const Launch& launch) {
    INFLOSS_CUDA_CHECK(cudaDeviceSynchronize());
    std::this_thread::sleep_for(kIdle);
    return median(laps_us(launch, kBurstCalls));
}

inline double sustained_us(const Launch& launch, double guess_us) {
    const auto calls =
        static_cast<int>(std::max(1.0, std::round(kWindowUs / std::max(guess_us, 1.0))));
    Event start, stop;
    INFLOSS_CUDA_CHECK(cudaDeviceSynchronize());
    start.record();
    for (int call = 0; call < calls; ++call) launch();
    stop.record();
    return stop.us_since(start) / calls;
}

struct Timing {
    double burst_us, sustained_us;
};

// Times the launches in turns: in each round every burst, then every window, and each round starts
// with another launch. Medians over the rounds.
inline std::vector<Timing> alternate(const std::vector<Launch>& launches) {
    const size_t count = launches.size();
    std::vector<std::vector<double>> bursts(count), windows(count);
    std::vector<double> guesses(count);
    for (size_t i = 0; i < count; ++i) {
        launches[i]();  // loads modules, which is not to be timed
        guesses[i] = laps_us(launches[i], 1).front();
    }
    for (size_t round = 0; round < kRounds; ++round) {
        for (size_t turn = 0; turn < count; ++turn) {
            const size_t i = (round + turn) % count;
            bursts[i].push_back(burst_us(launches[i]));
        }
        for (size_t turn = 0; turn < count; ++turn) {
            const size_t i = (round + turn) % count;
            windows[i].push_back(sustained_us(launches[i], guesses[i]));
        }
    }
    std::vector<Timing> timings;
    for (size_t i = 0; i < count; ++i) timings.push_back({median(bursts[i]), median(windows[i])});
    return timings;
}

}  // namespace infloss::bench
