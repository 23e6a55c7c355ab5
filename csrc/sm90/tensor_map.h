// What the copy engine needs to know about a matrix.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/dtype.h"

namespace infloss::sm90 {

// A matrix [rows, columns] whose rows start on 16-byte boundaries, read or written in boxes of
// `box_rows` rows of 128 bytes, swizzled in shared memory.
struct Matrix {
    const void* base;
    int64_t rows, columns;
    int64_t stride;  // elements between rows
    DType dtype;
};

CUtensorMap tensor_map(const Matrix& matrix, int box_rows);

}  // namespace infloss::sm90
