// Cuts one allocation into aligned parts. Without memory it only counts, so that the same layout
// says how much is needed and where everything lies.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace infloss {

class Arena {
  public:
    explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}

    template <class T>
    T* take(int64_t count) {
        constexpr size_t kAlignment = 256;
        char* part = memory_ == nullptr ? nullptr : memory_ + used_;
        used_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
        return reinterpret_cast<T*>(part);
    }

    // Counts what another arena over the same memory took.
    void cover(const Arena& other) { used_ = std::max(used_, other.used_); }

    int64_t used() const { return static_cast<int64_t>(used_); }

  private:
    char* memory_;
    size_t used_ = 0;
};

}  // namespace infloss
