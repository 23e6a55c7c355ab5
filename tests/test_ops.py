"""The registered ops: schemas, fakes and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import infloss
from infloss import portable, reference
from support import (
    FLOATS,
    LOSSES,
    Loss,
    assert_close,
    assert_same,
    features,
    inverse_norms,
    normal,
    one_way,
)
from support import name as dtype_id

MIB = 1 << 20
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
EACH_LOSS = pytest.mark.parametrize("loss", LOSSES)
OPS = torch.ops.infloss

# What both losses ask of lse and grad: (rows, cols, hardest), (need_x, need_y, need_scale)
ASKED = [(True, True, True), (True, True, False), (True, False, False), (False, True, True)]
NEEDED = [(True, True, True), (True, False, False), (False, True, True), (False, False, True)]


def lse_arguments(
    m: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    asked: tuple[bool, bool, bool] = (True, True, True),
    normalize: bool = True,
    target: bool = False,
    path: str = "auto",
) -> tuple[Any, ...]:
    """A valid call of infloss::lse on [m, 12] against [n, 12]."""
    x, y = normal(m, 12, dtype=dtype).to(device), normal(n, 12, seed=1, dtype=dtype).to(device)
    scale = torch.tensor(3.0, dtype=portable.stats_dtype(dtype), device=device)
    inverse = (inverse_norms(x), inverse_norms(y)) if normalize else (None, None)
    columns = torch.arange(m, device=device).flip(0) % n if target else None
    return (x, y, scale, *inverse, columns, 0, max(1, n // m), *asked, MIB, path, "highest")


def grad_arguments(
    m: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    needed: tuple[bool, bool, bool] = (True, True, True),
    wide: bool = False,
    directions: str = "both",
    path: str = "auto",
    **options: Any,
) -> tuple[Any, ...]:
    """A valid call of infloss::grad with the statistics that infloss::lse gave."""
    forward = lse_arguments(m, n, dtype, device, path=path, **options)
    row_stats, col_stats, *_ = OPS.lse(*forward)
    weight = torch.linspace(-1, 1, m, device=device, dtype=row_stats.dtype)
    rows = (row_stats, weight) if directions in ("both", "rows") else (None, None)
    cols = (col_stats, weight[:n]) if directions in ("both", "cols") else (None, None)
    centre = torch.zeros((), device=device, dtype=row_stats.dtype) if needed[2] else None
    return (*forward[:8], *rows, *cols, weight, centre, *needed, wide, MIB, path, "highest")


@DTYPES
def test_opcheck_inv_norm(dtype: torch.dtype, device: torch.device) -> None:
    x = normal(9, 5, dtype=dtype).to(device)
    out = torch.empty(9, dtype=portable.stats_dtype(dtype), device=device)
    torch.library.opcheck(OPS.inv_norm, (x, out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
def test_opcheck_merge_stats(dtype: torch.dtype, device: torch.device) -> None:
    stats = normal(2, 7, dtype=dtype).abs().to(device)
    partials = normal(3, 2, 7, seed=1, dtype=dtype).abs().to(device)
    torch.library.opcheck(OPS.merge_stats, (stats, partials))


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"target": True}], ids=str)
def test_opcheck_lse(
    asked: tuple[bool, bool, bool], options: dict[str, bool], device: torch.device
) -> None:
    arguments = lse_arguments(6, 12, torch.float32, device, asked=asked, **options)
    torch.library.opcheck(OPS.lse, arguments)


@pytest.mark.parametrize("needed", NEEDED)
@pytest.mark.parametrize("directions", ["both", "rows", "cols"])
def test_opcheck_grad(
    needed: tuple[bool, bool, bool], directions: str, device: torch.device
) -> None:
    arguments = grad_arguments(8, 8, torch.float32, device, needed=needed, directions=directions)
    torch.library.opcheck(OPS.grad, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=dtype_id)
def test_opcheck_wide_grad(dtype: torch.dtype, device: torch.device) -> None:
    torch.library.opcheck(OPS.grad, grad_arguments(8, 8, dtype, device, wide=True))


@DTYPES
def test_wide_gradients_are_those_before_rounding(dtype: torch.dtype, device: torch.device) -> None:
    narrow = OPS.grad(*grad_arguments(9, 9, dtype, device))
    wide = OPS.grad(*grad_arguments(9, 9, dtype, device, wide=True))
    assert {out.dtype for out in wide} == {portable.stats_dtype(dtype)}
    assert_same(narrow[:2], (out.to(dtype) for out in wide[:2]))


@pytest.mark.parametrize("options", [{"normalize": False}, {"target": True}], ids=str)
def test_opcheck_grad_of_a_rectangle(options: dict[str, bool], device: torch.device) -> None:
    arguments = grad_arguments(5, 15, torch.float32, device, directions="rows", **options)
    torch.library.opcheck(OPS.grad, arguments)


def described(outputs: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(tuple(out.shape), out.dtype, out.device.type) for out in outputs]


def run_on_meta(op: Callable[..., tuple[Tensor, ...]], arguments: tuple[Any, ...]) -> Any:
    return op(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))


def as_meta(outputs: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(*rest, "meta") for *rest, _ in outputs]


@DTYPES
@pytest.mark.parametrize("asked", ASKED)
def test_fake_lse_promises_what_lse_returns(
    asked: tuple[bool, bool, bool], dtype: torch.dtype, device: torch.device
) -> None:
    arguments = lse_arguments(6, 9, dtype, device, asked=asked, target=True)
    real = described(OPS.lse(*arguments))
    assert described(run_on_meta(OPS.lse, arguments)) == as_meta(real)


@DTYPES
@pytest.mark.parametrize("needed", NEEDED)
def test_fake_grad_promises_what_grad_returns(
    needed: tuple[bool, bool, bool], dtype: torch.dtype, device: torch.device
) -> None:
    arguments = grad_arguments(6, 9, dtype, device, needed=needed, directions="rows", target=True)
    real = described(OPS.grad(*arguments))
    assert described(run_on_meta(OPS.grad, arguments)) == as_meta(real)


def double_inputs(kind: str, m: int, n: int) -> list[Tensor]:
    """x, y and logit_scale in float64 for gradcheck; "ties" repeats rows on both sides."""
    x, y = features("weak", m, n, 5, torch.float64)
    if kind == "ties":
        x[1], y[1] = x[0], y[0]
        y[2:] = y[2]
    if kind == "identical":
        y = x.clone()
    return [x.requires_grad_(), y.requires_grad_(), torch.tensor(2.0).double().requires_grad_()]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", ["weak", "ties", "identical"])
@EACH_LOSS
def test_gradcheck(
    loss: Callable[..., Tensor], kind: str, normalize: bool, reduction: str, device: torch.device
) -> None:
    """The gradient against finite differences, equal maxima included (case 14)."""
    inputs = [value.detach().to(device).requires_grad_() for value in double_inputs(kind, 6, 6)]

    def under_test(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
        return loss(x, y, s, normalize=normalize, reduction=reduction)

    assert torch.autograd.gradcheck(under_test, inputs)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck_with_targets(reduction: str, device: torch.device) -> None:
    inputs = [value.detach().to(device).requires_grad_() for value in double_inputs("ties", 5, 10)]
    target = torch.tensor([9, 0, 0, 3, 4], device=device)

    def under_test(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
        return one_way(x, y, s, target=target, reduction=reduction)

    assert torch.autograd.gradcheck(under_test, inputs)


@pytest.mark.parametrize("of", [0, 1, 2])
@pytest.mark.parametrize("by", [0, 1, 2])
@EACH_LOSS
def test_a_second_derivative_raises(loss: Loss, of: int, by: int, device: torch.device) -> None:
    """It is never None or zero in silence."""
    inputs = [value.detach().to(device).requires_grad_() for value in double_inputs("weak", 6, 6)]
    first = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)[of]
    assert first.requires_grad
    with pytest.raises(NotImplementedError, match=r"second derivatives .* not implemented"):
        torch.autograd.grad(first.sum(), inputs[by])


def test_a_derivative_by_the_upstream_gradient_raises(device: torch.device) -> None:
    """A gradient is linear in the pairs' weights, and that derivative is not implemented either."""
    x, y, _ = (value.detach().to(device) for value in double_inputs("weak", 6, 6))
    weight = torch.ones(6, dtype=x.dtype, device=device, requires_grad=True)
    loss = infloss.contrastive_loss(x.requires_grad_(), y, reduction="none")
    (first,) = torch.autograd.grad(loss, x, weight, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(first.sum(), weight)


@EACH_LOSS
def test_a_second_derivative_raises_under_compile(
    loss: Loss, device: torch.device, fresh_dynamo: None
) -> None:
    inputs = [value.detach().to(device).requires_grad_() for value in double_inputs("weak", 6, 6)]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    (first,) = torch.autograd.grad(compiled(*inputs), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward|second derivatives"):
        torch.autograd.grad(first.sum(), inputs[0])


def test_the_raw_lse_has_no_silent_derivative(device: torch.device) -> None:
    x, *rest = lse_arguments(6, 6, torch.float32, device)
    row_stats, *_ = OPS.lse(x.requires_grad_(), *rest)
    with pytest.raises(NotImplementedError, match=r"use infloss\.contrastive_loss"):
        row_stats.sum().backward()


def test_a_centre_shifts_the_scale_gradient_by_the_sum_of_g(device: torch.device) -> None:
    """sum_ij G_ij (<x_i, y_j> - centre): nothing where G sums to zero, and here it sums to 16.

    Softmax rows and columns sum to their weights, here 1; the positives' weight is 0.
    """
    base = grad_arguments(8, 8, torch.float64, device)
    weight, nothing = torch.ones_like(base[12]), torch.zeros_like(base[12])
    head = (*base[:8], base[8], weight, base[10], weight, nothing)
    *_, plain = OPS.grad(*head, None, *base[14:])
    *_, centred = OPS.grad(*head, torch.full_like(base[2], 0.75), *base[14:])
    expected = plain - 0.75 * 16
    assert_close("dscale", centred, expected, expected, reference.floor_of(torch.float64))


def test_offset_targets_of_the_raw_ops(device: torch.device) -> None:
    """target_offset places the positives within one block of a larger batch's columns."""
    arguments = list(lse_arguments(6, 20, torch.float64, device))
    arguments[6:8] = [5, 2]  # offset, stride
    by_rule = OPS.lse(*arguments)
    arguments[5] = torch.arange(6, device=device) * 2 + 5
    arguments[6:8] = [0, 1]
    for ours, listed in zip(by_rule, OPS.lse(*arguments), strict=True):
        assert torch.equal(ours, listed)


def test_a_positive_outside_the_columns_is_nan_in_the_raw_lse(device: torch.device) -> None:
    arguments = list(lse_arguments(6, 6, torch.float64, device))
    arguments[6] = 3  # offset: rows 3, 4 and 5 have their positive in another block
    _, _, positive, _, _ = OPS.lse(*arguments)
    assert positive.isnan().tolist() == [False, False, False, True, True, True]


def test_a_gradient_without_weights_is_refused() -> None:
    x = torch.randn(3, 2)
    arguments = dict.fromkeys(
        ("x_inv_norm", "y_inv_norm", "target", "row_stats", "row_weight", "col_stats", "col_weight")
    )
    with pytest.raises(ValueError, match="row_weight, col_weight: expected at least one"):
        torch.ops.infloss.grad(
            x,
            x,
            torch.tensor(1.0),
            **arguments,
            target_offset=0,
            target_stride=1,
            target_weight=torch.ones(3),
            centre=None,
            need_x=True,
            need_y=True,
            need_scale=False,
            wide=False,
            workspace=1 << 20,
            path="auto",
            precision="highest",
        )
