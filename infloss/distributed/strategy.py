"""How S is covered: the strategies, and which one "auto" takes."""

from typing import Protocol

import torch
from torch import Tensor

from infloss.distributed.call import Call, Coefficients
from infloss.distributed.gather import Gather
from infloss.distributed.ring import Ring
from infloss.distributed.statistics import Statistics
from infloss.portable import stats_dtype


class Strategy(Protocol):
    """Covers S of all ranks: b rows of each against N columns in all.

    Every rank calls; each method communicates, and raises RuntimeError where a rank has stopped.
    """

    name: str

    def columns(self, y: Tensor) -> Tensor:
        """From this rank's columns [n, D], what is kept for both passes: [n, D] or [N, D]."""
        ...

    def lse(self, x: Tensor, y: Tensor, logit_scale: Tensor, target: Tensor | None) -> Statistics:
        """Statistics of this rank's rows over all columns, and of its columns over all rows.

        ``x`` is [b, D], ``y`` what :meth:`columns` gave, ``target`` [b] int64 columns of N or None.
        """
        ...

    def grad(
        self,
        x: Tensor,
        y: Tensor,
        logit_scale: Tensor,
        target: Tensor | None,
        coefficients: Coefficients,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this rank's rows [b, D] and columns [n, D], and its part [] of the scale's.

        Those of the features in their dtype; of what is not needed, anything.
        """
        ...


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
    columns = call.ranks.size * call.keys.largest  # collectives pad every shard to the largest
    fits = gathered_bytes(columns, dim, dtype) <= call.workspace
    if strategy == "auto" and len(call.ranks.levels) == 1 and fits:
        return Gather(call)
    return Ring(call)
