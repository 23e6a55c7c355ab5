// Element types a Params struct can name.

#pragma once

namespace infloss {

enum class DType { f16, bf16, f32, f64 };

}  // namespace infloss
