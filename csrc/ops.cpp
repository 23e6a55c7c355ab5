// Room 3, the desk: the schemas of all ops (their one contract; infloss/ops.py says what each
// computes), and for ops with a compiled kernel the way from tensors to a plain Params struct.
//
// Outputs are allocated by the caller in Python, so that running out of memory stays
// torch.OutOfMemoryError.

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(infloss, m) {
    m.def("inv_norm(Tensor x, Tensor(a!) out) -> ()");
    m.def("merge_stats(Tensor(a!) stats, Tensor partials) -> ()");
    m.def(
        "lse(Tensor x, Tensor y, Tensor logit_scale, Tensor? x_inv_norm, Tensor? y_inv_norm, "
        "Tensor? target, SymInt target_offset, SymInt target_stride, bool rows, bool cols, "
        "bool hardest, SymInt workspace) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def(
        "grad(Tensor x, Tensor y, Tensor logit_scale, Tensor? x_inv_norm, Tensor? y_inv_norm, "
        "Tensor? target, SymInt target_offset, SymInt target_stride, Tensor? row_stats, "
        "Tensor? row_weight, Tensor? col_stats, Tensor? col_weight, Tensor target_weight, "
        "Tensor? centre, bool need_x, bool need_y, bool need_scale, SymInt workspace) "
        "-> (Tensor, Tensor, Tensor)");
}

#ifdef INFLOSS_WITH_CUDA

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "stats/launch.h"

namespace {

using infloss::DType;
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

// x [M, D] with unit column stride, out [M] contiguous.
void inv_norm(const Tensor& x, Tensor& out) {
    STD_TORCH_CHECK(x.dim() == 2, "x: expected 2 dimensions, got ", x.dim());
    STD_TORCH_CHECK(x.size(1) <= 1 || x.stride(1) == 1, "x: expected column stride 1, got ",
                    x.stride(1));
    const DType dtype = to_dtype("x", x);
    STD_TORCH_CHECK(out.is_cuda() && out.get_device_index() == x.get_device_index(),
                    "out: expected the device of x, cuda:", x.get_device_index());
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
    STD_TORCH_CHECK(partials.is_cuda() && partials.get_device_index() == stats.get_device_index(),
                    "partials: expected the device of stats, cuda:", stats.get_device_index());
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
        .dtype = dtype,
        .stream = current_stream(stats),
    });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(infloss, CUDA, m) {
    m.impl("inv_norm", TORCH_BOX(&inv_norm));
    m.impl("merge_stats", TORCH_BOX(&merge_stats));
}

#endif  // INFLOSS_WITH_CUDA
