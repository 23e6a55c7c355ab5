// Errors of the CUDA runtime as exceptions that name call or kernel, place and device.

#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace infloss {

inline void throw_cuda_error(cudaError_t error, const std::string& what, const char* file,
                             int line) {
    int device = -1;
    cudaGetDevice(&device);
    throw std::runtime_error("infloss: " + what + " failed on cuda:" + std::to_string(device) +
                             ": " + cudaGetErrorString(error) + " (" + file + ":" +
                             std::to_string(line) + ")");
}

}  // namespace infloss

#define INFLOSS_CUDA_CHECK(call)                                                   \
    do {                                                                           \
        const cudaError_t infloss_error = (call);                                  \
        if (infloss_error != cudaSuccess)                                          \
            ::infloss::throw_cuda_error(infloss_error, #call, __FILE__, __LINE__); \
    } while (0)

// After a <<<>>> launch; `what` is a std::string with the kernel's name and shape.
#define INFLOSS_LAUNCH_CHECK(what)                                                  \
    do {                                                                            \
        const cudaError_t infloss_error = cudaGetLastError();                       \
        if (infloss_error != cudaSuccess)                                           \
            ::infloss::throw_cuda_error(infloss_error, (what), __FILE__, __LINE__); \
    } while (0)
