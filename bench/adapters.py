"""The losses that are compared, each behind one signature: (img, txt, scale) -> loss.

img and txt are ``[B, D]`` rows as an encoder leaves them, not normalised; scale is a float; the
loss is the symmetric one, averaged over the batch. A library that wants normalised rows gets them
inside its adapter, so inside the timed region: its user pays for them too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Loss = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]

_CHUNK_ELEMENTS = 2**29


@dataclass(frozen=True)
class Peer:
    """A row of the table.

    ``build`` imports what it needs and returns the loss for a device (ImportError: not installed).
    ``quadratic_bytes`` holds the measured peak bytes per element of the B x B matrix by dtype;
    empty for a loss in O(B * D) memory. ``context`` surrounds each call, backward included.
    """

    name: str
    build: Callable[[torch.device], Loss]
    quadratic_bytes: dict[torch.dtype, int]
    ours: bool = False
    gpu_only: bool = False
    context: Callable[[], AbstractContextManager[object]] = nullcontext

    def predicted_bytes(self, batch: int, dtype: torch.dtype) -> int:
        """Bytes of B x B buffers that a step needs."""
        return batch * batch * self.quadratic_bytes.get(dtype, 0)


def dense_loss(img: torch.Tensor, txt: torch.Tensor, scale: float) -> torch.Tensor:
    """open_clip's maths: normalise, both logit matrices, two cross entropies.

    The cross entropies run in fp32 even for bf16 logits, as autocast runs them.
    """
    x, y = F.normalize(img, dim=-1), F.normalize(txt, dim=-1)
    target = torch.arange(len(x), device=x.device)
    per_image = (scale * x) @ y.T
    per_text = (scale * y) @ x.T
    return (
        F.cross_entropy(per_image.float(), target) + F.cross_entropy(per_text.float(), target)
    ) / 2


def dense_once_loss(img: torch.Tensor, txt: torch.Tensor, scale: float) -> torch.Tensor:
    """Dense with one logit matrix, read both ways: the faster one on a CPU."""
    logits = scale * F.normalize(img, dim=-1) @ F.normalize(txt, dim=-1).T
    target = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def _chunk_lse(similarity: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row ``[m]`` and column ``[B]`` log-sum-exp of a chunk ``[m, B]``, in fp32."""
    wide = similarity.float()
    return wide.logsumexp(1), wide.logsumexp(0)


def _chunk_gradient(
    similarity: torch.Tensor, row_lse: torch.Tensor, column_lse: torch.Tensor, start: int
) -> torch.Tensor:
    """2B dL/ds of the rows ``start ...`` of the similarity matrix, ``[m, B]`` in its dtype."""
    wide = similarity.float()
    rows = torch.arange(len(wide), device=wide.device)[:, None] + start
    columns = torch.arange(wide.shape[1], device=wide.device)
    both = torch.exp(wide - row_lse[:, None]) + torch.exp(wide - column_lse)
    return torch.where(rows == columns, both - 2, both).to(similarity.dtype)


class _ChunkedLoss(torch.autograd.Function):
    """What one writes by hand: library GEMMs on chunks of rows, recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, y: torch.Tensor, scale: float, lse: Callable, gradient: Callable
    ) -> torch.Tensor:
        batch = len(x)
        row_lse = torch.empty(batch, device=x.device, dtype=torch.float32)
        column_lse = torch.full_like(row_lse, -torch.inf)
        rows = max(1, min(batch, _CHUNK_ELEMENTS // batch))
        for start in range(0, batch, rows):
            part = slice(start, start + rows)
            row_lse[part], of_chunk = lse((scale * x[part]) @ y.T)
            column_lse = torch.logaddexp(column_lse, of_chunk)
        positive = scale * torch.linalg.vecdot(x.float(), y.float())
        ctx.save_for_backward(x, y, row_lse, column_lse)
        ctx.scale, ctx.rows, ctx.gradient = scale, rows, gradient
        return ((row_lse + column_lse) / 2 - positive).mean()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, y, row_lse, column_lse = ctx.saved_tensors
        factor = upstream[0] * (ctx.scale / (2 * len(x)))
        dx = torch.empty_like(x)
        dy = torch.zeros_like(y, dtype=torch.float32)
        for start in range(0, len(x), ctx.rows):
            part = slice(start, start + ctx.rows)
            similarity = (ctx.scale * x[part]) @ y.T
            pairs = ctx.gradient(similarity, row_lse[part], column_lse, start)
            dx[part] = (pairs @ y) * factor
            dy += pairs.T @ x[part]
        return dx, (dy * factor).to(y.dtype), None, None, None


def _build_dense(device: torch.device) -> Loss:
    return dense_loss


def _build_dense_once(device: torch.device) -> Loss:
    return dense_once_loss


def _build_compiled(device: torch.device) -> Loss:
    return torch.compile(dense_loss, dynamic=False)


def _build_chunked(device: torch.device) -> Loss:
    """The elementwise halves are compiled on a GPU, where they would dominate otherwise."""
    compile_ = torch.compile if device.type == "cuda" else lambda function: function
    lse, gradient = compile_(_chunk_lse), compile_(_chunk_gradient)

    def loss(img: torch.Tensor, txt: torch.Tensor, scale: float) -> torch.Tensor:
        x, y = F.normalize(img, dim=-1), F.normalize(txt, dim=-1)
        return _ChunkedLoss.apply(x, y, scale, lse, gradient)

    return loss


def _build_infloss(device: torch.device) -> Loss:
    infloss = importlib.import_module("infloss")
    return lambda img, txt, scale: infloss.contrastive_loss(img, txt, scale)


def _path(name: str) -> Callable[[], AbstractContextManager[object]]:
    return lambda: importlib.import_module("infloss").use_path(name)


def _build_memeff(device: torch.device) -> Loss:
    """memeff's CLIP loss; it normalises itself. ``stable=False`` asks for the true gradient."""
    module = importlib.import_module("memeff")

    def loss(img: torch.Tensor, txt: torch.Tensor, scale: float) -> torch.Tensor:
        return module.MemoryEfficientCLIPLoss(temperature=1 / scale, stable=False)(img, txt)

    return loss


def _build_inf_cl(device: torch.device) -> Loss:
    """Inf-CL's kernels on one GPU, one direction at a time; in fp32 with TF32 products."""
    one_way = importlib.import_module("inf_cl").cal_flash_loss

    def loss(img: torch.Tensor, txt: torch.Tensor, scale: float) -> torch.Tensor:
        x, y = F.normalize(img.float(), dim=-1), F.normalize(txt.float(), dim=-1)
        head_dim = min(256, x.shape[1] & -x.shape[1])
        forth = one_way(x, y, scale=scale, head_dim=head_dim).mean()
        return (forth + one_way(y, x, scale=scale, head_dim=head_dim).mean()) / 2

    return loss


def _build_cce(**options: Any) -> Callable[[torch.device], Loss]:
    """cut-cross-entropy with one tower as the classifier, both directions averaged."""

    def build(device: torch.device) -> Loss:
        one_way = importlib.import_module("cut_cross_entropy").linear_cross_entropy

        def loss(img: torch.Tensor, txt: torch.Tensor, scale: float) -> torch.Tensor:
            x, y = F.normalize(img, dim=-1), F.normalize(txt, dim=-1)
            target = torch.arange(len(x), device=x.device)
            forth = one_way(scale * x, y, target, **options)
            return (forth + one_way(scale * y, x, target, **options)) / 2

        return loss

    return build


_BF16, _FP32 = torch.bfloat16, torch.float32

PEERS = {
    peer.name: peer
    for peer in (
        Peer("infloss", _build_infloss, {}, ours=True),
        *(
            Peer(f"infloss:{path}", _build_infloss, {}, ours=True, context=_path(path))
            for path in ("portable", "sm80", "sm90")
        ),
        Peer("dense", _build_dense, {_BF16: 18, _FP32: 16}),
        Peer("dense-once", _build_dense_once, {_BF16: 18, _FP32: 16}),
        Peer("dense-compile", _build_compiled, {_BF16: 4, _FP32: 8}),
        Peer("chunked", _build_chunked, {}),
        Peer("memeff", _build_memeff, {}, gpu_only=True),
        Peer("inf-cl", _build_inf_cl, {}, gpu_only=True),
        Peer("cce", _build_cce(), {}, gpu_only=True),
        Peer("cce-exact", _build_cce(filter_eps=None), {}, gpu_only=True),
    )
}
DEFAULT_PEERS = tuple(name for name in PEERS if ":" not in name and name != "dense-once")
