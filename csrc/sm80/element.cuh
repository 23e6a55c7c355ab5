// What an operand of the tensor cores is made of: how it lies in memory, how one step of k is
// multiplied, and how a coefficient is rounded to it.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/ampere.cuh"

namespace infloss::sm80 {

struct Bf16 {
    using Storage = __nv_bfloat16;
    using Packed = uint32_t;              // two neighbouring coefficients as stored
    static constexpr bool ROUNDS = true;  // a stored coefficient differs from its float32

    static __device__ Packed pack(float first, float second) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
        return reinterpret_cast<const uint32_t&>(pair);
    }
    static __device__ float2 unpack(Packed pair) {  // a bfloat16 is the upper half of its float32
        return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
    }
};

struct F16 {
    using Storage = __half;
    using Packed = uint32_t;
    static constexpr bool ROUNDS = true;

    static __device__ Packed pack(float first, float second) {
        const __half2 pair = __floats2half2_rn(first, second);
        return reinterpret_cast<const uint32_t&>(pair);
    }
    static __device__ float2 unpack(Packed pair) {
        return __half22float2(reinterpret_cast<const __half2&>(pair));
    }
};

// float32 rounded to TF32 on its way into the tensor cores.
struct Tf32 {
    using Storage = float;
    using Packed = float2;
    static constexpr bool ROUNDS = false;

    static __device__ Packed pack(float first, float second) { return {first, second}; }
};

// float32 as the sum of two TF32 terms: three products keep 22 bits. The tensor cores truncate
// their sums, so each step's sum is added up in rounding float32 arithmetic.
struct Tf32x3 : Tf32 {};

// Accumulates one step of k over a warp's blocks: acc[m][n] += a[m] b[n].
template <int MT, int NT>
__device__ __forceinline__ void multiply_step(Bf16, float (&acc)[MT][NT][4], uint32_t (&a)[MT][4],
                                              uint32_t (&b)[NT][2]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) ptx::mma_bf16(acc[m][n], a[m], b[n], acc[m][n]);
}

template <int MT, int NT>
__device__ __forceinline__ void multiply_step(F16, float (&acc)[MT][NT][4], uint32_t (&a)[MT][4],
                                              uint32_t (&b)[NT][2]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) ptx::mma_f16(acc[m][n], a[m], b[n], acc[m][n]);
}

template <int BLOCKS, int WORDS>
__device__ __forceinline__ void round_fragments(uint32_t (&fragments)[BLOCKS][WORDS]) {
#pragma unroll
    for (auto& fragment : fragments)
#pragma unroll
        for (uint32_t& word : fragment) word = ptx::round_to_tf32(__uint_as_float(word));
}

// Splits float32 words into a TF32 head, left in place, and a TF32 rest.
template <int BLOCKS, int WORDS>
__device__ __forceinline__ void split_fragments(uint32_t (&head)[BLOCKS][WORDS],
                                                uint32_t (&rest)[BLOCKS][WORDS]) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            const float value = __uint_as_float(head[i][w]);
            head[i][w] = ptx::round_to_tf32(value);
            rest[i][w] = ptx::round_to_tf32(value - __uint_as_float(head[i][w]));
        }
}

template <int MT, int NT>
__device__ __forceinline__ void multiply_step(Tf32, float (&acc)[MT][NT][4], uint32_t (&a)[MT][4],
                                              uint32_t (&b)[NT][2]) {
    round_fragments(a);
    round_fragments(b);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) ptx::mma_tf32(acc[m][n], a[m], b[n], acc[m][n]);
}

template <int MT, int NT>
__device__ __forceinline__ void multiply_step(Tf32x3, float (&acc)[MT][NT][4], uint32_t (&a)[MT][4],
                                              uint32_t (&b)[NT][2]) {
    constexpr float ZERO[4] = {0, 0, 0, 0};
    constexpr int kGroup = 4;  // independent sums in flight
    uint32_t a_rest[MT][4], b_rest[NT][2];
    split_fragments(a, a_rest);
    split_fragments(b, b_rest);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int first = 0; first < NT; first += kGroup) {
            float sum[kGroup][4];
#pragma unroll
            for (int i = 0; i < kGroup; ++i) ptx::mma_tf32(sum[i], a_rest[m], b[first + i], ZERO);
#pragma unroll
            for (int i = 0; i < kGroup; ++i) ptx::mma_tf32(sum[i], a[m], b_rest[first + i], sum[i]);
#pragma unroll
            for (int i = 0; i < kGroup; ++i) ptx::mma_tf32(sum[i], a[m], b[first + i], sum[i]);
#pragma unroll
            for (int i = 0; i < kGroup; ++i)
#pragma unroll
                for (int w = 0; w < 4; ++w) acc[m][first + i][w] += sum[i][w];
        }
}

}  // namespace infloss::sm80
