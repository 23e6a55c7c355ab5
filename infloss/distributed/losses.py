"""The door of the losses of a spread batch: checked, agreed on by all ranks, and reduced."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infloss import checks, config, kernels, paths
from infloss.distributed import header
from infloss.distributed.call import Call, Needs
from infloss.distributed.graph import global_pair_losses, sum_over_ranks
from infloss.distributed.header import Channel
from infloss.distributed.ranks import Ranks, check_device, of_group
from infloss.distributed.shards import Shards
from infloss.distributed.strategy import choose
from infloss.inputs import common_dtype, poison, scale_tensor, to_common_dtype
from infloss.ops import PairLosses
from infloss.options import Options
from infloss.outputs import ContrastiveOutput, InfoNCEOutput


@torch.compiler.disable
def contrastive_loss(
    img: Tensor, txt: Tensor, logit_scale: float | Tensor, group: Any, options: Options
) -> Tensor | ContrastiveOutput:
    """:func:`infloss.contrastive_loss` of the batch that ``group`` shares."""
    ranks, channel = _members(group, options)

    def check() -> None:
        checks.pairs(img, txt, logit_scale, shard=True)
        _check_call(ranks, img, txt, options)

    _attempt(channel, check)
    x, y = to_common_dtype(img, txt)
    asked = _Asked("contrastive_loss", x, y, logit_scale, None, options)
    call, _ = _agree(ranks, channel, asked, cols=True)
    strategy = choose(options.strategy, call, x.size(1), x.dtype)
    out = global_pair_losses(x, y, scale_tensor(logit_scale, x), None, call, strategy)
    losses = (out.row_nll + out.col_nll) * 0.5
    loss, *accuracies = _reduce(losses, out, [out.row_hardest, out.col_hardest], call, options)
    if not options.return_stats:
        return loss
    accuracy_img, accuracy_txt = accuracies
    return ContrastiveOutput(
        loss, out.row_lse, out.col_lse, out.positive, accuracy_img, accuracy_txt, strategy.name
    )


@torch.compiler.disable
def info_nce(
    query: Tensor,
    key: Tensor,
    target: Tensor | None,
    logit_scale: float | Tensor,
    group: Any,
    options: Options,
) -> Tensor | InfoNCEOutput:
    """:func:`infloss.info_nce` of the batch that ``group`` shares."""
    ranks, channel = _members(group, options)

    def check() -> None:
        checks.queries(query, key, target, logit_scale, shard=True)
        _check_call(ranks, query, key, options)

    _attempt(channel, check)
    x, y = to_common_dtype(query, key)
    asked = _Asked("info_nce", x, y, logit_scale, target, options)
    call, ranges = _agree(ranks, channel, asked, cols=False)
    if target is None:
        checks.implicit_target(call.rows.total, call.keys.total)
    for seen in ranges:
        checks.check_range(seen, call.keys.total)
    strategy = choose(options.strategy, call, x.size(1), x.dtype)
    out = global_pair_losses(x, y, scale_tensor(logit_scale, x), target, call, strategy)
    losses = poison(out.row_nll, target, call.keys.total)
    loss, *accuracies = _reduce(losses, out, [out.row_hardest], call, options)
    if not options.return_stats:
        return loss
    return InfoNCEOutput(loss, out.row_lse, out.positive, accuracies[0], strategy.name)


def _members(group: Any, options: Options) -> tuple[Ranks, Channel | None]:
    """The ranks, and their channel unless the caller promised that they agree."""
    ranks = of_group(group)
    checks.flag("assume_even", options.assume_even)
    return ranks, None if options.assume_even or ranks.size == 1 else header.channel(ranks)


def _attempt(channel: Channel | None, check: Callable[[], None]) -> None:
    """Run local checks; with a channel, a failure becomes every rank's."""
    if channel is None:
        check()
    else:
        channel.attempt(check)


def _check_call(ranks: Ranks, x: Tensor, y: Tensor, options: Options) -> None:
    """Raise for options, group or path that cannot be; the features have been checked."""
    options.check()
    check_device(ranks, x.device)
    paths.resolve(config.requested_path(), common_dtype(x, y), x.device)
    if options.strategy == "gather" and len(ranks.levels) > 1:
        raise ValueError(
            f"strategy: expected 'ring' or 'auto' on a mesh of {len(ranks.levels)} dimensions, "
            "got 'gather', which needs one group"
        )


@dataclass(frozen=True)
class _Asked:
    """What this rank asks for."""

    loss: str
    x: Tensor
    y: Tensor
    logit_scale: float | Tensor
    target: Tensor | None
    options: Options

    @property
    def needs(self) -> Needs:
        """Which of the gradients by rows, columns and logit_scale are wanted."""
        x, y, scale = (
            torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad
            for value in (self.x, self.y, self.logit_scale)
        )
        return x, y, scale

    def same(self) -> dict[str, Any]:
        """The part of the header that all ranks share."""
        scale = self.logit_scale
        need_x, need_y, need_scale = self.needs
        names = ("img", "txt") if self.loss == "contrastive_loss" else ("query", "key")
        return {
            "pass": "forward",
            "features a row": self.x.size(1),
            "dtype": str(self.x.dtype).removeprefix("torch."),
            "device": self.x.device.type,
            "normalize": self.options.normalize,
            "reduction": self.options.reduction,
            "strategy": self.options.strategy,
            "grad_reduction": self.options.grad_reduction,
            "return_stats": self.options.return_stats,
            "target": "None" if self.target is None else "explicit",
            f"{names[0]}.requires_grad": need_x,
            f"{names[1]}.requires_grad": need_y,
            "logit_scale.requires_grad": need_scale,
            "logit_scale": "a tensor" if isinstance(scale, Tensor) else float(scale),
            "workspace limit": config.get_workspace_limit(),
        }

    def own(self) -> dict[str, Any]:
        """The part that ranks may differ in."""
        return {
            "rows": len(self.x),
            "keys": len(self.y),
            "range": checks.target_range(self.target),
        }


def _agree(
    ranks: Ranks, channel: Channel | None, asked: _Asked, *, cols: bool
) -> tuple[Call, list[Any]]:
    """What all ranks agree on, and the range of every rank's targets."""
    step: dict[str, Any] = {}
    headers = [asked.own()] * ranks.size
    if channel is not None:
        channel.calls += 1
        step = {"call": channel.calls, "loss": asked.loss}
        headers = channel.agree({**step, **asked.same()}, asked.own())
    rows, keys = (Shards(tuple(one[side] for one in headers)) for side in ("rows", "keys"))
    if rows.total == 0 or keys.total == 0:
        raise ValueError(
            f"group: expected a batch with at least one row on each side, "
            f"got {rows.total} x {keys.total} over all {ranks.size} ranks"
        )
    options = asked.options
    call = Call(
        ranks=ranks,
        rows=rows,
        keys=keys,
        normalize=options.normalize,
        needs=asked.needs,
        cols=cols,
        hardest=options.return_stats,
        workspace=config.get_workspace_limit(),
        path=config.requested_path(),
        precision=kernels.float32_precision(),
        factor=float(ranks.size) if options.grad_reduction == "mean" else 1.0,
        step=step,
        channel=channel,
    )
    return call, [one["range"] for one in headers]


def _reduce(
    losses: Tensor, out: PairLosses, hardest: list[Tensor], call: Call, options: Options
) -> tuple[Tensor, ...]:
    """The loss as asked for and, with stats, the accuracy of each direction in the whole batch."""
    hits = [out.positive > other for other in hardest] if options.return_stats else []
    if options.reduction == "none" and not hits:
        return (losses,)
    # float64 counts beyond 2^24 rows
    own = torch.stack([value.sum(dtype=torch.float64) for value in (losses, *hits)])
    total, *correct = sum_over_ranks(own, call.ranks).unbind()
    accuracies = (count.detach().to(losses.dtype) / call.rows.total for count in correct)
    if options.reduction == "none":
        return losses, *accuracies
    loss = total / call.rows.total if options.reduction == "mean" else total
    return loss.to(losses.dtype), *accuracies
