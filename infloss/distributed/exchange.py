"""How blocks travel: one exchange between neighbours, and the ring that is made of them.

A ring shows every rank's block to every rank. At each step a rank works on the block it holds; the
block's features go on to the left neighbour while the next ones come in from the right, and what
the ranks add up for a block (statistics, a gradient) follows it from rank to rank, home at last.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from infloss.distributed.ranks import Coordinate, Level

Tensors = tuple[Tensor, ...]  # each with the block's rows first


class Pending(Protocol):
    """Tensors under way."""

    def wait(self) -> Tensors:
        """What arrived; raises RuntimeError if the exchange failed."""
        ...


class RingExchange(Protocol):
    """Exchange between the neighbours of one ring."""

    def post(self, outgoing: Tensors, rows: int) -> Pending:
        """Start to send ``outgoing`` to the left and to receive as many from the right.

        What arrives has ``rows`` rows and is otherwise shaped as what leaves. Ranks post in the
        same order. ``outgoing`` stays untouched until its Pending was waited for.
        """
        ...

    def check(self) -> None:
        """Raise RuntimeError if an exchange has failed."""
        ...


class Arrived:
    """Tensors that have no way to go."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def wait(self) -> Tensors:
        return self._tensors


class PointToPoint:
    """A ring over torch.distributed's batched send and receive, on any backend."""

    def __init__(self, level: Level) -> None:
        self._level = level
        self._failure = ""

    @property
    def _left(self) -> int:
        return (self._level.rank - 1) % self._level.size

    @property
    def _right(self) -> int:
        return (self._level.rank + 1) % self._level.size

    def post(self, outgoing: Tensors, rows: int) -> Pending:
        self.check()
        if self._level.size == 1:
            return Arrived(outgoing)
        outgoing = tuple(_at_least_a_row(tensor).contiguous() for tensor in outgoing)
        incoming = tuple(tensor.new_empty((max(rows, 1), *tensor.shape[1:])) for tensor in outgoing)
        group = self._level.group
        sends = [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=self._left)
            for tensor in outgoing
        ]
        receives = [
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=self._right)
            for tensor in incoming
        ]
        operations = sends + receives
        works = self._guarded(lambda: dist.batch_isend_irecv(operations)) if operations else []
        arriving = tuple(tensor[:rows] for tensor in incoming)
        return _UnderWay(self, works, outgoing, arriving)

    def check(self) -> None:
        if self._failure:
            raise RuntimeError(self._failure)

    def _guarded(self, communicate: Callable[[], Any]) -> Any:
        """Run it; a failure names the neighbours, now and in every later check of this ring."""
        try:
            return communicate()
        except RuntimeError as error:
            self._failure = (
                f"ring: exchange of rank {self._level.rank} with ranks {self._left} and "
                f"{self._right} of {self._level.size} failed; has one of them stopped? {error}"
            )
            raise RuntimeError(self._failure) from error


def _at_least_a_row(tensor: Tensor) -> Tensor:
    """``tensor``, or one row for an empty block, since NCCL wants every rank in an exchange."""
    return tensor if len(tensor) else tensor.new_zeros((1, *tensor.shape[1:]))


class _UnderWay:
    def __init__(
        self, ring: PointToPoint, works: list[Any], outgoing: Tensors, incoming: Tensors
    ) -> None:
        self._ring = ring
        self._works = works
        self._outgoing = outgoing  # kept alive until it has left
        self._incoming = incoming

    def wait(self) -> Tensors:
        for work in self._works:
            self._ring._guarded(work.wait)
        self._outgoing = ()
        return self._incoming


def circulate(
    levels: tuple[tuple[Level, RingExchange], ...],
    features: Tensors,
    rows: Callable[[Coordinate], int],
    visit: Callable[[Coordinate, Tensors], Tensors],
    merge: Callable[[Tensors, Tensors], Tensors],
    outer: Coordinate = (),
) -> Pending:
    """Show this rank's block to all ranks, and theirs to this one.

    Args:
        levels: the rings, outermost first: an inner one goes round once a step of its outer one,
            so that a slow outer link has all that time.
        features: of this rank's block.
        rows: size of the block of the rank at a coordinate.
        visit: works on the block of the rank at a coordinate; what it returns travels with it.
        merge: of what this rank and those before it made of a block, in that order.
        outer: where the block comes from in the levels around.

    Returns:
        What all ranks made of this rank's block, on its last way home.
    """
    if not levels:
        return Arrived(visit(outer, features))
    (level, ring), inner = levels[0], levels[1:]
    here = tuple(own.rank for own, _ in inner)
    carried: Pending | None = None
    for step in range(level.size):
        index = (level.rank + step) % level.size
        following = rows((*outer, (index + 1) % level.size, *here))
        last = step + 1 == level.size
        features_ahead = None if last else ring.post(features, following)
        made = circulate(inner, features, rows, visit, merge, (*outer, index)).wait()
        if carried is not None and made:
            made = merge(made, carried.wait())
        carried = ring.post(made, following)
        if features_ahead is not None:
            features = features_ahead.wait()
    assert carried is not None
    return carried
