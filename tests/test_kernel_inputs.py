"""What the tile kernels are given: precisions, strides, far rows, NaN and ties."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import infloss
from infloss import kernels, reference
from support import (
    DRAWS,
    LAYOUTS,
    LOSSES,
    Case,
    assert_close,
    assert_exact,
    assert_same,
    exact_losses,
    features,
    laid_out,
    matmul_precision,
    normal,
    one_way,
    step,
    symmetric,
)
from support import name as dtype_id

F32 = torch.float32
DTYPES = pytest.mark.parametrize("dtype", kernels.DTYPES, ids=dtype_id)
EACH_LOSS = pytest.mark.parametrize("loss", LOSSES)
BOTH_WAYS = pytest.mark.parametrize("one_way", [False, True], ids=["symmetric", "one_way"])


@BOTH_WAYS
@pytest.mark.parametrize("kind", ["weak", "identical", "cone.9", "cone.99"])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_under_each_matmul_precision(
    precision: str, kind: str, one_way: bool, kernel_device: torch.device
) -> None:
    """The rule's floor follows. Identical pairs and narrow cones need more than TF32 gradients."""
    keys = 600 if one_way else 300
    cases = [
        Case(*features(kind, 300, keys, 136, torch.float32, seed), one_way=one_way)
        for seed in range(DRAWS)
    ]
    with matmul_precision(precision):
        assert_exact(cases, kernel_device)


@BOTH_WAYS
@pytest.mark.parametrize("layout", ["packed", "transposed"])
def test_float32_under_matmul_precision_medium(
    layout: str, one_way: bool, kernel_device: torch.device
) -> None:
    """bfloat16 values in float32 keep the rule of bfloat16 features; gradients come in float32."""
    half = features("weak", 300, 300, 136, torch.bfloat16)
    sides = [side.float() for side in half]
    x, y = (side.T.contiguous().T if layout == "transposed" else side for side in sides)
    case = Case(x, y, one_way=one_way, reduction="none").to(kernel_device)
    in_half = Case(*half, one_way=one_way, reduction="none").to(kernel_device)
    with matmul_precision("medium"):
        ours = case.ours()
    dense, exact = in_half.dense(), in_half.exact()
    floor = reference.floor_of(torch.bfloat16)
    for label in ("loss", "dx", "dy"):
        out = getattr(ours, label)
        assert out.dtype == torch.float32
        rounded = getattr(dense, label).to(torch.bfloat16 if label != "loss" else torch.float32)
        assert_close(label, out, rounded, getattr(exact, label), floor)


@EACH_LOSS
def test_backward_recomputes_in_the_precision_of_its_forward(
    loss: Callable[..., Tensor], kernel_device: torch.device
) -> None:
    x, y = (
        side.to(kernel_device).requires_grad_() for side in features("weak", 300, 300, 136, F32)
    )
    expected = step(loss, x, y, 14.3)
    with matmul_precision("highest"):
        out = loss(x, y, 14.3)
    with matmul_precision("medium"):
        gradients = torch.autograd.grad(out, (x, y))
    assert_same(gradients, (expected.dx, expected.dy))


def test_each_matmul_precision_has_products_of_its_own(kernel_device: torch.device) -> None:
    x, y = (side.to(kernel_device) for side in features("weak", 300, 300, 136, torch.float32))
    losses = {}
    for precision in ("highest", "high", "medium"):
        with matmul_precision(precision):
            losses[precision] = infloss.contrastive_loss(x, y, reduction="none")
    assert not torch.equal(losses["highest"], losses["high"])
    assert not torch.equal(losses["high"], losses["medium"])
    error = {name: (loss - losses["highest"]).norm().item() for name, loss in losses.items()}
    assert error["medium"] > 2 * error["high"]


@pytest.mark.parametrize(("newer", "older"), [("tf32", "high"), ("ieee", "highest")])
def test_the_newer_precision_setting_counts(
    newer: str, older: str, matmul_setting: Any, kernel_device: torch.device
) -> None:
    x, y = (side.to(kernel_device) for side in features("weak", 300, 300, 136, torch.float32))
    with matmul_precision(older):
        expected = step(symmetric, x, y, 14.3)
    matmul_setting.fp32_precision = newer
    assert_same(step(symmetric, x, y, 14.3), expected)


@DTYPES
@pytest.mark.parametrize("dim", [33, 64, 65])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_no_bit(
    layout: str, dim: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Whether rows are read where they lie or from a copy.

    Without normalisation, since the sum of a row's squares may take another order.
    """
    x, y = (laid_out(layout, 300, dim, seed, dtype, kernel_device) for seed in (0, 1))
    packed = [view.clone(memory_format=torch.contiguous_format) for view in (x, y)]

    def loss(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return symmetric(a, b, s, normalize=False, reduction="none")

    upstream = normal(300).to(kernel_device)
    viewed, expected = (step(loss, *sides, dim**-0.5, upstream) for sides in ((x, y), packed))
    assert_same(viewed, expected)


# a constant row has no gradient under normalisation, only rounding
NORMALISABLE = [layout for layout in LAYOUTS if layout != "one column expanded"]


@DTYPES
@BOTH_WAYS
@pytest.mark.parametrize("layout", NORMALISABLE)
def test_normalised_rows_of_any_strides(
    layout: str, one_way: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """The projection of a gradient reads the caller's rows, whatever the products read."""
    cases = [
        Case(
            laid_out(layout, 200, 33, seed, dtype, kernel_device),
            normal(200, 33, seed=50 + seed, dtype=dtype),
            one_way=one_way,
        )
        for seed in range(DRAWS)
    ]
    assert_exact(cases, kernel_device)


@DTYPES
@pytest.mark.parametrize("view", ["every other", "expanded"])
def test_targets_of_any_stride(view: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    x, y = (side.to(kernel_device) for side in features("weak", 200, 300, 24, dtype))
    columns = torch.randint(300, (400,), generator=torch.Generator().manual_seed(0)).to(
        kernel_device
    )
    target = columns[::2] if view == "every other" else columns[:1].expand(200)

    def loss(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return one_way(a, b, s, target=target)

    def packed(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return one_way(a, b, s, target=target.contiguous())

    assert not target.is_contiguous()
    assert_same(step(loss, x, y, 14.3), step(packed, x, y, 14.3))


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
def test_a_few_pairs_of_a_batch_beyond_int32(
    dtype: torch.dtype, one_way: bool, kernel_device: torch.device
) -> None:
    """B * B > 2**32 and, in bfloat16, row starts beyond 2**31 elements (case 23).

    Only a few pairs have weight, so that their own rows and columns of S give every gradient.
    """
    batch, dim, wide = 70_000, 8, 32_768
    if torch.cuda.get_device_properties(kernel_device).total_memory < 24 << 30:
        pytest.skip("needs 24 GiB of device memory")
    x, y = (side.to(kernel_device) for side in features("weak", batch, batch, dim, dtype))
    if dtype == torch.bfloat16:
        assert batch * wide > 2**31
        base = torch.empty(batch, wide, dtype=dtype, device=kernel_device)
        base[:, :dim], base[:, -dim:] = x, y
        x, y = base[:, :dim], base[:, -dim:]
    rows = torch.tensor(
        [0, 127, 23_169, 46_341, 65_535, 65_536, 69_998, 69_999], device=kernel_device
    )
    upstream = torch.zeros(batch, device=kernel_device)
    upstream[rows] = torch.linspace(1, 2, len(rows), device=kernel_device)
    loss = LOSSES[one_way]

    def some(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return exact_losses(a, b, rows, s, one_way=one_way)

    ours = step(lambda a, b, s: loss(a, b, s, reduction="none"), x, y, 14.3, upstream)
    exact = step(some, x.double(), y.double(), 14.3, upstream[rows])
    assert_close("loss", ours.loss[rows], exact.loss.float(), exact.loss, 2e-5)
    floor = reference.floor_of(dtype)
    for label in ("dx", "dy"):
        out, right = getattr(ours, label), getattr(exact, label)
        assert_close(label, out, right.float(), right, floor)
        assert_close(f"{label} of the rows", out[rows], right[rows].float(), right[rows], floor)


NAN, INF = float("nan"), float("inf")


@DTYPES
@EACH_LOSS
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_what_is_not_finite_poisons_what_it_does_in_dense_maths(
    value: float,
    side: int,
    normalize: bool,
    loss: Callable[..., Tensor],
    dtype: torch.dtype,
    kernel_device: torch.device,
) -> None:
    """Losses one by one and gradients row by row; the row lies in a second tile.

    An infinite float32 value is split into two TF32 terms, infinity and NaN, so that it poisons
    what it meets where dense maths may still give an infinite or vanishing term.
    """
    sides = list(features("weak", 300, 300, 24, dtype))
    sides[side][130, 5] = value
    one_way = loss is not symmetric
    case = Case(*sides, 10.0, one_way, normalize=normalize, reduction="none", upstream=1.0)
    ours, dense = case.to(kernel_device).ours(), case.to(kernel_device).dense()
    assert dense.loss.isnan().any()
    split = dtype == torch.float32 and value in (INF, -INF)
    for label in ("loss", "dx", "dy", "dscale"):
        out, expected = (getattr(outputs, label).isnan() for outputs in (ours, dense))
        if out.ndim == 2:
            out, expected = out.any(1), expected.any(1)
        agree = torch.equal(out | expected, out) if split else torch.equal(out, expected)
        assert agree, f"{label}: {out.sum()} rows, not {expected.sum()}"


def assert_ties_are_wrong(dtype: torch.dtype, device: torch.device) -> None:
    """Each of a pair of equal rows ties with the other, within a tile and across tiles."""
    x, _ = features("unrelated", 300, 300, 32, dtype)
    for copy, row in ((200, 5), (70, 68), (299, 140)):
        x[copy] = x[row]
    x = x.to(device)
    out = symmetric(x, x, 14.3, return_stats=True)
    one = one_way(x, x, 14.3, return_stats=True)
    for accuracy in (out.accuracy_img, out.accuracy_txt, one.accuracy):
        assert round(accuracy.item() * 300, 3) == 294


def assert_nan_is_wrong(dtype: torch.dtype, device: torch.device) -> None:
    """A NaN row makes every column's hardest negative NaN, and a NaN column every row's."""
    x, _ = features("unrelated", 300, 300, 32, dtype)
    y = x.clone()
    x[140, 3] = NAN
    x, y = x.to(device), y.to(device)
    out = symmetric(x, y, 14.3, return_stats=True)
    one = one_way(x, y, 14.3, return_stats=True)
    for accuracy in (out.accuracy_img, one.accuracy):
        assert round(accuracy.item() * 300, 3) == 299
    assert out.accuracy_txt.item() == 0
    assert one_way(y, x, 14.3, return_stats=True).accuracy.item() == 0


@DTYPES
def test_ties_are_no_correct_answers(dtype: torch.dtype, kernel_device: torch.device) -> None:
    assert_ties_are_wrong(dtype, kernel_device)


@DTYPES
def test_a_pair_among_nan_is_no_correct_answer(
    dtype: torch.dtype, kernel_device: torch.device
) -> None:
    assert_nan_is_wrong(dtype, kernel_device)


@DTYPES
def test_the_portable_path_counts_ties_and_nan_as_the_kernels_do(
    dtype: torch.dtype, device: torch.device
) -> None:
    with infloss.use_path("portable"):
        assert_ties_are_wrong(dtype, device)
        assert_nan_is_wrong(dtype, device)
