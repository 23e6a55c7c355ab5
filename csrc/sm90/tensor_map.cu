#include "sm90/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "common/check.h"
#include "common/panel.h"

namespace infloss::sm90 {
namespace {

constexpr int kBoxBytes = 128;
constexpr int kAlignment = 16;

PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    INFLOSS_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                        cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess) {
        int driver = 0;
        cudaDriverGetVersion(&driver);
        throw std::runtime_error(
            "infloss: the Hopper kernels need a driver of CUDA 12.0 or later, "
            "got " +
            std::to_string(driver / 1000) + "." + std::to_string(driver % 1000 / 10));
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

CUtensorMapDataType data_type(DType dtype) {
    switch (dtype) {
        case DType::f16:
            return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
        case DType::bf16:
            return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
        case DType::f32:
            return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
        case DType::f64:
            break;
    }
    throw std::logic_error("infloss: no tensor map of float64");
}

}  // namespace

CUtensorMap tensor_map(const Matrix& matrix, int box_rows) {
    static const auto encode = find_encoder();
    const int64_t element = matrix.dtype == DType::f32 ? 4 : 2;
    // a single row's stride means nothing
    const int64_t row_bytes =
        matrix.rows > 1 ? matrix.stride * element : round_up(matrix.columns * element, kAlignment);
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(matrix.columns),
                                static_cast<cuuint64_t>(matrix.rows)};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_bytes)};
    const cuuint32_t box[] = {static_cast<cuuint32_t>(kBoxBytes / element),
                              static_cast<cuuint32_t>(box_rows)};
    const cuuint32_t steps[] = {1, 1};
    CUtensorMap map;
    const CUresult result =
        encode(&map, data_type(matrix.dtype), 2, const_cast<void*>(matrix.base), sizes, strides,
               box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw std::runtime_error("infloss: no tensor map of [" + std::to_string(matrix.rows) +
                                 ", " + std::to_string(matrix.columns) + "] with rows " +
                                 std::to_string(row_bytes) + " bytes apart (CUresult " +
                                 std::to_string(static_cast<int>(result)) + ")");
    return map;
}

}  // namespace infloss::sm90
