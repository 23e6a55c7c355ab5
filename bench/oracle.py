"""What a benchmarked loss is checked against: the exact gradient in fp64, in row chunks.

The rule for infloss is the project's contract, ``infloss.reference.deviation``, with the same
chunked maths in true fp32 products as the dense comparison: at these sizes nothing dense fits. A
peer may be ``PEER_LIMIT`` off, which tells a coarser rounding of the same function from another
function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from infloss.reference import Deviation, deviation, floor_of

PEER_LIMIT = {torch.bfloat16: 5e-2, torch.float32: 5e-3}

_CHUNK_BYTES = {"cuda": 2**30, "cpu": 2**27}
_AFFORDABLE_FLOPS = {"cuda": 2e14, "cpu": 4e11}


@dataclass(frozen=True)
class Gradients:
    """A loss (0-d) and its gradients by img and txt ([B, D] each)."""

    loss: torch.Tensor
    img: torch.Tensor
    txt: torch.Tensor


@dataclass(frozen=True)
class Errors:
    """Relative errors, |loss - loss64| / |loss64| and the larger Frobenius of both gradients, and
    whether both gradients keep the contract."""

    loss: float
    gradient: float
    within_contract: bool


@dataclass(frozen=True)
class Oracle:
    """The exact answer for one pair of inputs, and what fp32 products make of it."""

    exact: Gradients
    fp32: Gradients

    def errors(self, got: Gradients) -> Errors:
        """Errors of ``got`` against fp64."""
        floor = floor_of(got.img.dtype)

        def judge(name: str) -> Deviation:
            out, fp32, exact = (getattr(g, name) for g in (got, self.fp32, self.exact))
            return deviation(out, fp32, exact, floor)

        sides = judge("img"), judge("txt")
        return Errors(
            loss=judge("loss").relative,
            gradient=max(side.relative for side in sides),
            within_contract=all(side.ok for side in sides),
        )


def affordable(batch: int, dim: int, device: torch.device) -> bool:
    """Whether fp64 on this kind of device takes seconds (8 B^2 D FLOPs), not minutes."""
    return 8.0 * batch * batch * dim <= _AFFORDABLE_FLOPS[device.type]


def make_oracle(img: torch.Tensor, txt: torch.Tensor, scale: float) -> Oracle:
    """Solve ``[B, D]`` inputs exactly, at a logit scale of ``scale``, in O(B * D) memory."""
    exact = chunked_gradients(img, txt, scale, torch.float64)
    with matmul_precision("highest"):
        single = chunked_gradients(img, txt, scale, torch.float32)
    rounded = Gradients(single.loss, single.img.to(img.dtype), single.txt.to(txt.dtype))
    return Oracle(exact, rounded)


def chunked_gradients(
    img: torch.Tensor, txt: torch.Tensor, scale: float, dtype: torch.dtype
) -> Gradients:
    """The symmetric loss of normalised rows and its gradients, computed in ``dtype``.

    With x, y the unit rows, s = scale x y^T, r and c its log-sum-exps by row and by column:
    L = mean_i[(r_i + c_i) / 2 - s_ii], dL/ds = (exp(s - r) + exp(s - c)) / 2B - I / B, and a unit
    row's gradient g passes to the row u x of norm u as (g - <g, x> x) / u.
    """
    batch = img.shape[0]
    x, img_norm = _unit_rows(img.to(dtype))
    y, txt_norm = _unit_rows(txt.to(dtype))
    rows = max(1, _CHUNK_BYTES[img.device.type] // (batch * x.element_size()))
    parts = [slice(i, min(i + rows, batch)) for i in range(0, batch, rows)]

    row_lse = x.new_empty(batch)
    column_lse = x.new_full((batch,), -torch.inf)
    for part in parts:
        similarity = scale * (x[part] @ y.T)
        row_lse[part] = similarity.logsumexp(1)
        column_lse = torch.logaddexp(column_lse, similarity.logsumexp(0))
    positive = scale * (x * y).sum(1)
    loss = ((row_lse + column_lse) / 2 - positive).mean()

    dx, dy = torch.empty_like(x), torch.zeros_like(y)
    for part in parts:
        similarity = scale * (x[part] @ y.T)
        gradient = torch.exp(similarity - row_lse[part, None])
        gradient += similarity.sub_(column_lse).exp_()
        gradient.diagonal(part.start).sub_(2)
        gradient *= scale / (2 * batch)
        dx[part] = gradient @ y
        dy += gradient.T @ x[part]
    return Gradients(loss, _through_norm(dx, x, img_norm), _through_norm(dy, y, txt_norm))


def _unit_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    norm = x.norm(dim=1, keepdim=True)
    return x / norm, norm


def _through_norm(grad: torch.Tensor, unit: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return (grad - (grad * unit).sum(1, keepdim=True) * unit) / norm


@contextmanager
def matmul_precision(value: str) -> Iterator[None]:
    """Torch's precision of fp32 products for the context: "highest", "high" or "medium"."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
