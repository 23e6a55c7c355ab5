// Launching clusters: as many as the device holds.

#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "common/check.h"
#include "common/params.h"
#include "sm90/mainloop.cuh"
#include "sm90/tensor_map.h"

namespace infloss::sm90 {

inline int cluster_count() {
    int device = 0, processors = 0;
    INFLOSS_CUDA_CHECK(cudaGetDevice(&device));
    INFLOSS_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    return processors / CLUSTER;
}

inline std::string shape_of(const PairParams& p) {
    return std::to_string(p.m) + " x " + std::to_string(p.n) + " x " + std::to_string(p.dim);
}

inline DType dtype_of(Arithmetic arithmetic) {
    return arithmetic == Arithmetic::f16 ? DType::f16 : DType::bf16;
}

inline CUtensorMap features_map(const void* features, int64_t rows, int64_t stride,
                                const PairParams& p) {
    return tensor_map({features, rows, p.dim, stride, dtype_of(p.arithmetic)}, BOX);
}

// A persistent launch for `units` pieces of work, a cluster each.
template <class Task>
void launch_clusters(void (*kernel)(Task), const char* name, const Task& task, int64_t units,
                     int shared_bytes, const std::string& shape, cudaStream_t stream) {
    const auto what = [&] { return std::string(name) + " on " + shape; };
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) throw_cuda_error(error, what(), __FILE__, __LINE__);
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {CLUSTER, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = CLUSTER * static_cast<unsigned>(std::min<int64_t>(units, cluster_count()));
    config.blockDim = THREADS;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    error = cudaLaunchKernelEx(&config, kernel, task);
    if (error != cudaSuccess) throw_cuda_error(error, what(), __FILE__, __LINE__);
}

}  // namespace infloss::sm90
