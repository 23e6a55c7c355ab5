"""Collectives over shards of different sizes."""

import torch
import torch.distributed as dist
from torch import Tensor

from infloss.distributed.ranks import Ranks, explained
from infloss.distributed.shards import Shards
from infloss.portable import stats_dtype


def _padded(rows: Tensor, size: int) -> Tensor:
    if len(rows) == size:
        return rows
    return torch.cat((rows, rows.new_zeros((size - len(rows), *rows.shape[1:]))))


def gather_rows(rows: Tensor, shards: Shards, ranks: Ranks) -> Tensor:
    """The rows of all ranks: [total, ...]."""
    gathered = ranks.gather(_padded(rows, shards.largest).contiguous())
    if shards.are_even:
        return gathered.flatten(0, 1)
    return torch.cat([part[:size] for part, size in zip(gathered, shards.sizes, strict=True)])


def scatter_sum(rows: Tensor, shards: Shards, ranks: Ranks) -> Tensor:
    """Sum [total, ...] over the ranks; this rank's own rows, in the statistics' dtype."""
    # reduce_scatter_single is the later name, as in Ranks.gather
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    summed = rows.to(stats_dtype(rows.dtype))
    if not shards.are_even:
        parts = summed.split(shards.sizes)
        summed = torch.cat([_padded(part, shards.largest) for part in parts])
    summed = summed.contiguous()
    with explained("adding up gradients", ranks.rank, ranks.size):
        for level in ranks.levels:
            if level.size > 1:
                out = summed.new_empty((len(summed) // level.size, *summed.shape[1:]))
                reduce_scatter(out, summed, group=level.group)
                summed = out
    return summed[: shards.sizes[ranks.rank]]
