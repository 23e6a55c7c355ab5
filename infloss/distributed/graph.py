"""The autograd Functions of a spread batch."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from infloss.distributed.call import Call, Coefficients
from infloss.distributed.ranks import Ranks
from infloss.distributed.strategy import Strategy
from infloss.ops import PairLosses, log_mean_exp, log_sum_exp, nll, typical_cosine


def _centre(call: Call, row_stats: Tensor, logit_scale: Tensor) -> Tensor:
    """The typical cosine of all rows: rows and columns of G sum to zero only over all ranks."""
    own = log_mean_exp(row_stats, call.keys.total).sum()
    return typical_cosine(call.ranks.gather(own).sum() / call.rows.total, logit_scale)


class _OnceDifferentiable(torch.autograd.Function):
    """A gradient whose own derivative raises, where autograd would take it for a constant."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise NotImplementedError("second derivatives of the contrastive loss are not implemented")


class _GlobalLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        logit_scale: Tensor,
        target: Tensor | None,
        call: Call,
        strategy: Strategy,
    ) -> tuple[Tensor, ...]:
        columns = strategy.columns(y)
        found = strategy.lse(x, columns, logit_scale, target)
        row_stats, col_stats, positive = found.row_stats, found.col_stats, found.positive
        extras = (
            log_sum_exp(row_stats),
            log_sum_exp(col_stats),
            positive,
            found.row_hardest,
            found.col_hardest,
        )
        ctx.mark_non_differentiable(*extras)
        centre = _centre(call, row_stats, logit_scale) if call.needs[2] else None
        ctx.save_for_backward(
            x, columns, logit_scale, target, row_stats, col_stats if call.cols else None, centre
        )
        ctx.call, ctx.strategy = call, strategy
        col_nll = nll(col_stats, positive) if call.cols else positive.new_empty(0)
        return nll(row_stats, positive), col_nll, *extras

    @staticmethod
    def backward(ctx: Any, *weights: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        call: Call = ctx.call
        x, columns, logit_scale, target, row_stats, col_stats, centre = ctx.saved_tensors
        call.confirm_backward()
        row_weight = weights[0] * call.factor
        col_weight = weights[1] * call.factor if call.cols else None
        coefficients = Coefficients(
            row_stats,
            row_weight,
            col_stats,
            col_weight,
            row_weight if col_weight is None else row_weight + col_weight,
            centre,
        )
        with torch.no_grad():
            gradients = ctx.strategy.grad(x, columns, logit_scale, target, coefficients)
        sources = (x, columns, logit_scale, *weights)
        return (
            *(
                _OnceDifferentiable.apply(gradient, *sources) if need else None
                for gradient, need in zip(gradients, call.needs, strict=True)
            ),
            None,
            None,
            None,
        )


def global_pair_losses(
    x: Tensor,
    y: Tensor,
    logit_scale: Tensor,
    target: Tensor | None,
    call: Call,
    strategy: Strategy,
) -> PairLosses:
    """This rank's part of :func:`infloss.ops.pair_losses` over the whole batch, differentiable."""
    return PairLosses(*_GlobalLosses.apply(x, y, logit_scale, target, call, strategy))


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks) -> Tensor:
        return ranks.gather(own).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def sum_over_ranks(own: Tensor, ranks: Ranks) -> Tensor:
    """The same sum on every rank; a rank's gradient is that of its own part."""
    return _SumOverRanks.apply(own, ranks)
