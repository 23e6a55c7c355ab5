// Feature values in and out of float.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace infloss {

__device__ __forceinline__ float widen(__half value) {
    return __half2float(value);
}
__device__ __forceinline__ float widen(__nv_bfloat16 value) {
    return __bfloat162float(value);
}
__device__ __forceinline__ float widen(float value) {
    return value;
}
__device__ __forceinline__ double widen(double value) {
    return value;
}

__device__ __forceinline__ void narrow(float value, __half& out) {
    out = __float2half_rn(value);
}
__device__ __forceinline__ void narrow(float value, __nv_bfloat16& out) {
    out = __float2bfloat16_rn(value);
}
__device__ __forceinline__ void narrow(float value, float& out) {
    out = value;
}

}  // namespace infloss
