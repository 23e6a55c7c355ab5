"""The processes that share each batch: who they are, which rows each holds, what they exchange.

Under torchrun a run draws the same batches, pictures and dropout masks, and normalises by the same
statistics, as it does in one process. So its losses are those of one process but for rounding.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Rows:
    """The rows of a batch, or of a chunk of one, that this rank holds."""

    own: np.ndarray  # [n] int64, ascending
    total: int

    def repeat_interleave(self, copies: int) -> "Rows":
        """The rows held once every row has become ``copies`` consecutive ones."""
        own = self.own[:, None] * copies + np.arange(copies)
        return Rows(own.ravel(), self.total * copies)


def join(chunks: Sequence[Rows]) -> Rows:
    """Rows held of a batch, from those held of each of its chunks."""
    starts = np.cumsum([0, *(chunk.total for chunk in chunks)])
    own = [start + chunk.own for start, chunk in zip(starts, chunks, strict=False)]
    return Rows(np.concatenate(own), int(starts[-1]))


@dataclass(frozen=True)
class World:
    """This process's place among those that share each batch; alone unless torchrun started it."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that prints, evaluates and writes files."""
        return self.rank == 0

    @property
    def group(self) -> Any:
        """What ``infloss`` takes as ``group``."""
        return dist.group.WORLD if self.size > 1 else None

    def shares(self, total: int, size: int) -> list[Rows]:
        """This rank's contiguous share of every chunk of ``size`` rows; uneven where it must be."""
        lengths = [min(size, total - start) for start in range(0, total, size)]
        bounds = [[n * rank // self.size for rank in (self.rank, self.rank + 1)] for n in lengths]
        return [Rows(np.arange(*own), n) for own, n in zip(bounds, lengths, strict=True)]

    def data_parallel(self, module: nn.Module) -> nn.Module:
        """``module`` with gradients averaged over ranks; itself in a world of one."""
        return DistributedDataParallel(module) if self.size > 1 else module

    def mean(self, values: Tensor) -> float:
        """Mean of ``values`` over all ranks, each of which holds any number of them."""
        totals = torch.stack(
            [values.detach().double().sum(), values.new_tensor(len(values)).double()]
        )
        if self.size > 1:
            dist.all_reduce(totals)
        return (totals[0] / totals[1]).item()


@contextmanager
def start(device: str) -> Iterator[World]:
    """The world that torchrun describes in the environment, over gloo or NCCL; else one process.

    On CUDA each rank takes the GPU of its local rank. An error leaves at once, without the goodbye
    that ranks in the middle of an exchange would wait for: torchrun ends the others.

    Raises:
        ValueError: there are fewer GPUs than ranks on this node.
    """
    described = all(name in os.environ for name in TORCHRUN)
    rank, size, local = (int(os.environ[name]) for name in TORCHRUN) if described else (0, 1, 0)
    place = torch.device(device)
    if size == 1:
        yield World(place)
        return
    if place.type == "cuda":
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local}: expected a GPU for each rank of a node, "
                f"got {torch.cuda.device_count()}"
            )
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=place)
    else:
        dist.init_process_group("gloo")
    yield World(place, rank, size)
    dist.destroy_process_group()


class _Sum(torch.autograd.Function):
    """Sum over ranks. Each rank's loss depends on it, so its gradient is summed as well."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class BatchNorm2d(nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` by the statistics of all ranks' rows.

    Statistics of a shard would make another model of it. ``nn.SyncBatchNorm`` does this on GPUs
    alone; here two sums over ranks do, on any device and for shards of any size.
    """

    num_batches_tracked: Tensor
    running_mean: Tensor
    running_var: Tensor
    momentum: float

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return super().forward(x)
        sums = torch.cat([x.sum((0, 2, 3)), x.new_tensor([x.numel() // x.size(1)])])
        sums = _Sum.apply(sums)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = x - mean[:, None, None]
        variance = _Sum.apply(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        factor = self.weight * (variance + self.eps).rsqrt()
        return centred * factor[:, None, None] + self.bias[:, None, None]


class Dropout(nn.Dropout):
    """:class:`torch.nn.Dropout` that draws for a whole batch and keeps this rank's rows."""

    def forward(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """[n, ...] -> [n, ...]; ``rows`` None: all rows are here."""
        if rows is None or not self.training:
            return super().forward(x)
        whole = F.dropout(x.new_ones(rows.total, *x.shape[1:]), self.p)
        return x * whole[torch.from_numpy(rows.own).to(x.device)]
