"""Strategy "gather": every rank gets all columns' features in one all-gather.

Few large messages: right for small batches, whose ring steps would be all latency. Memory is O(B D)
for a whole batch of B rows, the columns' gradient in float32 included.
"""

import torch.distributed as dist
from torch import Tensor

from infloss.distributed.call import Call, Coefficients
from infloss.distributed.collect import gather_rows, scatter_sum
from infloss.distributed.ranks import explained
from infloss.distributed.statistics import Statistics, merge_columns
from infloss.ops import inverse_norms


class Gather:
    """Covers S in one panel of rows."""

    name = "gather"

    def __init__(self, call: Call) -> None:
        self._call = call

    def columns(self, y: Tensor) -> Tensor:
        """The columns' features that this rank keeps for its backward pass: all [N, D]."""
        return self._all(y)

    def lse(self, x: Tensor, y: Tensor, logit_scale: Tensor, target: Tensor | None) -> Statistics:
        """Statistics of this rank's rows over all columns, and of its columns over all rows."""
        call = self._call
        x_inv = inverse_norms(x) if call.normalize else None
        part = call.lse(x, y, x_inv, logit_scale, target, 0)
        mine = y[: call.keys.sizes[call.ranks.rank]]  # as many columns as are this rank's own
        found = Statistics.empty(x, mine, cols=call.cols, hardest=call.hardest)
        found.add_rows(part)
        if call.cols:
            merged, *others = self._to_owners(part.packed_columns(hardest=call.hardest))
            for other in others:
                merged = merge_columns(merged, other)
            found.put_columns(slice(None), merged)
        return found

    def grad(
        self,
        x: Tensor,
        y: Tensor,
        logit_scale: Tensor,
        target: Tensor | None,
        coefficients: Coefficients,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this rank's rows and columns, and its part of logit_scale's."""
        call = self._call
        x_inv = inverse_norms(x) if call.normalize else None
        seen = coefficients.of_columns(
            *(self._all(packed) for packed in coefficients.packed_columns())
        )
        dx, dy, dscale = call.grad(x, y, x_inv, logit_scale, target, 0, seen)
        if call.needs[1]:
            dy = scatter_sum(dy, call.keys, call.ranks)
        return dx.to(x.dtype), dy.to(y.dtype), dscale

    def _all(self, rows: Tensor) -> Tensor:
        return gather_rows(rows, self._call.keys, self._call.ranks)

    def _to_owners(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Hand each rank its columns' part; what every rank has of one's own, in their order."""
        ranks, sizes = self._call.ranks, self._call.keys.sizes
        own = sizes[ranks.rank]
        if ranks.size == 1:
            return (packed,)
        out = packed.new_empty((ranks.size * own, packed.size(1)))
        with explained("exchanging statistics", ranks.rank, ranks.size):
            dist.all_to_all_single(
                out, packed, [own] * ranks.size, list(sizes), group=ranks.levels[0].group
            )
        return out.unflatten(0, (ranks.size, own)).unbind()
