// The yardstick: a bf16 product of two 8192 x 8192 matrices by cuBLAS. The library is loaded at run
// time, so that a bare CUDA toolkit builds the benchmark and a machine without cuBLAS runs it.

#pragma once

#include <dlfcn.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "native/buffer.h"
#include "native/element.h"
#include "native/parallel.h"
#include "native/random.h"

namespace infloss::bench {

class Cublas {
  public:
    static constexpr int SIZE = 8192;
    static constexpr double FLOPS = 2.0 * SIZE * SIZE * SIZE;

    // `path` names the library; empty: whichever is found. Throws std::runtime_error with the
    // reason why there is none.
    explicit Cublas(const std::string& path)
        : library_(open(path)), a_(random_matrix(1)), b_(random_matrix(2)), c_(a_.bytes()) {
        check(function<Status(Handle*)>("cublasCreate_v2")(&handle_), "cublasCreate");
        gemm_ = function<Gemm>("cublasGemmEx");
        check(function<Status(Handle, int*)>("cublasGetVersion_v2")(handle_, &version_),
              "cublasGetVersion");
    }

    ~Cublas() { function<Status(Handle)>("cublasDestroy_v2")(handle_); }
    Cublas(const Cublas&) = delete;
    Cublas& operator=(const Cublas&) = delete;

    int version() const { return version_; }

    void multiply() const {
        constexpr int kNoTranspose = 0, kTranspose = 1;
        constexpr int kComputeFloat = 68, kDefaultAlgorithm = -1;
        const float one = 1, zero = 0;
        check(gemm_(handle_, kTranspose, kNoTranspose, SIZE, SIZE, SIZE, &one, a_.data(),
                    CUDA_R_16BF, SIZE, b_.data(), CUDA_R_16BF, SIZE, &zero, c_.data(), CUDA_R_16BF,
                    SIZE, kComputeFloat, kDefaultAlgorithm),
              "cublasGemmEx");
    }

  private:
    // cuBLAS's own declarations, of which a bare toolkit has no header.
    using Handle = void*;
    using Status = int;
    using Gemm = Status(Handle, int, int, int, int, int, const void*, const void*, cudaDataType,
                        int, const void*, cudaDataType, int, const void*, void*, cudaDataType, int,
                        int, int);

    static void* open(const std::string& path) {
        std::vector<std::string> names{"libcublas.so.13", "libcublas.so.12"};
        if (!path.empty()) names = {path};
        std::string reason;
        for (const std::string& name : names) {
            if (void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
            reason += (reason.empty() ? "" : "; ") + std::string(dlerror());
        }
        throw std::runtime_error(reason);
    }

    template <class Function>
    Function* function(const char* name) const {
        void* symbol = dlsym(library_, name);
        if (symbol == nullptr) throw std::runtime_error(std::string("no ") + name + " in cuBLAS");
        return reinterpret_cast<Function*>(symbol);
    }

    static void check(Status status, const char* what) {
        if (status != 0)
            throw std::runtime_error(std::string(what) + " failed with " + std::to_string(status));
    }

    // Zeros would draw less power, and so run faster, than data.
    static std::vector<std::byte> random_matrix(uint64_t seed) {
        std::vector<float> values(size_t{SIZE} * SIZE);
        parallel_for(SIZE, [&](int64_t i) {
            for (int64_t d = 0; d < SIZE; ++d) values[i * SIZE + d] = normal(seed, i * SIZE + d);
        });
        return encode(values, SIZE, SIZE, DType::bf16);
    }

    void* library_;
    Handle handle_ = nullptr;
    Gemm* gemm_ = nullptr;
    int version_ = 0;
    DeviceBuffer a_, b_, c_;
};

}  // namespace infloss::bench
