"""One loss of a spread batch: what its forward and backward share besides tensors."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from infloss.distributed.header import Channel
from infloss.distributed.ranks import Ranks
from infloss.distributed.shards import Shards
from infloss.distributed.statistics import Statistics
from infloss.ops import inverse_norms

Needs = tuple[bool, bool, bool]  # of the rows', the columns' and logit_scale's gradient


@dataclass(frozen=True)
class Coefficients:
    """What turns similarities into gradient coefficients; see ``infloss::grad`` in ops.py."""

    row_stats: Tensor  # [2, M]
    row_weight: Tensor  # [M]
    col_stats: Tensor | None  # [2, N]
    col_weight: Tensor | None  # [N]
    target_weight: Tensor  # [M]
    centre: Tensor | None  # []

    def packed_columns(self) -> tuple[Tensor, ...]:
        """The columns' part, to travel with them: [N, 3], or nothing."""
        if self.col_stats is None or self.col_weight is None:
            return ()
        return (torch.cat((self.col_stats, self.col_weight[None])).T.contiguous(),)

    def of_columns(self, *packed: Tensor) -> "Coefficients":
        """The same rows with the columns that some rank has packed."""
        if not packed:
            return self
        planar = packed[0].T.contiguous()
        return replace(self, col_stats=planar[:2], col_weight=planar[2])


@dataclass(frozen=True)
class Call:
    """What all ranks agreed on. S has ``rows.total`` rows and ``keys.total`` columns."""

    ranks: Ranks
    rows: Shards
    keys: Shards
    normalize: bool
    needs: Needs
    cols: bool  # also the column direction; then rows and columns are pairs
    hardest: bool
    workspace: int
    path: str
    precision: str
    factor: float  # of gradients: W where the trainer averages them over the ranks, or 1
    step: dict[str, Any]  # names this call in headers
    channel: Channel | None  # None: headers were not wanted

    @property
    def target_stride(self) -> int:
        return self.keys.total // self.rows.total

    def confirm_backward(self) -> None:
        """Raise the same ValueError on every rank unless all are in this call's backward."""
        if self.channel is not None:
            self.channel.agree({**self.step, "pass": "backward"}, {})

    def lse(
        self,
        x: Tensor,
        y: Tensor,
        x_inv: Tensor | None,
        logit_scale: Tensor,
        target: Tensor | None,
        start: int,
    ) -> Statistics:
        """Statistics of this rank's rows ``x`` [b, D] against columns ``y`` [n, D].

        ``start`` is the index of the first of them in the whole batch; ``x_inv`` [b] inverse norms.
        """
        return Statistics(
            *torch.ops.infloss.lse(
                x,
                y,
                logit_scale,
                x_inv,
                inverse_norms(y) if self.normalize else None,
                *self._target(target, start),
                rows=True,
                cols=self.cols,
                hardest=self.hardest,
                workspace=self.workspace,
                path=self.path,
                precision=self.precision,
            )
        )

    def grad(
        self,
        x: Tensor,
        y: Tensor,
        x_inv: Tensor | None,
        logit_scale: Tensor,
        target: Tensor | None,
        start: int,
        coefficients: Coefficients,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What those similarities give to the gradients [b, D], [n, D] and [], where needed.

        All are in the statistics' dtype, to be added up.
        """
        need_x, need_y, need_scale = self.needs
        parts: tuple[Tensor, Tensor, Tensor] = torch.ops.infloss.grad(
            x,
            y,
            logit_scale,
            x_inv,
            inverse_norms(y) if self.normalize else None,
            *self._target(target, start),
            row_stats=coefficients.row_stats,
            row_weight=coefficients.row_weight,
            col_stats=coefficients.col_stats,
            col_weight=coefficients.col_weight,
            target_weight=coefficients.target_weight,
            centre=coefficients.centre,
            need_x=need_x,
            need_y=need_y,
            need_scale=need_scale,
            wide=True,
            workspace=self.workspace,
            path=self.path,
            precision=self.precision,
        )
        return parts

    def _target(self, target: Tensor | None, start: int) -> tuple[Tensor | None, int, int]:
        """(target, target_offset, target_stride) among columns counted from ``start``."""
        if target is not None:
            return target - start, 0, 1
        stride = self.target_stride
        return None, self.rows.start(self.ranks.rank) * stride - start, stride
