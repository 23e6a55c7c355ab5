"""What is measured at one shape: the inputs, the step that is timed, and how a failure reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from adapters import Loss, Peer
from common import Step
from oracle import Gradients, Oracle, affordable, make_oracle

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
UNCHECKED = "ok, gradient not checked"

_POSITIVE_LOGIT = 6.4
_PAIR_COSINE = 0.45
_CONE_MEAN = 3.0


class NotOnThisDevice(Exception):
    """A loss that has no code for the device of the run; the message is its table cell."""


@dataclass(frozen=True)
class Shape:
    """B pairs of D features in a dtype, on a device, at a logit scale."""

    batch: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward, 8 B^2 D: a product to see S, one to redo it, two for G."""
        return 8 * self.batch**2 * self.dim

    @property
    def forward_flops(self) -> int:
        """FLOPs of forward alone, 2 B^2 D."""
        return 2 * self.batch**2 * self.dim


@dataclass(frozen=True)
class Case:
    """Inputs of one kind at one shape, and their exact answer where that is affordable."""

    shape: Shape
    img: torch.Tensor
    txt: torch.Tensor
    oracle: Oracle | None


def make_inputs(shape: Shape, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeded ``[B, D]`` rows of random norm-sqrt(D) features, leaves that want gradients.

    "paired": unrelated rows are almost orthogonal; a pair's cosine is 0.45, or less at a large
    scale, so that its logit stays near 6.4 and the gradient does not vanish. "cone": the same plus
    a shared mean, which lifts the cosine of unrelated rows to 0.9, as real embeddings have it: the
    rows of dL/ds sum to almost nothing, so skipped or coarsely rounded small gradients show.
    """
    generator = torch.Generator(shape.device).manual_seed(shape.batch + shape.dim)

    def noise(rows: int) -> torch.Tensor:
        return torch.randn(rows, shape.dim, device=shape.device, generator=generator)

    cosine = min(_PAIR_COSINE, _POSITIVE_LOGIT / shape.scale)
    img = noise(shape.batch)
    txt = cosine * img + math.sqrt(1 - cosine**2) * noise(shape.batch)
    if kind == "cone":
        mean = _CONE_MEAN * noise(1)
        img += mean
        txt += mean
    return img.to(shape.dtype).requires_grad_(), txt.to(shape.dtype).requires_grad_()


def make_case(shape: Shape, kind: str) -> Case:
    """Inputs of ``kind`` and their oracle; without one where fp64 would take minutes."""
    img, txt = make_inputs(shape, kind)
    oracle = None
    if affordable(shape.batch, shape.dim, shape.device):
        oracle = make_oracle(img.detach(), txt.detach(), shape.scale)
    return Case(shape, img, txt, oracle)


def training_step(peer: Peer, loss: Loss, case: Case) -> Callable[[], Gradients]:
    """Forward and backward; the gradients are fresh tensors, nothing accumulates."""

    def step() -> Gradients:
        with peer.context():
            value = loss(case.img, case.txt, case.shape.scale)
            img, txt = torch.autograd.grad(value, (case.img, case.txt))
        return Gradients(value.detach(), img, txt)

    return step


def forward_step(peer: Peer, loss: Loss, case: Case) -> Step:
    """Forward alone, under ``torch.no_grad``."""

    def step() -> torch.Tensor:
        with peer.context(), torch.no_grad():
            return loss(case.img, case.txt, case.shape.scale)

    return step


def describe(error: Exception) -> str:
    """A failure in a few words: what a table cell can hold."""
    text = str(error).strip()
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return "out of memory"
    if isinstance(error, (TimeoutError, NotOnThisDevice)):
        return text
    if isinstance(error, ModuleNotFoundError):
        return f"not installed ({error.name})"
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first}"[:100].rstrip(": ")
