// From an arithmetic and a device to a tile shape.

#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "common/check.h"
#include "common/panel.h"
#include "common/params.h"
#include "sm80/tile.cuh"

namespace infloss::sm80 {

// 128 x 256 in 8 warps of 64 x 64: the fewest bytes a product.
template <class Element>
using WideTile = TileConfig<Element, 2, 4, 4, 3, 1>;

// 128 x 128 in 4 warps of 64 x 64: for small shared memories, few features and small batches.
template <class Element>
using NarrowTile = TileConfig<Element, 2, 2, 4, 3, 2>;

// 128 x 128 in 8 warps of 32 x 64: float32 splits its fragments, which takes registers.
template <class Element>
using SquareTile = TileConfig<Element, 4, 2, 2, 3, 1>;

inline int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    INFLOSS_CUDA_CHECK(cudaGetDevice(&device));
    INFLOSS_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
    return value;
}

// Whether wide tiles fit the device, fill it, and are not wider than the gradients.
template <class Element>
bool wants_wide_tiles(const PairParams& p) {
    using Wide = WideTile<Element>;
    return p.dim > NarrowTile<Element>::BN &&
           ceil_div(p.m, Wide::BM) * ceil_div(p.n, Wide::BN) >=
               device_attribute(cudaDevAttrMultiProcessorCount) &&
           device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= Wide::SHARED_BYTES;
}

// Calls visit with the tile of a half-precision element.
template <class Element, class Visit>
auto with_half_tile(const PairParams& p, Visit visit) {
    if (wants_wide_tiles<Element>(p)) return visit(WideTile<Element>{});
    return visit(NarrowTile<Element>{});
}

// Calls visit with the tile that suits the arithmetic, the sizes and the current device.
template <class Visit>
auto with_tile(const PairParams& p, Visit visit) {
    switch (p.arithmetic) {
        case Arithmetic::bf16:
            return with_half_tile<Bf16>(p, visit);
        case Arithmetic::f16:
            return with_half_tile<F16>(p, visit);
        case Arithmetic::tf32:
            return visit(SquareTile<Tf32>{});
        case Arithmetic::tf32x3:
            return visit(SquareTile<Tf32x3>{});
    }
    throw std::logic_error("infloss: unknown arithmetic");
}

template <class Tile, class Task>
void launch_tiles(void (*kernel)(Task), const char* name, const Task& task, int64_t tiles,
                  const std::string& shape, cudaStream_t stream) {
    const auto what = [&] { return std::string(name) + " on " + shape; };
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SHARED_BYTES);
    if (error != cudaSuccess) throw_cuda_error(error, what(), __FILE__, __LINE__);
    kernel<<<static_cast<unsigned>(tiles), Tile::THREADS, Tile::SHARED_BYTES, stream>>>(task);
    INFLOSS_LAUNCH_CHECK(what());
}

inline std::string shape_of(const PairParams& p) {
    return std::to_string(p.m) + " x " + std::to_string(p.n) + " x " + std::to_string(p.dim);
}

}  // namespace infloss::sm80
