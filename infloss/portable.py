"""The tiled algorithm in torch ops: any device, any floating dtype, the same contract as a kernel.

With similarities ``s_ij = logit_scale * <x_i, y_j>`` (rows scaled by their inverse norms when those
are given), :func:`lse` sweeps the tiles of S once for both log-sum-exps; :func:`grad` recomputes
each tile, forms

    G_ij = u_i P_ij + v_j Q_ij - w_i [j = t(i)],   P = softmax of rows, Q = softmax of columns,

and multiplies it into both gradients. A log-sum-exp is kept as the pair (max, sum of exp(s - max)),
planar as [2, M]: added up, it would lose the digits on which a well-matched pair's loss rests.

Inputs enter a tile product as they are; norms multiply the tile afterwards in the accumulation
dtype (float32, or float64 for float64 inputs), so that no rounded copy of an input exists.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from infloss import gemm

NORM_FLOOR = 1e-12
CPU_TILE = (1024, 1024)
GPU_TILE = (2048, 4096)
LIVE_TILES = 6


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of statistics and accumulators: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tile_shape(dim: int, itemsize: int, workspace: int, on_cpu: bool) -> tuple[int, int]:
    """Largest tile (rows, columns) up to the device's preferred one that fits ``workspace`` bytes.

    A step holds at most ``LIVE_TILES`` tiles and two panels of operands with ``dim`` columns.
    """
    rows, cols = CPU_TILE if on_cpu else GPU_TILE

    def bytes_needed() -> int:
        return itemsize * (LIVE_TILES * rows * cols + 2 * dim * (rows + cols))

    while bytes_needed() > workspace and rows * cols > 1:
        if rows >= cols:
            rows = max(1, rows // 2)
        else:
            cols = max(1, cols // 2)
    return rows, cols


def _spans(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


@dataclass(frozen=True)
class Similarity:
    """<x_i, y_j> in tiles, norms applied, and where the positives lie."""

    x: Tensor  # [M, D]
    y: Tensor  # [N, D]
    x_inv_norm: Tensor | None  # [M]
    y_inv_norm: Tensor | None  # [N]
    target: Tensor | None  # [M] int64; None: row i's positive is column offset + i * stride
    target_offset: int
    target_stride: int
    workspace: int

    @property
    def dtype(self) -> torch.dtype:
        return stats_dtype(self.x.dtype)

    def new(self, *shape: int, value: float = 0.0) -> Tensor:
        return torch.full(shape, value, dtype=self.dtype, device=self.x.device)

    def spans(self) -> tuple[list[slice], list[slice]]:
        """Row and column spans of the tiles."""
        on_cpu = self.x.device.type == "cpu"
        rows, cols = tile_shape(self.x.size(1), self.dtype.itemsize, self.workspace, on_cpu)
        return list(_spans(self.x.size(0), rows)), list(_spans(self.y.size(0), cols))

    def cosine(self, rows: slice, cols: slice) -> Tensor:
        """<x_i, y_j> of one tile, norms applied: [rows, cols]."""
        return self.scale_norms(gemm.product(self.x[rows], self.y[cols].T), rows, cols)

    def scale_norms(self, tile: Tensor, rows: slice, cols: slice) -> Tensor:
        """Multiply a tile by both sides' inverse norms, in place."""
        if self.x_inv_norm is not None:
            tile.mul_(self.x_inv_norm[rows, None])
        if self.y_inv_norm is not None:
            tile.mul_(self.y_inv_norm[cols])
        return tile

    def positives(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        """Column of each row's positive within the tile, and whether it lies there: [rows, 1]."""
        if self.target is not None:
            column = self.target[rows]
        else:
            row = torch.arange(rows.start, rows.stop, device=self.x.device)
            column = row * self.target_stride + self.target_offset
        inside = (column >= cols.start) & (column < cols.stop)
        local = torch.where(inside, column - cols.start, 0)
        return local[:, None], inside[:, None]


def _in_plain_precision(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Run a kernel outside autocast, which would round the tiles of a float32 call."""

    @wraps(kernel)
    def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return kernel(x, *args, **kwargs)

    return wrapped


def inv_norm(x: Tensor, out: Tensor) -> None:
    """Write 1 / ||x_i|| of every row to ``out`` [M], and 0 where the norm is at most 1e-12."""
    norm = torch.linalg.vector_norm(x, dim=1, dtype=out.dtype)
    out.copy_(torch.where(norm <= NORM_FLOOR, 0.0, norm.reciprocal()))


def merge_stats(stats: Tensor, partials: Tensor) -> None:
    """Merge ``partials`` [K, 2, M] of (max, sum) pairs into ``stats`` [2, M], in their order."""
    for partial in partials:
        top = torch.maximum(stats[0], partial[0])
        total = _rescaled(stats, top) + _rescaled(partial, top)
        stats[0] = top
        stats[1] = total


def _rescaled(stats: Tensor, top: Tensor) -> Tensor:
    """Sums of ``stats`` relative to another maximum; equal maxima may both be infinite."""
    return torch.where(stats[0] == top, stats[1], stats[1] * torch.exp(stats[0] - top))


def _tile_stats(tile: Tensor, dim: int) -> Tensor:
    """(max, sum of exp) of a tile along ``dim``, as one partial [1, 2, M]."""
    top = tile.amax(dim, keepdim=True)
    total = (tile - top).exp_().sum(dim)
    return torch.stack((top.squeeze(dim), total))[None]


def _empty_stats(sim: Similarity, size: int) -> Tensor:
    stats = sim.new(2, size)
    stats[0] = -math.inf
    return stats


@_in_plain_precision
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics of S in one sweep over its tiles; see ``infloss::lse`` in ops.py."""
    sim = Similarity(x, y, x_inv_norm, y_inv_norm, target, target_offset, target_stride, workspace)
    m, n = x.size(0), y.size(0)
    row_stats = _empty_stats(sim, m if rows else 0)
    col_stats = _empty_stats(sim, n if cols else 0)
    positive = sim.new(m, value=math.nan)
    row_hardest = sim.new(m if rows and hardest else 0, value=-math.inf)
    col_hardest = sim.new(n if cols and hardest else 0, value=-math.inf)

    row_spans, col_spans = sim.spans()
    for r in row_spans:
        for c in col_spans:
            s = sim.cosine(r, c).mul_(logit_scale)
            local, inside = sim.positives(r, c)
            at_target = s.gather(1, local)
            positive[r] = torch.where(inside, at_target, positive[r, None]).squeeze(1)
            if rows:
                torch.ops.infloss.merge_stats(row_stats[:, r], _tile_stats(s, 1))
            if cols:
                torch.ops.infloss.merge_stats(col_stats[:, c], _tile_stats(s, 0))
            if hardest:
                s.scatter_(1, local, torch.where(inside, -math.inf, at_target))
                if rows:
                    torch.maximum(row_hardest[r], s.amax(1), out=row_hardest[r])
                if cols:
                    torch.maximum(col_hardest[c], s.amax(0), out=col_hardest[c])
    return row_stats, col_stats, positive, row_hardest, col_hardest


@dataclass(frozen=True)
class Coefficients:
    """G in tiles: what turns a tile of S into dL/dS."""

    sim: Similarity
    row_stats: Tensor | None  # [2, M]
    row_weight: Tensor | None  # [M], u
    col_stats: Tensor | None  # [2, N]
    col_weight: Tensor | None  # [N], v
    target_weight: Tensor  # [M], w

    def tile(self, s: Tensor, rows: slice, cols: slice) -> Tensor:
        """G of one tile; consumes ``s``."""
        terms = []
        if self.row_stats is not None and self.row_weight is not None:
            top, total = self.row_stats[:, rows]
            p = torch.sub(s, top[:, None]).exp_()
            terms.append(p.mul_((self.row_weight[rows] / total)[:, None]))
        if self.col_stats is not None and self.col_weight is not None:
            top, total = self.col_stats[:, cols]
            terms.append(s.sub_(top).exp_().mul_(self.col_weight[cols] / total))
        g = terms[0].add_(terms[1]) if len(terms) == 2 else terms[0]
        local, inside = self.sim.positives(rows, cols)
        weight = torch.where(inside, self.target_weight[rows, None], 0)
        return g.scatter_add_(1, local, weight.neg_())


def require_weights(row_weight: Tensor | None, col_weight: Tensor | None) -> None:
    """Raise a ValueError unless some direction has weights."""
    if row_weight is None and col_weight is None:
        raise ValueError("row_weight, col_weight: expected at least one of them, got None for both")


def _finish_rows(
    out: Tensor, acc: Tensor, x: Tensor, inv_norm: Tensor | None, logit_scale: Tensor
) -> None:
    """Turn accumulated rows into the input's gradient, written to ``out``; consumes ``acc``.

    ``acc_i`` is inv_norm_i * sum_j G_ij y_j / ||y_j||. The gradient of a normalised row is its
    component orthogonal to the row, times logit_scale.
    """
    if inv_norm is not None:
        wide = x.to(acc.dtype)
        for _ in range(2):  # the second pass takes off what rounding left along the row
            along = (wide * acc).sum(1) * inv_norm.square()
            acc.sub_(wide * along[:, None])
    out.copy_(acc.mul_(logit_scale))


@_in_plain_precision
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by recomputing each tile once; see ``infloss::grad`` in ops.py."""
    sim = Similarity(x, y, x_inv_norm, y_inv_norm, target, target_offset, target_stride, workspace)
    require_weights(row_weight, col_weight)
    coefficients = Coefficients(sim, row_stats, row_weight, col_stats, col_weight, target_weight)
    dim = x.size(1)
    dtype = sim.dtype if wide else x.dtype
    dx = torch.empty((x.size(0) if need_x else 0, dim), dtype=dtype, device=x.device)
    dy = torch.empty((y.size(0) if need_y else 0, dim), dtype=dtype, device=y.device)
    dy_acc = (dy if dy.dtype == sim.dtype else torch.empty_like(dy, dtype=sim.dtype)).zero_()
    dscale = sim.new(x.size(0))  # sum_j G_ij (<x_i, y_j> - centre) of each row

    row_spans, col_spans = sim.spans()
    for r in row_spans:
        dx_acc = sim.new(r.stop - r.start, dim) if need_x else None
        for c in col_spans:
            cosine = sim.cosine(r, c)
            s = cosine * logit_scale if need_scale else cosine.mul_(logit_scale)
            g = coefficients.tile(s, r, c)
            if need_scale:
                if centre is not None:
                    cosine.sub_(centre)
                dscale[r] += cosine.mul_(g).sum(1)
            if not (need_x or need_y):
                continue
            factor = gemm.factor(sim.scale_norms(g, r, c), x)
            if dx_acc is not None:
                gemm.accumulate(dx_acc, factor, y[c])
            if need_y:
                gemm.accumulate(dy_acc[c], factor.T, x[r])
        if dx_acc is not None:
            _finish_rows(dx[r], dx_acc, x[r], _part(x_inv_norm, r), logit_scale)
    if need_y:
        for c in col_spans:
            _finish_rows(dy[c], dy_acc[c], y[c], _part(y_inv_norm, c), logit_scale)
    return dx, dy, dscale.sum() if need_scale else sim.new(0)


def _part(vector: Tensor | None, span: slice) -> Tensor | None:
    return None if vector is None else vector[span]
