"""How S is covered: the strategies, and which one "auto" takes."""

from typing import Protocol

import torch
from torch import Tensor

from infloss.distributed.call import Call, Sides
from infloss.distributed.gather import Gather
from infloss.distributed.ring import Ring
from infloss.distributed.statistics import Statistics
from infloss.portable import stats_dtype


class Strategy(Protocol):
    """Covers S of all ranks; ``columns`` is what ``lse`` and ``grad`` take as ``y``."""

    name: str

    def columns(self, y: Tensor) -> Tensor: ...

    def lse(
        self, x: Tensor, y: Tensor, logit_scale: Tensor, target: Tensor | None
    ) -> Statistics: ...

    def grad(
        self,
        x: Tensor,
        y: Tensor,
        logit_scale: Tensor,
        target: Tensor | None,
        sides: Sides,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def gathered_bytes(columns: int, dim: int, dtype: torch.dtype) -> int:
    """Memory of all columns' features and of their gradient's accumulator on one rank."""
    return columns * dim * (dtype.itemsize + stats_dtype(dtype).itemsize)


def choose(strategy: str, call: Call, dim: int, dtype: torch.dtype) -> Strategy:
    """The strategy of that name.

    "auto" gathers where what is gathered fits the workspace limit, which is where messages are
    small enough for their number to matter; everything else, and a mesh of nodes, takes the ring,
    whose transfers hide behind its products.
    """
    if strategy == "gather":
        return Gather(call)
    fits = gathered_bytes(call.keys.total, dim, dtype) <= call.workspace
    if strategy == "auto" and len(call.ranks.levels) == 1 and fits:
        return Gather(call)
    return Ring(call)
