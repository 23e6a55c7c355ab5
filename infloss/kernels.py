"""The compiled tile kernels behind ``infloss::lse`` and ``infloss::grad``, on CUDA devices.

This module allocates what a kernel writes and prepares its operands: rows of unit stride that
16-byte copies can read, in the dtype that the tensor cores take. Float32 follows torch's matmul
precision as it was when the forward pass started: "highest" multiplies in three TF32 products,
"high" in one where that keeps TF32's accuracy, "medium" in bfloat16.
"""

import math

import torch
from torch import Tensor

from infloss import library, portable

PATHS = ("sm90", "sm80")
AUTO_PATHS = ("sm80",)  # fastest first; "sm90" joins once its accuracy and speed are on record
ALIGNMENT = 16  # bytes
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_CAPABILITY = (8, 0)
HOPPER, HOPPER_ARCH = (9, 0), "9.0a"


@torch.compiler.assume_constant_result  # a graph is compiled again where TF32 is allowed or not
def float32_precision() -> str:
    """Torch's precision of float32 products: "highest", "high" or "medium"."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # refused once fp32_precision, the newer setting, was used
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def why_not(path: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why ``path`` cannot take features of ``dtype`` on ``device``, or None if it can.

    Raises:
        RuntimeError: the device could run a kernel, but the library was not compiled for it.
    """
    if device.type != "cuda":
        return f"needs CUDA features, got {device}"
    if dtype not in DTYPES:
        return f"needs float16, bfloat16 or float32 features, got {dtype}"
    if not library.CUDA_ARCHS:
        return "needs a build with CUDA kernels, which this one is not"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"needs compute capability 8.0 or later, got {capability[0]}.{capability[1]}"
    if path == "sm90":
        if capability != HOPPER:
            return f"needs compute capability 9.0, got {capability[0]}.{capability[1]}"
        if not library.has_code_of(HOPPER_ARCH):
            return f"needs a build with code for compute capability {HOPPER_ARCH}"
    library.check_code_for(device)
    return None


def _readable(x: Tensor, path: str) -> Tensor:
    """``x`` [M, D] itself, or a copy if 16-byte copies, or Hopper's copy engine, cannot read it."""
    unit = ALIGNMENT // x.element_size()
    rows, dim = x.shape
    apart = path != "sm90" or rows == 1 or x.stride(0) >= dim
    if x.stride(1) == 1 and x.stride(0) % unit == 0 and x.data_ptr() % ALIGNMENT == 0 and apart:
        return x
    return x.new_empty((rows, math.ceil(dim / unit) * unit))[:, :dim].copy_(x)


def _operand(x: Tensor, path: str, precision: str) -> Tensor:
    """``x`` as the tensor cores read it."""
    rounded = x.dtype == torch.float32 and precision == "medium"
    return _readable(x.to(torch.bfloat16) if rounded else x, path)


def _input(x: Tensor, operand: Tensor) -> Tensor:
    """``x`` [M, D] itself, or a copy with contiguous rows, in its own dtype."""
    if x.stride(1) == 1:
        return x
    return operand if operand.dtype == x.dtype else x.contiguous()


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def _workspace(needed: int, device: torch.device) -> Tensor:
    return torch.empty(needed, dtype=torch.uint8, device=device)


def lse(
    x: Tensor,
    y: Tensor,
    logit_scale: Tensor,
    x_inv_norm: Tensor | None,
    y_inv_norm: Tensor | None,
    target: Tensor | None,
    target_offset: int,
    target_stride: int,
    rows: bool,
    cols: bool,
    hardest: bool,
    workspace: int,
    *,
    path: str,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics of S; see ``infloss::lse`` in ops.py."""
    m, n = x.size(0), y.size(0)
    # no loss has columns with other targets: a kernel would need the rows of a column's positives
    if (cols and (target is not None or target_stride < 1)) or 0 in (m, n):
        return portable.lse(
            x,
            y,
            logit_scale,
            x_inv_norm,
            y_inv_norm,
            target,
            target_offset,
            target_stride,
            rows,
            cols,
            hardest,
            workspace,
        )

    def stat(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    row_stats, col_stats = stat(2, m if rows else 0), stat(2, n if cols else 0)
    positive = stat(m).fill_(math.nan)
    row_hardest = stat(m if rows and hardest else 0)
    col_hardest = stat(n if cols and hardest else 0)
    arguments = (
        _operand(x, path, precision),
        _operand(y, path, precision),
        logit_scale,
        x_inv_norm,
        y_inv_norm,
        _contiguous(target),
        target_offset,
        target_stride,
        precision != "highest",
        workspace,
        row_stats if rows else None,
        col_stats if cols else None,
        positive,
        row_hardest if rows and hardest else None,
        col_hardest if cols and hardest else None,
    )
    needed = torch.ops.infloss.lse_out(*arguments, path, None)
    torch.ops.infloss.lse_out(*arguments, path, _workspace(needed, x.device))
    return row_stats, col_stats, positive, row_hardest, col_hardest


def grad(
    x: Tensor,
    y: Tensor,
    logit_scale: Tensor,
    x_inv_norm: Tensor | None,
    y_inv_norm: Tensor | None,
    target: Tensor | None,
    target_offset: int,
    target_stride: int,
    row_stats: Tensor | None,
    row_weight: Tensor | None,
    col_stats: Tensor | None,
    col_weight: Tensor | None,
    target_weight: Tensor,
    centre: Tensor | None,
    need_x: bool,
    need_y: bool,
    need_scale: bool,
    wide: bool,
    workspace: int,
    *,
    path: str,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients; see ``infloss::grad`` in ops.py."""
    portable.require_weights(row_weight, col_weight)
    if 0 in (x.size(0), y.size(0)):
        return portable.grad(
            x,
            y,
            logit_scale,
            x_inv_norm,
            y_inv_norm,
            target,
            target_offset,
            target_stride,
            row_stats,
            row_weight,
            col_stats,
            col_weight,
            target_weight,
            centre,
            need_x,
            need_y,
            need_scale,
            wide,
            workspace,
        )
    x_operand, y_operand = _operand(x, path, precision), _operand(y, path, precision)
    if wide:  # a gradient has the dtype of its input, and the input may be wider than its operand
        x, y = x.float(), y.float()
    dim = x.size(1)
    dx = torch.empty((x.size(0) if need_x else 0, dim), dtype=x.dtype, device=x.device)
    dy = torch.empty((y.size(0) if need_y else 0, dim), dtype=y.dtype, device=y.device)
    dscale = torch.empty(() if need_scale else (0,), dtype=torch.float32, device=x.device)
    arguments = (
        x_operand,
        y_operand,
        logit_scale,
        x_inv_norm,
        y_inv_norm,
        _contiguous(target),
        target_offset,
        target_stride,
        precision != "highest",
        workspace,
        _contiguous(row_stats),
        _contiguous(row_weight),
        _contiguous(col_stats),
        _contiguous(col_weight),
        target_weight.contiguous(),
        centre,
        _input(x, x_operand),
        _input(y, y_operand),
        dx if need_x else None,
        dy if need_y else None,
        dscale if need_scale else None,
    )
    needed = torch.ops.infloss.grad_out(*arguments, path, None)
    torch.ops.infloss.grad_out(*arguments, path, _workspace(needed, x.device))
    return dx, dy, dscale
