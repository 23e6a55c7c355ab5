// Room 3, the desk: the schemas of all ops (their one contract; infloss/ops.py says what each
// computes), and for the compiled ones, *_out, the way from tensors to a plain Params struct.
//
// Outputs and workspace are allocated by the caller in Python, so that running out of memory stays
// torch.OutOfMemoryError.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(infloss, m) {
    m.def("inv_norm(Tensor x, Tensor(a!) out) -> ()");
    m.def("merge_stats(Tensor(a!) stats, Tensor partials) -> ()");
    m.def("inv_norm_out(Tensor x, Tensor(a!) out) -> ()");
    m.def("merge_stats_out(Tensor(a!) stats, Tensor partials) -> ()");
    m.def(
        "lse(Tensor x, Tensor y, Tensor logit_scale, Tensor? x_inv_norm, Tensor? y_inv_norm, "
        "Tensor? target, SymInt target_offset, SymInt target_stride, bool rows, bool cols, "
        "bool hardest, SymInt workspace, str path, str precision) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def(
        "grad(Tensor x, Tensor y, Tensor logit_scale, Tensor? x_inv_norm, Tensor? y_inv_norm, "
        "Tensor? target, SymInt target_offset, SymInt target_stride, Tensor? row_stats, "
        "Tensor? row_weight, Tensor? col_stats, Tensor? col_weight, Tensor target_weight, "
        "Tensor? centre, bool need_x, bool need_y, bool need_scale, bool wide, SymInt workspace, "
        "str path, str precision) -> (Tensor, Tensor, Tensor)");
    // Both return the bytes of workspace that the call needs; without one they do only that.
    m.def(
        "lse_out(Tensor x, Tensor y, Tensor logit_scale, Tensor? x_inv_norm, Tensor? y_inv_norm, "
        "Tensor? target, int target_offset, int target_stride, bool tf32, int limit, "
        "Tensor(a!)? row_stats, Tensor(b!)? col_stats, Tensor(c!) positive, "
        "Tensor(d!)? row_hardest, Tensor(e!)? col_hardest, str path, Tensor(f!)? workspace) -> "
        "int");
    m.def(
        "grad_out(Tensor x, Tensor y, Tensor logit_scale, Tensor? x_inv_norm, Tensor? y_inv_norm, "
        "Tensor? target, int target_offset, int target_stride, bool tf32, int limit, "
        "Tensor? row_stats, Tensor? row_weight, Tensor? col_stats, Tensor? col_weight, "
        "Tensor target_weight, Tensor? centre, Tensor x_input, Tensor y_input, Tensor(a!)? dx, "
        "Tensor(b!)? dy, Tensor(c!)? dscale, str path, Tensor(d!)? workspace) -> int");
}

#ifdef INFLOSS_WITH_CUDA

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "launch.h"
#include "stats/launch.h"

namespace {

using infloss::Arithmetic;
using infloss::DType;
using infloss::GradParams;
using infloss::LseParams;
using infloss::PairParams;
using infloss::Path;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

DType to_dtype(const char* name, const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case ScalarType::Half:
            return DType::f16;
        case ScalarType::BFloat16:
            return DType::bf16;
        case ScalarType::Float:
            return DType::f32;
        case ScalarType::Double:
            return DType::f64;
        default:
            STD_TORCH_CHECK(false, name, ": expected a floating dtype, got ScalarType ",
                            static_cast<int>(tensor.scalar_type()));
    }
}

DType stats_dtype(DType dtype) {
    return dtype == DType::f64 ? DType::f64 : DType::f32;
}

cudaStream_t current_stream(const Tensor& tensor) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    return static_cast<cudaStream_t>(stream);
}

void check_device(const char* name, const Tensor& tensor, const char* beside, const Tensor& x) {
    STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == x.get_device_index(), name,
                    ": expected the device of ", beside, ", cuda:", x.get_device_index());
}

void check_aligned(const char* name, const void* memory, uintptr_t alignment) {
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(memory) % alignment == 0, name, ": expected ",
                    alignment, "-byte alignment");
}

// x [M, D] with unit column stride, out [M] contiguous.
void inv_norm(const Tensor& x, Tensor& out) {
    STD_TORCH_CHECK(x.dim() == 2, "x: expected 2 dimensions, got ", x.dim());
    STD_TORCH_CHECK(x.size(1) <= 1 || x.stride(1) == 1, "x: expected column stride 1, got ",
                    x.stride(1));
    const DType dtype = to_dtype("x", x);
    check_device("out", out, "x", x);
    STD_TORCH_CHECK(out.dim() == 1 && out.size(0) == x.size(0) && out.is_contiguous(),
                    "out: expected a contiguous vector of ", x.size(0), " values");
    STD_TORCH_CHECK(to_dtype("out", out) == stats_dtype(dtype),
                    "out: expected float32 (float64 for a float64 x)");
    const DeviceGuard guard(x.get_device_index());
    infloss::launch_inv_norm({
        .x = x.const_data_ptr(),
        .out = out.mutable_data_ptr(),
        .rows = x.size(0),
        .dim = x.size(1),
        .row_stride = x.stride(0),
        .dtype = dtype,
        .stream = current_stream(x),
    });
}

// stats [2, M] and partials [K, 2, M], both with unit stride along M.
void merge_stats(Tensor& stats, const Tensor& partials) {
    STD_TORCH_CHECK(stats.dim() == 2 && stats.size(0) == 2, "stats: expected shape [2, M]");
    const int64_t rows = stats.size(1);
    STD_TORCH_CHECK(partials.dim() == 3 && partials.size(1) == 2 && partials.size(2) == rows,
                    "partials: expected shape [K, 2, ", rows, "]");
    STD_TORCH_CHECK(rows <= 1 || (stats.stride(1) == 1 && partials.stride(2) == 1),
                    "stats, partials: expected unit stride along the last dimension");
    check_device("partials", partials, "stats", stats);
    const DType dtype = to_dtype("stats", stats);
    STD_TORCH_CHECK(dtype == stats_dtype(dtype) && to_dtype("partials", partials) == dtype,
                    "stats, partials: expected float32 or float64, the same of both");
    const DeviceGuard guard(stats.get_device_index());
    infloss::launch_merge_stats({
        .stats = stats.mutable_data_ptr(),
        .partials = partials.const_data_ptr(),
        .rows = rows,
        .count = partials.size(0),
        .stats_stride = stats.stride(0),
        .partial_stride = partials.stride(0),
        .part_stride = partials.stride(1),
        .overwrite = false,
        .only_if = nullptr,
        .dtype = dtype,
        .stream = current_stream(stats),
    });
}

void check_cuda(const Tensor& x) {
    STD_TORCH_CHECK(x.is_cuda(), "x: expected a CUDA tensor");
}

Arithmetic to_arithmetic(const Tensor& x, bool tf32) {
    switch (to_dtype("x", x)) {
        case DType::f16:
            return Arithmetic::f16;
        case DType::bf16:
            return Arithmetic::bf16;
        case DType::f32:
            return tf32 ? Arithmetic::tf32 : Arithmetic::tf32x3;
        default:
            STD_TORCH_CHECK(false, "x: expected float16, bfloat16 or float32");
    }
}

// Rows that 16-byte copies can read.
void check_features(const char* name, const Tensor& tensor, const Tensor& x) {
    constexpr uintptr_t kAlignment = 16;
    STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(1) == x.size(1), name,
                    ": expected 2 dimensions, the second of size ", x.size(1));
    STD_TORCH_CHECK(tensor.scalar_type() == x.scalar_type(), name, ": expected the dtype of x");
    check_device(name, tensor, "x", x);
    const auto bytes = static_cast<uintptr_t>(tensor.stride(0) * tensor.element_size());
    STD_TORCH_CHECK(tensor.size(1) <= 1 || tensor.stride(1) == 1, name,
                    ": expected column stride 1, got ", tensor.stride(1));
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignment == 0 &&
                        (tensor.size(0) <= 1 || bytes % kAlignment == 0),
                    name, ": expected rows that start on 16-byte boundaries");
}

void check_values(const char* name, const Tensor& tensor, ScalarType dtype, int64_t count,
                  const Tensor& x) {
    check_device(name, tensor, "x", x);
    STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, ": expected ScalarType ",
                    static_cast<int>(dtype), ", got ", static_cast<int>(tensor.scalar_type()));
    STD_TORCH_CHECK(tensor.is_contiguous() && tensor.numel() == count, name,
                    ": expected a contiguous tensor of ", count, " values, got ", tensor.numel());
}

// A contiguous vector or scalar of `count` values beside x; null where not given.
template <typename T>
const T* input(const char* name, const std::optional<Tensor>& tensor, ScalarType dtype,
               int64_t count, const Tensor& x) {
    if (!tensor.has_value()) return nullptr;
    check_values(name, *tensor, dtype, count, x);
    return static_cast<const T*>(tensor->const_data_ptr());
}

template <typename T>
T* output(const char* name, const std::optional<Tensor>& tensor, ScalarType dtype, int64_t count,
          const Tensor& x) {
    if (!tensor.has_value()) return nullptr;
    check_values(name, *tensor, dtype, count, x);
    return static_cast<T*>(tensor->mutable_data_ptr());
}

const float* float_input(const char* name, const std::optional<Tensor>& tensor, int64_t count,
                         const Tensor& x) {
    return input<float>(name, tensor, ScalarType::Float, count, x);
}

float* float_output(const char* name, const std::optional<Tensor>& tensor, int64_t count,
                    const Tensor& x) {
    return output<float>(name, tensor, ScalarType::Float, count, x);
}

// A gradient of an input beside it; accumulators may take its place.
void* gradient(const char* name, const std::optional<Tensor>& tensor, const Tensor& input,
               const Tensor& x) {
    constexpr uintptr_t kVector = 16;
    void* memory =
        output<void>(name, tensor, input.scalar_type(), input.size(0) * input.size(1), x);
    check_aligned(name, memory, kVector);
    return memory;
}

Path to_path(const std::string& name) {
    STD_TORCH_CHECK(name == "sm80" || name == "sm90", "path: expected 'sm80' or 'sm90', got '",
                    name, "'");
    return name == "sm90" ? Path::sm90 : Path::sm80;
}

PairParams pair_params(const Tensor& x, const Tensor& y, const Tensor& logit_scale,
                       const std::optional<Tensor>& x_inv_norm,
                       const std::optional<Tensor>& y_inv_norm, const std::optional<Tensor>& target,
                       int64_t target_offset, int64_t target_stride, bool tf32, int64_t limit,
                       const std::string& path, const std::optional<Tensor>& workspace) {
    check_features("x", x, x);
    check_features("y", y, x);
    return {
        .x = x.const_data_ptr(),
        .y = y.const_data_ptr(),
        .logit_scale = float_input("logit_scale", logit_scale, 1, x),
        .x_inv_norm = float_input("x_inv_norm", x_inv_norm, x.size(0), x),
        .y_inv_norm = float_input("y_inv_norm", y_inv_norm, y.size(0), x),
        .target = input<int64_t>("target", target, ScalarType::Long, x.size(0), x),
        .m = x.size(0),
        .n = y.size(0),
        .dim = x.size(1),
        .x_stride = x.stride(0),
        .y_stride = y.stride(0),
        .target_offset = target_offset,
        .target_stride = target_stride,
        .arithmetic = to_arithmetic(x, tf32),
        .path = to_path(path),
        .workspace_limit = limit,
        .workspace = workspace.has_value() ? workspace->mutable_data_ptr() : nullptr,
        .stream = current_stream(x),
    };
}

// The input that a gradient is of: the operand itself, or what it is a copy of.
void check_input(const char* name, const Tensor& input, const Tensor& operand,
                 const Tensor& x_input) {
    STD_TORCH_CHECK(
        input.dim() == 2 && input.size(0) == operand.size(0) && input.size(1) == operand.size(1),
        name, ": expected the shape of its operand, [", operand.size(0), ", ", operand.size(1),
        "]");
    STD_TORCH_CHECK(input.scalar_type() == x_input.scalar_type(), name,
                    ": expected the dtype of x_input");
    STD_TORCH_CHECK(to_dtype(name, input) != DType::f64, name,
                    ": expected float16, bfloat16 or float32, got float64");
    check_device(name, input, "x", operand);
    STD_TORCH_CHECK(input.size(1) <= 1 || input.stride(1) == 1, name,
                    ": expected column stride 1, got ", input.stride(1));
}

void check_workspace(const Tensor& workspace, int64_t bytes, const Tensor& x) {
    constexpr uintptr_t kArena = 256;
    check_device("workspace", workspace, "x", x);
    check_aligned("workspace", workspace.mutable_data_ptr(), kArena);
    const int64_t got = workspace.numel() * workspace.element_size();
    STD_TORCH_CHECK(workspace.is_contiguous() && got >= bytes, "workspace: expected ", bytes,
                    " bytes, got ", got);
}

int64_t lse_out(const Tensor& x, const Tensor& y, const Tensor& logit_scale,
                const std::optional<Tensor>& x_inv_norm, const std::optional<Tensor>& y_inv_norm,
                const std::optional<Tensor>& target, int64_t target_offset, int64_t target_stride,
                bool tf32, int64_t limit, const std::optional<Tensor>& row_stats,
                const std::optional<Tensor>& col_stats, const Tensor& positive,
                const std::optional<Tensor>& row_hardest, const std::optional<Tensor>& col_hardest,
                const std::string& path, const std::optional<Tensor>& workspace) {
    check_cuda(x);
    const DeviceGuard guard(x.get_device_index());
    const LseParams params{
        .pair = pair_params(x, y, logit_scale, x_inv_norm, y_inv_norm, target, target_offset,
                            target_stride, tf32, limit, path, workspace),
        .row_stats = float_output("row_stats", row_stats, 2 * x.size(0), x),
        .col_stats = float_output("col_stats", col_stats, 2 * y.size(0), x),
        .positive = float_output("positive", positive, x.size(0), x),
        .row_hardest = float_output("row_hardest", row_hardest, x.size(0), x),
        .col_hardest = float_output("col_hardest", col_hardest, y.size(0), x),
    };
    STD_TORCH_CHECK((row_stats.has_value() || !row_hardest.has_value()) &&
                        (col_stats.has_value() || !col_hardest.has_value()),
                    "row_hardest, col_hardest: expected only with their statistics");
    STD_TORCH_CHECK(!col_stats.has_value() || (!target.has_value() && target_stride > 0),
                    "col_stats: expected none with an explicit target or a stride below 1");
    const int64_t bytes = infloss::lse_workspace_bytes(params);
    if (workspace.has_value()) {
        check_workspace(*workspace, bytes, x);
        infloss::launch_lse(params);
    }
    return bytes;
}

int64_t grad_out(const Tensor& x, const Tensor& y, const Tensor& logit_scale,
                 const std::optional<Tensor>& x_inv_norm, const std::optional<Tensor>& y_inv_norm,
                 const std::optional<Tensor>& target, int64_t target_offset, int64_t target_stride,
                 bool tf32, int64_t limit, const std::optional<Tensor>& row_stats,
                 const std::optional<Tensor>& row_weight, const std::optional<Tensor>& col_stats,
                 const std::optional<Tensor>& col_weight, const Tensor& target_weight,
                 const std::optional<Tensor>& centre, const Tensor& x_input, const Tensor& y_input,
                 const std::optional<Tensor>& dx, const std::optional<Tensor>& dy,
                 const std::optional<Tensor>& dscale, const std::string& path,
                 const std::optional<Tensor>& workspace) {
    check_cuda(x);
    const DeviceGuard guard(x.get_device_index());
    const int64_t m = x.size(0), n = y.size(0);
    STD_TORCH_CHECK(row_stats.has_value() == row_weight.has_value() &&
                        col_stats.has_value() == col_weight.has_value(),
                    "row_weight, col_weight: expected exactly with their statistics");
    check_input("x_input", x_input, x, x_input);
    check_input("y_input", y_input, y, x_input);
    const GradParams params{
        .pair = pair_params(x, y, logit_scale, x_inv_norm, y_inv_norm, target, target_offset,
                            target_stride, tf32, limit, path, workspace),
        .row_stats = float_input("row_stats", row_stats, 2 * m, x),
        .row_weight = float_input("row_weight", row_weight, m, x),
        .col_stats = float_input("col_stats", col_stats, 2 * n, x),
        .col_weight = float_input("col_weight", col_weight, n, x),
        .target_weight = float_input("target_weight", target_weight, m, x),
        .centre = float_input("centre", centre, 1, x),
        .x_input = x_input.const_data_ptr(),
        .y_input = y_input.const_data_ptr(),
        .x_input_stride = x_input.stride(0),
        .y_input_stride = y_input.stride(0),
        .input_dtype = to_dtype("x_input", x_input),
        .dx = gradient("dx", dx, x_input, x),
        .dy = gradient("dy", dy, y_input, x),
        .dscale = float_output("dscale", dscale, 1, x),
    };
    const int64_t bytes = infloss::grad_workspace_bytes(params);
    if (workspace.has_value()) {
        check_workspace(*workspace, bytes, x);
        infloss::launch_grad(params);
    }
    return bytes;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(infloss, CUDA, m) {
    m.impl("inv_norm_out", TORCH_BOX(&inv_norm));
    m.impl("merge_stats_out", TORCH_BOX(&merge_stats));
    m.impl("lse_out", TORCH_BOX(&lse_out));
    m.impl("grad_out", TORCH_BOX(&grad_out));
}

#endif  // INFLOSS_WITH_CUDA
