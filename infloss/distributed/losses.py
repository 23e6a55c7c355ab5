"""The door of the losses of a spread batch: checked, agreed on by all ranks, and reduced."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from infloss import checks, config, kernels
from infloss.distributed import header
from infloss.distributed.call import Call
from infloss.distributed.graph import pair_losses, sum_over_ranks
from infloss.distributed.header import Channel
from infloss.distributed.ranks import Ranks, check_device, of_group
from infloss.distributed.shards import Shards
from infloss.distributed.strategy import Strategy, choose
from infloss.inputs import poison, scale_tensor, to_common_dtype
from infloss.ops import PairLosses
from infloss.options import Options
from infloss.outputs import ContrastiveOutput, InfoNCEOutput


@torch.compiler.disable
def contrastive_loss(
    img: Tensor, txt: Tensor, logit_scale: float | Tensor, group: Any, options: Options
) -> Tensor | ContrastiveOutput:
    """:func:`infloss.contrastive_loss` of the batch that ``group`` shares."""
    ranks, channel = _team(group, options)

    def check() -> None:
        checks.pairs(img, txt, logit_scale, shard=True)
        options.check()
        _check_group(ranks, img.device, options)

    _attempt(channel, check)
    x, y = to_common_dtype(img, txt)
    call, strategy, _ = _agree(
        "contrastive_loss", ranks, channel, x, y, logit_scale, None, options, cols=True
    )
    out = pair_losses(x, y, scale_tensor(logit_scale, x), None, call, strategy)
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
    ranks, channel = _team(group, options)

    def check() -> None:
        checks.queries(query, key, target, logit_scale, shard=True)
        options.check()
        _check_group(ranks, query.device, options)

    _attempt(channel, check)
    x, y = to_common_dtype(query, key)
    call, strategy, ranges = _agree(
        "info_nce", ranks, channel, x, y, logit_scale, target, options, cols=False
    )
    if target is None:
        checks.implicit_target(call.rows.total, call.keys.total)
    for seen in ranges:
        checks.check_range(seen, call.keys.total)
    out = pair_losses(x, y, scale_tensor(logit_scale, x), target, call, strategy)
    losses = poison(out.row_nll, target, call.keys.total)
    loss, *accuracies = _reduce(losses, out, [out.row_hardest], call, options)
    if not options.return_stats:
        return loss
    return InfoNCEOutput(loss, out.row_lse, out.positive, accuracies[0], strategy.name)


def _team(group: Any, options: Options) -> tuple[Ranks, Channel | None]:
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


def _check_group(ranks: Ranks, device: torch.device, options: Options) -> None:
    check_device(ranks, device)
    if options.strategy == "gather" and len(ranks.levels) > 1:
        raise ValueError(
            f"strategy: expected 'ring' or 'auto' on a mesh of {len(ranks.levels)} dimensions, "
            "got 'gather', which needs one group"
        )


def _agree(
    name: str,
    ranks: Ranks,
    channel: Channel | None,
    x: Tensor,
    y: Tensor,
    logit_scale: float | Tensor,
    target: Tensor | None,
    options: Options,
    *,
    cols: bool,
) -> tuple[Call, Strategy, list[Any]]:
    """What all ranks agree on, the strategy, and the range of every rank's targets."""
    learned = [
        torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad
        for value in (x, y, logit_scale)
    ]
    workspace = config.get_workspace_limit()
    step: dict[str, Any] = {}
    own = {"rows": len(x), "keys": len(y), "range": checks.target_range(target)}
    headers: list[dict[str, Any]] = [own] * ranks.size
    if channel is not None:
        channel.calls += 1
        step = {"call": channel.calls, "loss": name}
        same = {
            **step,
            "pass": "forward",
            "features a row": x.size(1),
            "dtype": str(x.dtype).removeprefix("torch."),
            "device": x.device.type,
            "normalize": options.normalize,
            "reduction": options.reduction,
            "strategy": options.strategy,
            "grad_reduction": options.grad_reduction,
            "return_stats": options.return_stats,
            "target": "None" if target is None else "explicit",
            "requires_grad": learned,
            "logit_scale": "a tensor" if isinstance(logit_scale, Tensor) else logit_scale,
            "workspace": workspace,
        }
        headers = channel.agree(same, own)
    rows, keys = (Shards(tuple(one[side] for one in headers)) for side in ("rows", "keys"))
    if rows.total == 0 or keys.total == 0:
        raise ValueError(
            f"group: expected a batch with at least one row on each side, "
            f"got {rows.total} x {keys.total} over all {ranks.size} ranks"
        )
    call = Call(
        ranks=ranks,
        rows=rows,
        keys=keys,
        normalize=options.normalize,
        needs=(learned[0], learned[1], learned[2]),
        cols=cols,
        hardest=options.return_stats,
        workspace=workspace,
        path=config.requested_path(),
        precision=kernels.float32_precision(),
        factor=float(ranks.size) if options.grad_reduction == "mean" else 1.0,
        step=step,
        channel=channel,
    )
    strategy = choose(options.strategy, call, x.size(1), x.dtype)
    return call, strategy, [one["range"] for one in headers]


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
