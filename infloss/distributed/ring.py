"""Strategy "ring": the columns' features travel from rank to rank in sub-blocks.

A rank holds its own shard and a few sub-blocks of the others', so memory is O(b D) for a shard of b
rows, however many ranks there are. Row statistics and the rows' gradient are completed at home;
those of the columns travel with their block.
"""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from infloss.distributed.call import Call, Coefficients
from infloss.distributed.exchange import (
    Pending,
    PointToPoint,
    RingExchange,
    Tensors,
    circulate,
)
from infloss.distributed.ranks import Coordinate, Level
from infloss.distributed.shards import SubBlock
from infloss.distributed.statistics import Statistics, merge_columns
from infloss.ops import inverse_norms
from infloss.portable import stats_dtype

BLOCK_ROWS = 8192  # enough for the tensor cores, little beside a shard that needs a ring

Visit = Callable[[int, Tensors], Tensors]  # first column of a block, its features -> what is made
Merge = Callable[[Tensors, Tensors], Tensors]


class Ring:
    """Covers S in sub-blocks of columns."""

    name = "ring"

    def __init__(self, call: Call) -> None:
        self._call = call
        self._levels: tuple[tuple[Level, RingExchange], ...] = tuple(
            (level, PointToPoint(level)) for level in call.ranks.levels
        )

    def columns(self, y: Tensor) -> Tensor:
        """The columns' features that this rank keeps for its backward pass: [N, D]."""
        return y

    def lse(self, x: Tensor, y: Tensor, logit_scale: Tensor, target: Tensor | None) -> Statistics:
        """Statistics of this rank's rows over all columns, and of its columns over all rows."""
        call = self._call
        x_inv = inverse_norms(x) if call.normalize else None
        found = Statistics.empty(x, y, cols=call.cols, hardest=call.hardest)

        def visit(start: int, features: Tensors) -> Tensors:
            part = call.lse(x, features[0], x_inv, logit_scale, target, start)
            found.add_rows(part)
            return (part.packed_columns(hardest=call.hardest),) if call.cols else ()

        def merge(ours: Tensors, earlier: Tensors) -> Tensors:
            return (merge_columns(earlier[0], ours[0]),)

        for span, made in self._rounds((y,), visit, merge):
            if call.cols:
                found.put_columns(span, *made)
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
        need_x, need_y, _ = call.needs
        wide = stats_dtype(x.dtype)
        x_inv = inverse_norms(x) if call.normalize else None
        dx = x.new_zeros(x.shape if need_x else 0, dtype=wide)
        dy = y.new_empty(y.shape if need_y else 0)
        dscale = x.new_zeros((), dtype=wide)

        def visit(start: int, features: Tensors) -> Tensors:
            block, *packed = features
            seen = coefficients.of_columns(*packed)
            parts = call.grad(x, block, x_inv, logit_scale, target, start, seen)
            for total, part, needed in zip((dx, dscale), parts[::2], call.needs[::2], strict=True):
                if needed:
                    total.add_(part)
            return (parts[1],) if need_y else ()

        def merge(ours: Tensors, earlier: Tensors) -> Tensors:
            return (earlier[0] + ours[0],)

        for span, made in self._rounds((y, *coefficients.packed_columns()), visit, merge):
            if need_y:
                dy[span] = made[0]
        return dx.to(x.dtype), dy, dscale

    def _rounds(
        self, features: Tensors, visit: Visit, merge: Merge
    ) -> Iterator[tuple[slice, Tensors]]:
        """Send each sub-block of this rank's columns round: (its span, what all ranks made of it).

        While one is on its last way home, the next is being worked on.
        """
        call, blocks = self._call, self._call.keys.blocks(BLOCK_ROWS)
        coming_home: tuple[slice, Pending] | None = None
        for index in range(blocks):
            block = SubBlock(call.ranks, call.keys, index, blocks)
            mine = block.span(call.ranks.coordinate)
            own = tuple(tensor[mine] for tensor in features)
            made = circulate(self._levels, own, block.rows, partial(_visit, visit, block), merge)
            if coming_home is not None:
                yield coming_home[0], coming_home[1].wait()
            coming_home = mine, made
        if coming_home is not None:
            yield coming_home[0], coming_home[1].wait()


def _visit(visit: Visit, block: SubBlock, coordinate: Coordinate, tensors: Tensors) -> Tensors:
    return visit(block.start(coordinate), tensors)
