"""Any shape, any strides, any mix of dtypes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import infloss
from infloss import reference
from support import (
    DRAWS,
    FLOATS,
    LAYOUTS,
    LOSSES,
    Case,
    Loss,
    assert_close,
    assert_exact,
    assert_same,
    exact_losses,
    features,
    laid_out,
    normal,
    one_way,
    step,
    symmetric,
)
from support import name as dtype_id

MIB = 1 << 20
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
EACH_LOSS = pytest.mark.parametrize("loss", LOSSES)
dtypes = st.sampled_from(FLOATS)
batches = st.integers(1, 60)
dims = st.integers(1, 70)
seeds = st.integers(0, 1000)

layouts = st.sampled_from(list(LAYOUTS))
# where all keys are one, the true gradients are zero and the oracle itself is only rounding
key_layouts = layouts.filter(lambda layout: layout != "one row expanded")


@given(st.integers(1, 30), st.integers(2, 40), dtypes, seeds, layouts, key_layouts, st.booleans())
@settings(max_examples=60)
def test_any_strides(
    device: torch.device,
    batch: int,
    dim: int,
    dtype: torch.dtype,
    seed: int,
    x_layout: str,
    y_layout: str,
    one_way: bool,
) -> None:
    """Views are held to the rule like packed tensors (case 20).

    Without normalisation: a constant row has no gradient under it, only rounding.
    """
    cases = [
        Case(
            laid_out(x_layout, batch, dim, seed + 2 * i, dtype, device),
            laid_out(y_layout, batch, dim, seed + 2 * i + 1, dtype, device),
            scale=dim**-0.5,
            one_way=one_way,
            normalize=False,
        )
        for i in range(DRAWS)
    ]
    assert_exact(cases, device)


@EACH_LOSS
@given(batches, dims, dtypes, seeds, layouts, layouts)
@settings(max_examples=60)
def test_strides_change_no_bit_of_the_loss(
    device: torch.device,
    loss: Loss,
    batch: int,
    dim: int,
    dtype: torch.dtype,
    seed: int,
    x_layout: str,
    y_layout: str,
) -> None:
    """Views give what their packed copies give (case 20).

    On values whose products sum up exactly in any order: a BLAS may choose its order by strides and
    alignment.
    """
    x = laid_out(x_layout, batch, dim, seed, dtype, device)
    y = laid_out(y_layout, batch, dim, seed + 1, dtype, device)
    packed = [view.clone(memory_format=torch.contiguous_format) for view in (x, y)]
    options = {"normalize": False, "reduction": "none", "return_stats": True}
    viewed = loss(x, y, 0.5, **options)
    assert_same(viewed[:-1], loss(*packed, 0.5, **options)[:-1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_reach_the_base_of_a_view(layout: str, device: torch.device) -> None:
    shape, view = LAYOUTS[layout]
    base = normal(*shape(12, 10), dtype=torch.float64).to(device).requires_grad_()
    y = normal(12, 10, seed=1, dtype=torch.float64).to(device)
    infloss.contrastive_loss(view(base).expand(12, 10), y, 2.0, normalize=False).backward()
    exact = base.detach().clone().requires_grad_()
    reference.contrastive_loss(
        view(exact).expand(12, 10), y, 2.0, normalize=False
    ).mean().backward()
    assert_close("base", base.grad, exact.grad, exact.grad, reference.floor_of(torch.float64))


@EACH_LOSS
def test_an_expanded_upstream_gradient(loss: Loss, device: torch.device) -> None:
    """sum() hands back one value with stride 0."""
    x, y = features("weak", 30, 30, 12, torch.float32)
    x, y = x.to(device), y.to(device)

    def per_pair(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return loss(a, b, s, reduction="none")

    ones = torch.ones(30, device=device)
    assert_same(step(per_pair, x, y, 9.0), step(per_pair, x, y, 9.0, ones))


@given(st.integers(1, 40), st.integers(1, 6), st.integers(2, 70), dtypes, seeds, st.booleans())
@example(1, 1, 2, torch.float32, 0, True)
@example(1, 6, 2, torch.float16, 0, True)
@settings(max_examples=40)
def test_info_nce_of_any_rectangle(
    device: torch.device,
    queries: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    seed: int,
    implicit: bool,
) -> None:
    """With the default target, N a multiple of M, and with arbitrary targets and any N."""
    keys = queries * group if implicit else queries + 3 * group
    target = None
    if not implicit:
        generator = torch.Generator().manual_seed(seed)
        target = torch.randint(keys, (queries,), generator=generator)
    cases = [
        Case(
            normal(queries, dim, seed=seed + i, dtype=dtype),
            normal(keys, dim, seed=seed - i - 1 + 5000, dtype=dtype),
            one_way=True,
            target=target,
        )
        for i in range(DRAWS)
    ]
    assert_exact(cases, device)


@given(batches, dims, dtypes, seeds)
@settings(max_examples=40)
def test_contrastive_loss_of_any_batch(
    device: torch.device, batch: int, dim: int, dtype: torch.dtype, seed: int
) -> None:
    cases = [Case(*features("weak", batch, batch, dim, dtype, seed + i)) for i in range(DRAWS)]
    assert_exact(cases, device)


@given(dtypes, dtypes, seeds, st.sampled_from(LOSSES))
@settings(max_examples=40)
def test_mixed_dtypes_are_promoted_bit_for_bit(
    device: torch.device, x_dtype: torch.dtype, y_dtype: torch.dtype, seed: int, loss: Loss
) -> None:
    """The promoted pair decides; each gradient is then rounded to its input's dtype (case 16)."""
    x, y = features("weak", 24, 24, 20, torch.float64, seed)
    x, y = x.to(device, x_dtype), y.to(device, y_dtype)
    wide = torch.promote_types(x_dtype, y_dtype)
    mixed, promoted = step(loss, x, y, 11.0), step(loss, x.to(wide), y.to(wide), 11.0)
    rounded = promoted._replace(dx=promoted.dx.to(x_dtype), dy=promoted.dy.to(y_dtype))
    assert_same(mixed, rounded)


@DTYPES
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_single_pair_has_loss_and_gradients_exactly_zero(
    loss: Loss, normalize: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x, y = normal(1, 37, dtype=dtype).to(device), normal(1, 37, seed=1, dtype=dtype).to(device)
    for out in step(lambda a, b, s: loss(a, b, s, normalize=normalize), x, y, 100.0):
        assert torch.equal(out, torch.zeros_like(out))


def test_a_single_pair_of_positives_among_many_keys(device: torch.device) -> None:
    cases = [
        Case(normal(1, 9, seed=seed), normal(50, 9, seed=90 + seed), one_way=True)
        for seed in range(DRAWS)
    ]
    assert_exact(cases, device)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@DTYPES
def test_one_normalised_feature_has_no_gradient(dtype: torch.dtype, device: torch.device) -> None:
    """A row of one feature is +1 or -1 once normalised, and moving it changes nothing (case 21)."""
    cases = [
        Case(normal(30, 1, seed=seed, dtype=dtype), normal(30, 1, seed=50 + seed, dtype=dtype))
        for seed in range(DRAWS)
    ]
    assert_exact(cases, device)


@DTYPES
@EACH_LOSS
def test_two_runs_agree_bit_for_bit(loss: Loss, dtype: torch.dtype, device: torch.device) -> None:
    x, y = features("cone.9", 700, 700, 48, dtype)
    x, y = x.to(device), y.to(device)
    with threads(2), infloss.workspace_limit(4 * MIB):
        first, second = step(loss, x, y, 14.3), step(loss, x, y, 14.3)
    assert_same(first, second)


@EACH_LOSS
def test_permuting_the_pairs_permutes_the_gradients(loss: Loss, device: torch.device) -> None:
    """No pair is special: not the first, not the last of a ragged tile."""
    x, y = features("weak", 90, 90, 24, torch.float64)
    x, y = x.to(device), y.to(device)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0)).to(device)
    plain, shuffled = step(loss, x, y, 14.3), step(loss, x[order], y[order], 14.3)
    floor = reference.floor_of(torch.float64)
    for label in ("dx", "dy"):
        expected = getattr(plain, label)[order]
        assert_close(label, getattr(shuffled, label), expected, expected, floor)


@pytest.mark.slow
def test_more_similarities_than_an_int32_counts(device: torch.device) -> None:
    """B * B > 2**31; rows from both ends are checked one by one (case 23)."""
    batch = 46342
    assert batch * batch > 2**31
    x, y = normal(batch, 4).to(device), normal(batch, 4, seed=1).to(device)
    rows = torch.tensor([0, 1, 511, 23170, 46300, 46340, 46341], device=device)
    loss = one_way(x, y, 1.0, normalize=False, reduction="none")
    exact = exact_losses(x, y, rows, 1.0, one_way=True, normalize=False)
    floor = reference.floor_of(torch.float32)
    assert_close("loss", loss[rows], exact.float(), exact, floor)


def test_gradients_of_more_similarities_than_an_int32_counts(cuda: torch.device) -> None:
    """A weighted row's gradient needs only that row of G, which fits (case 23)."""
    batch = 46342
    x, y = normal(batch, 4), normal(batch, 4, seed=1)
    rows = torch.tensor([0, 46341])
    upstream = torch.zeros(batch)
    upstream[rows] = 1.0

    def few(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return one_way(a, b, s, normalize=False, reduction="none")

    def exact(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return exact_losses(a, b, rows.to(cuda), s, one_way=True, normalize=False)

    ours = step(few, x.to(cuda), y.to(cuda), 1.0, upstream.to(cuda))
    right = step(exact, x.double().to(cuda), y.double().to(cuda), 1.0)
    floor = reference.floor_of(torch.float32)
    assert_close("dx", ours.dx, right.dx.float(), right.dx, floor)
    assert_close("dy", ours.dy, right.dy.float(), right.dy, floor)


def test_more_feature_values_than_an_int32_counts(cuda: torch.device) -> None:
    """N * D > 2**31: 16 queries against the last of 2.2 million keys (case 23)."""
    if torch.cuda.get_device_properties(cuda).total_memory < 40 << 30:
        pytest.skip("needs 40 GiB of device memory")
    keys, dim = 2_200_000, 1000
    assert keys * dim > 2**31
    generator = torch.Generator(cuda).manual_seed(0)
    key = torch.randn(keys, dim, generator=generator, device=cuda, dtype=torch.bfloat16)
    query = key[-16:].clone().requires_grad_()
    target = torch.arange(keys - 16, keys, device=cuda)
    key.requires_grad_()
    loss = infloss.info_nce(query, key, target, 100.0, reduction="none")
    dquery, dkey = torch.autograd.grad(loss.sum(), (query, key))
    assert (loss >= 0).all()
    assert (loss < 1e-3).all(), "a key past 2**31 values did not match itself"
    assert torch.isfinite(dquery).all()
    assert torch.isfinite(dkey[-16:]).all()


@DTYPES
@pytest.mark.parametrize("dim", [1, 7, 33, 96, 100, 384, 640, 1152, 1001])
@pytest.mark.parametrize("batch", [64, 63])
def test_any_feature_size(batch: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Multiples of a tile and not (cases 21 and 22)."""
    cases = [Case(*features("weak", batch, batch, dim, dtype, seed)) for seed in range(DRAWS)]
    assert_exact(cases, device)


def test_symmetric_loss_is_symmetric(device: torch.device) -> None:
    x, y = features("weak", 65, 65, 20, torch.float64)
    one = step(symmetric, x.to(device), y.to(device), 14.3)
    other = step(symmetric, y.to(device), x.to(device), 14.3)
    floor = reference.floor_of(torch.float64)
    assert_close("dx", one.dx, other.dy, other.dy, floor)
    assert_close("loss", one.loss, other.loss, other.loss, floor)
