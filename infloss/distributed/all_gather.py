"""A differentiable all-gather, for users who build their own loss."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infloss import checks
from infloss.distributed import header
from infloss.distributed.collect import gather_rows, scatter_sum
from infloss.distributed.ranks import Ranks, check_device, of_group
from infloss.distributed.shards import Shards


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, shards: Shards, ranks: Ranks, factor: float) -> Tensor:
        ctx.arguments = (shards, ranks, factor)
        gathered = gather_rows(rows, shards, ranks)
        # one of its own, for the caller to edit: neither a view nor, of one rank, the input
        return gathered.clone() if gathered._is_view() or ranks.size == 1 else gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _ScatterSum.apply(grad, *ctx.arguments), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, shards: Shards, ranks: Ranks, factor: float) -> Tensor:
        ctx.arguments = (shards, ranks, factor)
        return (scatter_sum(rows, shards, ranks) * factor).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        factor = ctx.arguments[2]
        return _AllGather.apply(grad * factor, *ctx.arguments), None, None, None


def _world() -> Any:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("group: expected torch.distributed to be initialised, got None without it")
    return dist.group.WORLD


@torch.compiler.disable
def all_gather(tensor: Tensor, group: Any = None, *, grad_reduction: str = "mean") -> Tensor:
    """The rows of all ranks of a group, in their order, with the gradient that belongs to them.

    Let F_q be what rank q computes from its copy: the same loss of the whole batch on every rank,
    or that of its own rows. With gradients that the trainer averages over the ranks
    (``grad_reduction="mean"``), and with those that it adds up ("sum"), training follows the
    gradient of the mean of all F_q; a factor W, or 1/W, is never needed. Backward is one
    reduce-scatter; the incoming gradient is left as it is. Shards may differ in size. Parameters
    used after the gather have a whole gradient on every rank, which is to be averaged either way.

    Args:
        tensor: [b, ...]; all dimensions but the first, and the dtype, the same everywhere.
        group: a ProcessGroup or a DeviceMesh; None: all ranks of the world.
        grad_reduction: "mean" or "sum": what the trainer does with gradients over ranks.

    Returns:
        [sum of all b, ...] in ``tensor``'s dtype.

    Raises:
        TypeError, ValueError: of a wrong argument; ranks that disagree all raise the same one.
        RuntimeError: a rank has stopped.
    """
    ranks = of_group(_world() if group is None else group)
    channel = header.channel(ranks)

    def check() -> None:
        checks.dense("tensor", tensor)
        if tensor.dim() == 0:
            raise ValueError("tensor: expected at least one dimension, got shape []")
        checks.one_of("grad_reduction", grad_reduction, checks.GRAD_REDUCTIONS)
        check_device(ranks, tensor.device)

    channel.attempt(check)
    channel.calls += 1
    same = {
        "call": channel.calls,
        "loss": "all_gather",
        "shape of a row": list(tensor.shape[1:]),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": tensor.device.type,
        "grad_reduction": grad_reduction,
        "requires_grad": torch.is_grad_enabled() and tensor.requires_grad,
    }
    headers = channel.agree(same, {"rows": len(tensor)})
    shards = Shards(tuple(one["rows"] for one in headers))
    factor = 1.0 if grad_reduction == "mean" else 1 / ranks.size
    gathered: Tensor = _AllGather.apply(tensor, shards, ranks, factor)
    return gathered
