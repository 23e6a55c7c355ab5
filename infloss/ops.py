"""The dispatcher ops and the one autograd Function over them.

Schemas live in csrc/ops.cpp. What each op computes, with S_ij = logit_scale * <x_i, y_j> (rows
scaled by inverse norms where given) and t(i) = target[i], or offset + i * stride without a target:

``infloss::inv_norm(x, out)``
    out[i] = 1 / ||x_i||, and 0 where the norm is at most 1e-12.
``infloss::merge_stats(stats, partials)``
    merges [K, 2, M] partial log-sum-exps, pairs (max, sum of exp(s - max)), into stats [2, M].
``infloss::lse(...) -> (row_stats, col_stats, positive, row_hardest, col_hardest)``
    row_stats [2, M] and col_stats [2, N] as such pairs; positive [M] = S_{i,t(i)}, NaN where t(i)
    is no column; the hardest negative of each row and column. What is not asked for has size 0.
``infloss::grad(...) -> (dx, dy, dlogit_scale)``
    gradients through G_ij = u_i P_ij + v_j Q_ij - w_i [j = t(i)], each with 0 rows if not needed.
    dlogit_scale is sum_ij G_ij (<x_i, y_j> - centre). Where G sums to zero, as for every loss of a
    positive against a softmax, a centre changes nothing but the rounding: in a narrow cone of
    features all <x_i, y_j> are near one value, and sum_ij G_ij <x_i, y_j> is all cancellation.
    ``wide`` gradients come in the statistics' dtype, to be added up over blocks of columns.

``path`` names the implementation (see paths.py), ``precision`` torch's precision of float32
products, which compiled kernels follow. Those that end in ``_out`` are the compiled
kernels themselves, which write into what their caller allocated.
"""

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from infloss import config, kernels, library, paths, portable  # noqa: F401  (library has the schemas)
from infloss.portable import stats_dtype

_lib = torch.library.Library("infloss", "FRAGMENT")


def _inv_norm(x: Tensor, out: Tensor) -> None:
    if paths.has_compiled_statistics(x):
        # the kernel reads rows with unit stride
        torch.ops.infloss.inv_norm_out(x if x.stride(1) == 1 else x.contiguous(), out)
    else:
        portable.inv_norm(x, out)


def _merge_stats(stats: Tensor, partials: Tensor) -> None:
    if paths.has_compiled_statistics(stats):
        torch.ops.infloss.merge_stats_out(stats, partials)
    else:
        portable.merge_stats(stats, partials)


def _lse(x: Tensor, *rest: Any) -> Any:
    *arguments, path, precision = rest
    path = paths.resolve(path, x.dtype, x.device)
    if path == "portable":
        return portable.lse(x, *arguments)
    return kernels.lse(x, *arguments, path=path, precision=precision)


def _grad(x: Tensor, *rest: Any) -> Any:
    *arguments, path, precision = rest
    path = paths.resolve(path, x.dtype, x.device)
    if path == "portable":
        return portable.grad(x, *arguments)
    return kernels.grad(x, *arguments, path=path, precision=precision)


for _name, _function in (
    ("inv_norm", _inv_norm),
    ("merge_stats", _merge_stats),
    ("lse", _lse),
    ("grad", _grad),
):
    _lib.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("infloss::inv_norm")
def _inv_norm_fake(x: Tensor, out: Tensor) -> None:
    return None


@torch.library.register_fake("infloss::merge_stats")
def _merge_stats_fake(stats: Tensor, partials: Tensor) -> None:
    return None


@torch.library.register_fake("infloss::lse")
def _lse_fake(
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
    path: str,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    m, n = x.size(0), y.size(0)

    def stat(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=stats_dtype(x.dtype))

    return (
        stat(2, m if rows else 0),
        stat(2, n if cols else 0),
        stat(m),
        stat(m if rows and hardest else 0),
        stat(n if cols and hardest else 0),
    )


@torch.library.register_fake("infloss::grad")
def _grad_fake(
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
    path: str,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    wide_dtype = stats_dtype(x.dtype)
    dtype = wide_dtype if wide else x.dtype
    return (
        x.new_empty((x.size(0) if need_x else 0, x.size(1)), dtype=dtype),
        y.new_empty((y.size(0) if need_y else 0, y.size(1)), dtype=dtype),
        x.new_empty((() if need_scale else (0,)), dtype=wide_dtype),
    )


def _refuse_derivative(op: str, reason: str) -> None:
    """Give ``op`` a derivative that raises; without one autograd would silently return None."""

    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise NotImplementedError(f"infloss::{op}: {reason}")

    torch.library.register_autograd(f"infloss::{op}", backward)


_refuse_derivative("grad", "second derivatives of the contrastive loss are not implemented")
_refuse_derivative("lse", "not differentiable by itself; use infloss.contrastive_loss or info_nce")


class PairLosses(NamedTuple):
    """What :func:`pair_losses` returns; what was not asked for has size 0."""

    row_nll: Tensor  # [M]  log-sum-exp of row i minus its positive; differentiable
    col_nll: Tensor  # [N]  the same of column i; differentiable
    row_lse: Tensor  # [M]
    col_lse: Tensor  # [N]
    positive: Tensor  # [M]
    row_hardest: Tensor  # [M]
    col_hardest: Tensor  # [N]


def inverse_norms(x: Tensor) -> Tensor:
    """1 / ||x_i|| of [M, D], and 0 of rows that are as good as zero: [M]."""
    out = torch.empty(x.size(0), dtype=stats_dtype(x.dtype), device=x.device)
    torch.ops.infloss.inv_norm(x, out)
    return out


def log_mean_exp(row_stats: Tensor, keys: int) -> Tensor:
    """log(mean_j exp(s_ij)) of each row: [M]."""
    return row_stats[0] + (row_stats[1] / keys).log()


def typical_cosine(level: Tensor, logit_scale: Tensor) -> Tensor:
    """Where the <x_i, y_j> lie, read off the rows' mean :func:`log_mean_exp`; 0 at scale 0."""
    return torch.where(logit_scale == 0, 0.0, level / logit_scale)


def log_sum_exp(stats: Tensor) -> Tensor:
    """[N] of the pairs (maximum, sum of exponentials below it): [2, N]."""
    return stats[0] + stats[1].log()


def nll(stats: Tensor, positive: Tensor) -> Tensor:
    """log-sum-exp minus positive, in the order that never rounds below zero."""
    return (stats[0] - positive) + stats[1].log()


class _PairLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        logit_scale: Tensor,
        target: Tensor | None,
        target_stride: int,
        normalize: bool,
        cols: bool,
        hardest: bool,
        workspace: int,
        path: str,
        precision: str,
    ) -> tuple[Tensor, ...]:
        x_inv = inverse_norms(x) if normalize else None
        y_inv = inverse_norms(y) if normalize else None
        row_stats, col_stats, positive, row_hardest, col_hardest = torch.ops.infloss.lse(
            x,
            y,
            logit_scale,
            x_inv,
            y_inv,
            target,
            target_offset=0,
            target_stride=target_stride,
            rows=True,
            cols=cols,
            hardest=hardest,
            workspace=workspace,
            path=path,
            precision=precision,
        )
        row_nll = nll(row_stats, positive)
        col_nll = nll(col_stats, positive) if cols else positive.new_empty(0)
        extras = (
            log_sum_exp(row_stats),
            log_sum_exp(col_stats),
            positive,
            row_hardest,
            col_hardest,
        )
        ctx.mark_non_differentiable(*extras)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            x, y, logit_scale, x_inv, y_inv, target, row_stats, col_stats if cols else None
        )
        ctx.target_stride = target_stride
        ctx.workspace = workspace
        ctx.path = path
        ctx.precision = precision
        return row_nll, col_nll, *extras

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, row_weight: Tensor | None, col_weight: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        x, y, logit_scale, x_inv, y_inv, target, row_stats, col_stats = ctx.saved_tensors
        if col_stats is None:
            col_weight = None
        weights = [weight for weight in (row_weight, col_weight) if weight is not None]
        if not weights:
            return (None,) * 11
        need_x, need_y, need_scale = ctx.needs_input_grad[:3]
        centre = None
        if need_scale:
            centre = typical_cosine(log_mean_exp(row_stats, y.size(0)).mean(), logit_scale)
        dx, dy, dscale = torch.ops.infloss.grad(
            x,
            y,
            logit_scale,
            x_inv,
            y_inv,
            target,
            target_offset=0,
            target_stride=ctx.target_stride,
            row_stats=row_stats if row_weight is not None else None,
            row_weight=row_weight,
            col_stats=col_stats if col_weight is not None else None,
            col_weight=col_weight,
            target_weight=sum(weights[1:], weights[0]),
            centre=centre,
            need_x=need_x,
            need_y=need_y,
            need_scale=need_scale,
            wide=False,
            workspace=ctx.workspace,
            path=ctx.path,
            precision=ctx.precision,
        )
        return (
            dx if need_x else None,
            dy if need_y else None,
            dscale if need_scale else None,
            *(None,) * 8,
        )


def pair_losses(
    x: Tensor,
    y: Tensor,
    logit_scale: Tensor,
    *,
    target: Tensor | None = None,
    target_stride: int = 1,
    normalize: bool = True,
    cols: bool = False,
    hardest: bool = False,
    workspace: int,
    path: str = config.AUTO,
    precision: str = "highest",
) -> PairLosses:
    """Per-pair negative log-likelihoods of rows (and columns) of S, differentiable.

    Args:
        x: [M, D] and ``y`` [N, D], one floating dtype, one device.
        logit_scale: [] in the statistics' dtype, on the same device.
        target: [M] int64 columns, or None for ``i * target_stride``.
        cols: also the column direction; then M = N and pair i is (x_i, y_i).
        hardest: also the hardest negatives.
        workspace: bytes for tiles.
        path: what implements it; see paths.py.
        precision: of float32 products, as ``kernels.float32_precision`` says.
    """
    return PairLosses(
        *_PairLosses.apply(
            x,
            y,
            logit_scale,
            target,
            target_stride,
            normalize,
            cols,
            hardest,
            workspace,
            path,
            precision,
        )
    )
