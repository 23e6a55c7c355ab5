"""What the tests share: batches, a step of ours and of the dense oracles, and the judgement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import infloss
from infloss import portable, reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ("unrelated", "weak", "identical", "cone.9", "cone.99", "rolled", "rolled cone.99")
SCALES = (0.1, 14.3, 100.0, 1000.0)
DRAWS = 8  # independent draws that an output of few values is judged over, at least
FEW = 64

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def name(value: object) -> str | None:
    """Short test ids for dtypes."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal values on the CPU, drawn in float64 so that dtypes share their values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=1, keepdim=True)


def features(
    kind: str, rows: int, keys: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """[rows, dim] and [keys, dim] unit rows; row i's positive is key i * (keys // rows).

    Kinds: "unrelated", "weak" (positives share a fifth of the row), "identical", "cone.9" and
    "cone.99" (all rows share a mean; cosines near 0.9, 0.99); "rolled" before "cone..." or alone
    (then of "identical") moves every positive on by one, so that another key fits better.
    """
    x, y = normal(rows, dim, seed=2 * seed), normal(keys, dim, seed=2 * seed + 1)
    x, y = x.double(), y.double()
    positives = torch.arange(rows) * (keys // rows)
    base = kind.removeprefix("rolled").strip() or "identical"
    if base == "weak":
        y[positives] += 0.3 * x
    elif base == "identical":
        y[positives] = x
    elif base.startswith("cone"):
        cosine = float(base.removeprefix("cone"))
        mean = (cosine / (1 - cosine)) ** 0.5 * normal(1, dim, seed=1000 + seed).double()
        x, y = x + mean, y + mean
    elif base != "unrelated":
        raise ValueError(kind)
    if kind.startswith("rolled"):
        x = x.roll(1, 0)
    return unit(x).to(dtype), unit(y).to(dtype)


# name -> (shape of the base for a [B, D] view, the view)
LAYOUTS: dict[str, tuple[Callable[[int, int], tuple[int, int]], Callable[[Tensor], Tensor]]] = {
    "transposed": (lambda b, d: (d, b), lambda base: base.T),
    "every other row": (lambda b, d: (2 * b, d), lambda base: base[::2]),
    "every other column": (lambda b, d: (b, 2 * d), lambda base: base[:, ::2]),
    "leading columns": (lambda b, d: (b, d + 5), lambda base: base[:, :-5]),
    "trailing columns": (lambda b, d: (b, d + 3), lambda base: base[:, 3:]),
    "one row expanded": (lambda b, d: (1, d), lambda base: base),
    "one column expanded": (lambda b, d: (b, 1), lambda base: base),
}


def laid_out(
    layout: str, rows: int, dim: int, seed: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[rows, dim] multiples of 1/4 with the named strides, laid out on the device itself."""
    shape, view = LAYOUTS[layout]
    base = normal(*shape(rows, dim), seed=seed).mul(4).round().div(4)
    return view(base.to(device, dtype)).expand(rows, dim)


def inverse_norms(x: Tensor) -> Tensor:
    """What infloss::inv_norm gives for [M, D]: [M]."""
    out = torch.empty(len(x), dtype=portable.stats_dtype(x.dtype), device=x.device)
    torch.ops.infloss.inv_norm(x, out)
    return out


class Outputs(NamedTuple):
    """What a training step takes from a loss; None where a side is frozen."""

    loss: Tensor
    dx: Tensor
    dy: Tensor
    dscale: Tensor


def step(
    loss_fn: Loss,
    x: Tensor,
    y: Tensor,
    scale: float | Tensor,
    upstream: float | Tensor = 1.0,
    frozen: str = "",
) -> Outputs:
    """Loss and gradients of ``sum(upstream * loss)``; inputs keep their strides.

    ``frozen`` names the sides, of "x" and "y", that are not learned.
    """
    x = x.detach().requires_grad_("x" not in frozen)
    y = y.detach().requires_grad_("y" not in frozen)
    dtype = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    scale = torch.as_tensor(scale, dtype=dtype, device=x.device).detach().clone().requires_grad_()
    loss = loss_fn(x, y, scale)
    (loss * upstream).sum().backward()
    return Outputs(loss.detach(), x.grad, y.grad, scale.grad)


def captured_step(
    loss_fn: Loss, leaves: tuple[Tensor, Tensor, Tensor]
) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """A CUDA graph of a loss and its gradients by its leaves, and what a replay of it writes."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):  # loads what a first call loads
        torch.autograd.grad(loss_fn(*leaves), leaves)
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = loss_fn(*leaves)
        gradients = torch.autograd.grad(loss, leaves)
    return graph, Outputs(loss.detach(), *gradients)


def peak_beyond(x: Tensor, y: Tensor, *, backward: bool = True) -> int:
    """Bytes that a call on a GPU needs beyond its features and their gradients."""
    sides = [side.detach().requires_grad_(backward) for side in (x, y)]
    scale = torch.tensor(14.3, device=x.device, requires_grad=backward)
    torch.cuda.synchronize(x.device)
    torch.cuda.reset_peak_memory_stats(x.device)
    before = torch.cuda.memory_allocated(x.device)
    loss = infloss.contrastive_loss(*sides, scale)
    if backward:
        loss.backward()
    gradients = sum(side.numel() * side.element_size() for side in sides) if backward else 0
    return torch.cuda.max_memory_allocated(x.device) - before - gradients


def symmetric(x: Tensor, y: Tensor, scale: float | Tensor, **options: Any) -> Tensor:
    """``contrastive_loss`` under the signature that :func:`info_nce` shares."""
    return infloss.contrastive_loss(x, y, scale, **options)


def one_way(x: Tensor, y: Tensor, scale: float | Tensor, **options: Any) -> Tensor:
    """``info_nce`` with logit_scale third; ``target`` by keyword."""
    return infloss.info_nce(x, y, logit_scale=scale, **options)


LOSSES = (symmetric, one_way)


@dataclass(frozen=True)
class Case:
    """One loss on one batch: what ours and the two oracles run on."""

    x: Tensor
    y: Tensor
    scale: float = 14.3
    one_way: bool = False  # info_nce; otherwise contrastive_loss
    target: Tensor | None = None
    normalize: bool = True
    reduction: str = "mean"
    upstream: float | Tensor | None = None  # None: 4096 for float16, otherwise 1
    frozen: str = ""  # sides that are not learned, of "x" and "y"

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.x.dtype, self.y.dtype)

    @property
    def factor(self) -> float | Tensor:
        if self.upstream is not None:
            return self.upstream
        return 4096.0 if torch.float16 in (self.x.dtype, self.y.dtype) else 1.0

    def to(self, device: torch.device) -> Case:
        target = None if self.target is None else self.target.to(device)
        upstream = self.upstream.to(device) if isinstance(self.upstream, Tensor) else self.upstream
        x, y = self.x.to(device), self.y.to(device)
        return replace(self, x=x, y=y, target=target, upstream=upstream)

    def ours(self) -> Outputs:
        def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
            options: dict[str, Any] = {"normalize": self.normalize, "reduction": self.reduction}
            if self.one_way:
                return infloss.info_nce(x, y, self.target, scale, **options)
            return infloss.contrastive_loss(x, y, scale, **options)

        return step(loss, self.x, self.y, self.scale, self.factor, self.frozen)

    def dense(self) -> Outputs:
        """The oracle as a user writes it, with true float32 products."""
        with matmul_precision("highest"):
            return self._oracle(reference.oracle_dtypes(self.dtype)[0], reference.dense_nll)

    def exact(self) -> Outputs:
        return self._oracle(reference.oracle_dtypes(self.dtype)[1], reference.exact_nll)

    def _oracle(self, dtype: torch.dtype, nll: Callable[[Tensor, Tensor], Tensor]) -> Outputs:
        def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
            options: dict[str, Any] = {"normalize": self.normalize, "nll": nll}
            if self.one_way:
                losses = reference.info_nce(x, y, self.target, scale, **options)
            else:
                losses = reference.contrastive_loss(x, y, scale, **options)
            return losses if self.reduction == "none" else getattr(losses, self.reduction)()

        return step(loss, self.x.to(dtype), self.y.to(dtype), self.scale, self.factor, self.frozen)


def assert_close(label: str, out: Tensor, dense: Tensor, exact: Tensor, floor: float) -> None:
    """Hold one output to the tolerance rule."""
    judged = reference.deviation(out, dense, exact.detach().double(), floor)
    assert judged.ok, f"{label}: {judged}"


def assert_exact(cases: Sequence[Case], device: torch.device, *, scalars: bool = True) -> None:
    """Hold every output of every case to the tolerance rule.

    Outputs of at least ``FEW`` values are judged one by one. A scalar, or a handful of values, has
    no norm to average its luck over: those are judged as one vector over the cases, of which at
    least ``DRAWS`` are needed. ``scalars=False`` leaves scalars out.
    """
    cases = [case.to(device) for case in cases]
    runs = [(case.ours(), case.dense(), case.exact()) for case in cases]
    floor = reference.floor_of(cases[0].dtype)
    sources = {"dx": cases[0].x.dtype, "dy": cases[0].y.dtype}
    for label in Outputs._fields:
        if getattr(runs[0][0], label) is None:  # of a frozen side
            continue
        # (ours, dense, exact) of this output, one of each a case
        triples = [tuple(getattr(outputs, label).reshape(-1) for outputs in run) for run in runs]
        size = triples[0][0].numel()
        if size == 1 and not scalars:
            continue
        if size < FEW:
            assert len(cases) >= DRAWS, f"{label}: a handful of values needs more draws"
            triples = [tuple(torch.cat(vectors) for vectors in zip(*triples, strict=True))]
        own_floor = floor
        if label in sources:
            assert triples[0][0].dtype == sources[label]
            own_floor = max(floor, reference.floor_of(sources[label]))
        for triple in triples:
            assert_close(label, *triple, own_floor)


def exact_losses(
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    scale: float | Tensor,
    *,
    one_way: bool,
    normalize: bool = True,
) -> Tensor:
    """Losses of a few pairs in float64, from their own rows and columns of S alone."""

    def nll(a: Tensor, b: Tensor) -> Tensor:
        a, b = a[rows].double(), b.double()
        options: dict[str, Any] = {"normalize": normalize, "nll": reference.exact_nll}
        return reference.info_nce(a, b, rows, scale, **options)

    return nll(x, y) if one_way else (nll(x, y) + nll(y, x)) / 2


def assert_same(ours: Iterable[Tensor], other: Iterable[Tensor]) -> None:
    """Equal bit for bit, dtype and shape included."""
    for i, (a, b) in enumerate(zip(ours, other, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"output {i} differs by up to {(a - b).abs().max().item():.3e}"


@contextmanager
def matmul_precision(value: str) -> Iterator[None]:
    """torch.set_float32_matmul_precision for the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
