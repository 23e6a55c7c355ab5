"""The O(B) statistics: partial log-sum-exps, row norms, and what return_stats reports."""

import math

import pytest
import torch
from torch import Tensor

from infloss import reference
from support import FLOATS, assert_close, features, inverse_norms, normal, symmetric
from support import name as dtype_id

DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
OPS = torch.ops.infloss


def as_stats(values: Tensor) -> Tensor:
    """(max, sum of exp) pairs [2, M] of the columns of [K, M]; an infinite maximum counts as 1."""
    top = values.amax(0)
    shifted = torch.where(values == top, 0.0, values - top)
    return torch.stack((top, shifted.exp().sum(0)))


def lse_of(stats: Tensor) -> Tensor:
    return stats[0] + stats[1].log()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_merge_stats(count: int, dtype: torch.dtype, device: torch.device) -> None:
    """Merging parts is the log-sum-exp of their concatenation."""
    parts = [80 * normal(4, 300, seed=seed, dtype=dtype).to(device) for seed in range(count + 1)]
    stats, partials = as_stats(parts[0]), torch.stack([as_stats(part) for part in parts[1:]])
    OPS.merge_stats(stats, partials)
    together = torch.cat(parts)
    assert torch.equal(stats[0], together.amax(0))
    exact = together.double().logsumexp(0)
    assert_close("lse", lse_of(stats), together.logsumexp(0), exact, reference.floor_of(dtype))


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((-INF, 0.0), (2.0, 3.0), 2.0 + math.log(3.0)),
        ((2.0, 3.0), (-INF, 0.0), 2.0 + math.log(3.0)),
        ((-INF, 0.0), (-INF, 0.0), -INF),
        ((INF, 1.0), (2.0, 3.0), INF),
        ((2.0, 3.0), (INF, 1.0), INF),
        ((INF, 1.0), (INF, 1.0), INF),
        ((INF, 1.0), (-INF, 0.0), INF),
        ((NAN, NAN), (2.0, 3.0), NAN),
        ((2.0, 3.0), (NAN, NAN), NAN),
        ((2.0, NAN), (3.0, 1.0), NAN),
        ((2.0, 1.0), (3.0, NAN), NAN),
        ((NAN, NAN), (-INF, 0.0), NAN),
        ((-INF, 0.0), (NAN, NAN), NAN),
        ((-3e38, 1.0), (3e38, 1.0), 3e38),
    ],
)
def test_merge_stats_of_values_that_are_not_finite(
    first: tuple[float, float],
    second: tuple[float, float],
    expected: float,
    device: torch.device,
) -> None:
    """An empty part is (-inf, 0) and changes nothing; NaN is never lost."""
    stats = torch.tensor(first, device=device)[:, None]
    OPS.merge_stats(stats, torch.tensor(second, device=device)[None, :, None])
    torch.testing.assert_close(lse_of(stats).item(), expected, equal_nan=True)


def test_merge_stats_into_a_slice(device: torch.device) -> None:
    """Statistics of a tile are columns of a larger array; their neighbours stay."""
    whole = as_stats(normal(4, 30)).to(device)
    before = whole.clone()
    partials = as_stats(normal(4, 10, seed=1)).to(device)[None]
    OPS.merge_stats(whole[:, 10:20], partials)
    alone = before[:, 10:20].contiguous()
    OPS.merge_stats(alone, partials)
    assert torch.equal(whole, torch.cat((before[:, :10], alone, before[:, 20:]), 1))


@DTYPES
@pytest.mark.parametrize("dim", [1, 8, 33, 256])
def test_inv_norm(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    x = normal(70, dim, dtype=dtype).to(device)
    exact = 1 / torch.linalg.vector_norm(x.double(), dim=1)
    assert_close(
        "inv_norm", inverse_norms(x), exact, exact, reference.floor_of(torch.float32) / 100
    )


@DTYPES
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_inv_norm_of_strided_rows(offset: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows of a column slice, aligned for wide loads or not."""
    wide = normal(40, 48, dtype=dtype).to(device)
    sliced = wide[::2, offset : offset + 16]
    torch.testing.assert_close(inverse_norms(sliced), inverse_norms(sliced.contiguous()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=dtype_id)
def test_inv_norm_of_vanishing_rows_is_zero(dtype: torch.dtype, device: torch.device) -> None:
    """At 1e-12 and below, denormal and zero values included; above it the norm counts."""
    values = torch.tensor([0.0, torch.finfo(dtype).tiny / 4, 1e-20, 4e-13, 1e-11], dtype=dtype)
    out = inverse_norms(values[:, None].expand(5, 4).contiguous().to(device))
    assert out[:4].tolist() == [0.0] * 4
    torch.testing.assert_close(out[4].item(), 5e10, rtol=1e-2, atol=0)


def test_inv_norm_of_denormal_halves(device: torch.device) -> None:
    """The smallest float16 is far above the floor, so the row still has a direction."""
    smallest = 2.0**-24
    x = torch.full((3, 4), smallest, dtype=torch.float16, device=device)
    torch.testing.assert_close(inverse_norms(x), torch.full((3,), 0.5 / smallest, device=device))


def test_statistics_against_the_dense_matrix(device: torch.device) -> None:
    x, y = features("weak", 80, 80, 16, torch.float64)
    x, y = x.to(device), y.to(device)
    out = symmetric(x, y, 14.3, return_stats=True)
    s = reference.similarity(x, y, 14.3, normalize=True)
    floor = reference.floor_of(torch.float64)
    positive = s.diagonal()
    for label, got, exact in (
        ("lse_img", out.lse_img, s.logsumexp(1)),
        ("lse_txt", out.lse_txt, s.logsumexp(0)),
        ("positive", out.positive, positive),
        ("accuracy_img", out.accuracy_img, (s.argmax(1) == torch.arange(80, device=device))),
        ("accuracy_txt", out.accuracy_txt, (s.argmax(0) == torch.arange(80, device=device))),
    ):
        exact = exact.double().mean() if label.startswith("accuracy") else exact
        assert not got.requires_grad
        assert_close(label, got, exact, exact, floor)
    assert out.strategy == "local"


def test_a_tie_is_no_correct_answer(device: torch.device) -> None:
    """A collapsed encoder, all rows equal, has accuracy zero."""
    x = normal(1, 6).expand(9, 6).to(device)
    out = symmetric(x, x, 14.3, return_stats=True)
    assert out.accuracy_img == 0
    assert out.accuracy_txt == 0
