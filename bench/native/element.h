// The host's view of arithmetics and element types: names, sizes, and rounding to them.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/params.h"
#include "native/parallel.h"

namespace infloss::bench {

constexpr Arithmetic kArithmetics[] = {Arithmetic::bf16, Arithmetic::f16, Arithmetic::tf32,
                                       Arithmetic::tf32x3};

inline const char* name_of(Arithmetic arithmetic) {
    switch (arithmetic) {
        case Arithmetic::f16:
            return "f16";
        case Arithmetic::bf16:
            return "bf16";
        case Arithmetic::tf32:
            return "tf32";
        case Arithmetic::tf32x3:
            return "tf32x3";
    }
    throw std::logic_error("unknown arithmetic");
}

constexpr Path kPaths[] = {Path::sm80, Path::sm90};

inline const char* name_of(Path path) {
    return path == Path::sm90 ? "sm90" : "sm80";
}

// What features and gradients of an arithmetic are stored as.
inline DType dtype_of(Arithmetic arithmetic) {
    if (arithmetic == Arithmetic::f16) return DType::f16;
    if (arithmetic == Arithmetic::bf16) return DType::bf16;
    return DType::f32;
}

// Calls visit with a value of the element type.
template <class Visit>
auto with_element(DType dtype, Visit visit) {
    if (dtype == DType::f16) return visit(__half{});
    if (dtype == DType::bf16) return visit(__nv_bfloat16{});
    return visit(float{});
}

inline int64_t element_bytes(DType dtype) {
    return dtype == DType::f32 ? 4 : 2;
}

inline float rounded_to(DType dtype, float value) {
    return with_element(dtype, [&](auto element) {
        return static_cast<float>(static_cast<decltype(element)>(value));
    });
}

// Elements between rows that keep every row on a 16-byte boundary.
inline int64_t aligned_stride(DType dtype, int64_t dim) {
    const int64_t unit = 16 / element_bytes(dtype);
    return (dim + unit - 1) / unit * unit;
}

// Rows [rows, dim] as the device wants them. What pads them is NaN: nobody may read it.
inline std::vector<std::byte> encode(const std::vector<float>& values, int64_t rows, int64_t dim,
                                     DType dtype) {
    const int64_t row_bytes = aligned_stride(dtype, dim) * element_bytes(dtype);
    std::vector<std::byte> bytes(rows * row_bytes, std::byte{0xff});
    parallel_for(rows, [&](int64_t i) {
        with_element(dtype, [&](auto element) {
            for (int64_t d = 0; d < dim; ++d) {
                element = static_cast<decltype(element)>(values[i * dim + d]);
                std::memcpy(&bytes[i * row_bytes + d * sizeof element], &element, sizeof element);
            }
        });
    });
    return bytes;
}

// Contiguous elements as floats.
inline std::vector<float> decode(const std::vector<std::byte>& bytes, DType dtype) {
    std::vector<float> values(bytes.size() / element_bytes(dtype));
    with_element(dtype, [&](auto element) {
        for (size_t i = 0; i < values.size(); ++i) {
            std::memcpy(&element, &bytes[i * sizeof element], sizeof element);
            values[i] = static_cast<float>(element);
        }
    });
    return values;
}

}  // namespace infloss::bench
