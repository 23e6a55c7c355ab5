"""Collectives over shards of different sizes."""

import torch
import torch.distributed as dist
from torch import Tensor

from infloss.distributed.ranks import Ranks
from infloss.distributed.shards import Shards
from infloss.portable import stats_dtype


def _padded(rows: Tensor, size: int) -> Tensor:
    if len(rows) == size:
        return rows
    return torch.cat((rows, rows.new_zeros((size - len(rows), *rows.shape[1:]))))


def gather_rows(rows: Tensor, shards: Shards, ranks: Ranks) -> Tensor:
    """The rows of all ranks: [total, ...]."""
    gathered = ranks.gather(_padded(rows, shards.largest).contiguous())
    if len(set(shards.sizes)) == 1:
        return gathered.flatten(0, 1)
    return torch.cat([part[:size] for part, size in zip(gathered, shards.sizes, strict=True)])


def scatter_sum(rows: Tensor, shards: Shards, ranks: Ranks) -> Tensor:
    """Sum [total, ...] over the ranks; this rank's own rows, in the statistics' dtype."""
    # reduce_scatter_single is the later name, as in Ranks.gather
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    largest, size = shards.largest, shards.sizes[ranks.rank]
    parts = [
        _padded(part, largest) for part in rows.to(stats_dtype(rows.dtype)).split(shards.sizes)
    ]
    summed = torch.cat(parts).contiguous()
    for level in ranks.levels:
        if level.size > 1:
            out = summed.new_empty((len(summed) // level.size, *summed.shape[1:]))
            reduce_scatter(out, summed, group=level.group)
            summed = out
    return summed[:size]
