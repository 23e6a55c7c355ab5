"""nn.Module forms of the losses."""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from infloss import checks
from infloss.functional import DEFAULT_LOGIT_SCALE, contrastive_loss
from infloss.options import Options
from infloss.outputs import ContrastiveOutput


class ContrastiveLoss(nn.Module):
    """:func:`infloss.contrastive_loss` with its own, optionally learnable, logit scale.

    The scale is kept as its logarithm (state key ``log_logit_scale``, shape (), float32).

    Args:
        logit_scale: initial inverse temperature, positive.
        learnable: make the logarithm a parameter; otherwise a buffer.
        max_logit_scale: upper bound. While training, the parameter itself is brought back to the
            bound before it is used (Radford et al. 2021 use 100), so that its gradient stays true
            and it can come down again; in evaluation the scale is used as it is. None: no bound.
        normalize, reduction, group, strategy, grad_reduction, assume_even: see
            :func:`contrastive_loss`.

    Raises:
        TypeError: a scale that is no number, a flag that is no bool.
        ValueError: a scale that is not positive, an initial scale above the bound, an unknown
            string.
    """

    log_logit_scale: Tensor

    def __init__(
        self,
        logit_scale: float = DEFAULT_LOGIT_SCALE,
        *,
        learnable: bool = True,
        max_logit_scale: float | None = None,
        normalize: bool = True,
        reduction: str = "mean",
        group: Any = None,
        strategy: str = "auto",
        grad_reduction: str = "mean",
        assume_even: bool = False,
    ) -> None:
        super().__init__()
        checks.number("logit_scale", logit_scale)
        if not 0 < logit_scale <= checks.LARGEST_SCALE:
            raise ValueError(f"logit_scale: expected a positive number, got {logit_scale}")
        if max_logit_scale is not None:
            checks.number("max_logit_scale", max_logit_scale)
            if not max_logit_scale >= logit_scale:
                raise ValueError(
                    f"max_logit_scale: expected at least logit_scale = {logit_scale}, "
                    f"got {max_logit_scale}"
                )
        checks.flag("learnable", learnable)
        Options(normalize, reduction, strategy, grad_reduction, assume_even, False).check()
        log_scale = torch.tensor(math.log(logit_scale), dtype=torch.float32)
        if learnable:
            self.log_logit_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_logit_scale", log_scale)
        self.max_logit_scale = max_logit_scale
        self._log_bound = math.inf if max_logit_scale is None else math.log(max_logit_scale)
        self.normalize = normalize
        self.reduction = reduction
        self.group = group
        self.strategy = strategy
        self.grad_reduction = grad_reduction
        self.assume_even = assume_even

    @property
    def logit_scale(self) -> Tensor:
        """The inverse temperature in use, shape ()."""
        return self.log_logit_scale.exp()

    def forward(
        self, img: Tensor, txt: Tensor, *, return_stats: bool = False
    ) -> Tensor | ContrastiveOutput:
        """Loss of a batch; ``img`` and ``txt`` are [B, D]."""
        if self.max_logit_scale is not None and self.training:
            with torch.no_grad():
                self.log_logit_scale.clamp_(max=self._log_bound)
        return contrastive_loss(
            img,
            txt,
            self.logit_scale,
            normalize=self.normalize,
            reduction=self.reduction,
            group=self.group,
            strategy=self.strategy,
            grad_reduction=self.grad_reduction,
            assume_even=self.assume_even,
            return_stats=return_stats,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ContrastiveLoss":
        """A copy in the same group, which is no thing that could be copied."""
        memo[id(self.group)] = self.group
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate

    def extra_repr(self) -> str:
        learnable = isinstance(self.log_logit_scale, nn.Parameter)
        known = not self.log_logit_scale.is_meta
        scale = f"{self.logit_scale.item():.4g}" if known else "meta"
        return (
            f"logit_scale={scale}, learnable={learnable}, "
            f"max_logit_scale={self.max_logit_scale}, normalize={self.normalize}, "
            f"reduction={self.reduction!r}"
        )
