"""The dense oracle and the tolerance rule that every path is tested against.

The oracle stores the whole M x N matrix, in the dtype it is given; autograd differentiates it. An
output of a path is held to

    ||out - exact|| <= 2 ||dense - exact|| + floor * ||exact||

with ``exact`` the oracle in float64 and without cancellation, and ``dense`` the oracle as a user
writes it, in float32 (float64 for float64 inputs) on the same inputs, cast to the output's dtype.
A scalar output has no norm to average its luck over: judge several draws of it as one vector.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from infloss.portable import NORM_FLOOR, stats_dtype

FLOORS = {
    torch.bfloat16: 1.5e-3,
    torch.float16: 4e-4,
    torch.float32: 2e-5,
    torch.float64: 1e-10,
}
FLOOR_FP32_HIGH = 2e-3


def normalize_rows(x: Tensor) -> Tensor:
    """Rows of unit length; a row with norm <= 1e-12 becomes zero, with zero gradient."""
    norm = torch.linalg.vector_norm(x.detach(), dim=1, keepdim=True)
    tiny = norm <= NORM_FLOOR
    safe = torch.where(tiny, 1.0, x)
    return torch.where(tiny, 0.0, safe / torch.linalg.vector_norm(safe, dim=1, keepdim=True))


def similarity(x: Tensor, y: Tensor, logit_scale: float | Tensor, normalize: bool) -> Tensor:
    """S = logit_scale * x y^T, [M, N]."""
    if normalize:
        x, y = normalize_rows(x), normalize_rows(y)
    return logit_scale * (x @ y.T)


def dense_nll(logits: Tensor, target: Tensor) -> Tensor:
    """What a user writes: cross entropy of stored logits [M, N], one value a row."""
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")


def exact_nll(logits: Tensor, target: Tensor) -> Tensor:
    """The same as log(1 + sum of exp(negative - positive)): no cancellation in value or gradient.

    Cross entropy loses the gradient of a well-matched pair, softmax - 1, even in float64.
    """
    positive = logits.gather(1, target[:, None])
    if logits.size(1) == 1:
        return (positive - positive).squeeze(1)
    negatives = logits.scatter(1, target[:, None], -torch.inf)
    gap = torch.logsumexp(negatives - positive, 1)
    return torch.logaddexp(torch.zeros_like(gap), gap)


def info_nce(
    query: Tensor,
    key: Tensor,
    target: Tensor | None = None,
    logit_scale: float | Tensor = 1 / 0.07,
    *,
    normalize: bool = True,
    nll: Callable[[Tensor, Tensor], Tensor] = dense_nll,
) -> Tensor:
    """Dense :func:`infloss.info_nce` with reduction "none": [M]."""
    if target is None:
        target = torch.arange(len(query), device=query.device) * (len(key) // len(query))
    return nll(similarity(query, key, logit_scale, normalize), target)


def contrastive_loss(
    img: Tensor,
    txt: Tensor,
    logit_scale: float | Tensor = 1 / 0.07,
    *,
    normalize: bool = True,
    nll: Callable[[Tensor, Tensor], Tensor] = dense_nll,
) -> Tensor:
    """Dense :func:`infloss.contrastive_loss` with reduction "none": [B]."""
    logits = similarity(img, txt, logit_scale, normalize)
    target = torch.arange(len(img), device=img.device)
    return (nll(logits, target) + nll(logits.T, target)) / 2


@dataclass(frozen=True)
class Deviation:
    """Distance of an output from the exact one beside what the rule allows."""

    error: float
    allowed: float
    size: float  # norm of the exact output

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed

    @property
    def relative(self) -> float:
        return self.error / self.size if self.size else self.error

    def __str__(self) -> str:
        return f"error {self.error:.3e}, allowed {self.allowed:.3e}, norm {self.size:.3e}"


def floor_of(dtype: torch.dtype) -> float:
    """The rule's floor for outputs from features of ``dtype`` under the precision in force."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return FLOOR_FP32_HIGH
    return FLOORS[dtype]


def deviation(out: Tensor, dense: Tensor, exact: Tensor, floor: float) -> Deviation:
    """Judge ``out``; ``dense`` is cast to its dtype, ``exact`` is float64.

    Not finite where ``exact`` is finite counts as an infinite error.
    """
    wide = out.detach().double()
    size = torch.linalg.vector_norm(exact).item()
    dense_error = torch.linalg.vector_norm(dense.detach().to(out.dtype).double() - exact).item()
    error = torch.linalg.vector_norm(wide - exact).item()
    if not torch.isfinite(wide).all():
        error = float("inf")
    return Deviation(error, 2 * dense_error + floor * size, size)


def oracle_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """(dtype of the dense comparison, dtype of the exact one) for features of ``dtype``."""
    return stats_dtype(dtype), torch.float64
