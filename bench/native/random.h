// Random values as a pure function of seed and index: drawn in parallel and in any order, and the
// same with every standard library.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace infloss::bench {

// The finaliser of splitmix64.
inline uint64_t mix(uint64_t word) {
    word += 0x9e3779b97f4a7c15u;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
    return word ^ (word >> 31);
}

inline uint64_t random_word(uint64_t seed, uint64_t index) {
    return mix(mix(seed) + index);
}

inline float uniform(float low, float high, uint64_t seed, uint64_t index) {
    const float unit = static_cast<float>(random_word(seed, index) >> 40) * 0x1p-24f;
    return low + (high - low) * unit;
}

// Mean 0, variance 1, near enough to normal: the sum of four uniform values.
inline float normal(uint64_t seed, uint64_t index) {
    const uint64_t word = random_word(seed, index);
    uint64_t sum = 0;
    for (int part = 0; part < 4; ++part) sum += (word >> (16 * part)) & 0xffff;
    constexpr float kRoot3 = 1.7320508f;
    return kRoot3 * (static_cast<float>(sum) * 0x1p-16f - 2.0f);
}

inline std::vector<float> random_values(size_t count, float low, float high, uint64_t seed) {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = uniform(low, high, seed, i);
    return values;
}

}  // namespace infloss::bench
