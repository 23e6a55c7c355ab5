// Device memory that frees itself.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "common/check.h"

namespace infloss::bench {

class DeviceBuffer {
  public:
    // Poisoned memory; none, and a null pointer, for 0 bytes.
    explicit DeviceBuffer(size_t bytes) : bytes_(bytes) {
        void* data = nullptr;
        if (bytes > 0) INFLOSS_CUDA_CHECK(cudaMalloc(&data, bytes));
        data_.reset(data);
        poison();
    }

    template <class T>
    explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.size() * sizeof(T)) {
        upload(host);
    }

    // Every byte 0xff: a NaN in each floating-point type, so that what no kernel wrote shows.
    void poison() {
        if (bytes_ > 0) INFLOSS_CUDA_CHECK(cudaMemset(data(), 0xff, bytes_));
    }

    template <class T>
    void upload(const std::vector<T>& host) {
        if (bytes_ > 0)
            INFLOSS_CUDA_CHECK(cudaMemcpy(data(), host.data(), bytes_, cudaMemcpyHostToDevice));
    }

    template <class T>
    std::vector<T> download() const {
        std::vector<T> host(bytes_ / sizeof(T));
        if (bytes_ > 0)
            INFLOSS_CUDA_CHECK(cudaMemcpy(host.data(), data(), bytes_, cudaMemcpyDeviceToHost));
        return host;
    }

    DeviceBuffer copy() const {
        DeviceBuffer other(bytes_);
        if (bytes_ > 0)
            INFLOSS_CUDA_CHECK(cudaMemcpy(other.data(), data(), bytes_, cudaMemcpyDeviceToDevice));
        return other;
    }

    void* data() const { return data_.get(); }
    size_t bytes() const { return bytes_; }

    template <class T>
    T* as() const {
        return static_cast<T*>(data());
    }

  private:
    struct Free {
        void operator()(void* data) const { cudaFree(data); }
    };

    std::unique_ptr<void, Free> data_;
    size_t bytes_;
};

}  // namespace infloss::bench
