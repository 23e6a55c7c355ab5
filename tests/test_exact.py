"""Every output of both losses against the dense float64 oracle, under the tolerance rule."""

import pytest
import torch

import infloss
from support import (
    DRAWS,
    FLOATS,
    KINDS,
    SCALES,
    Case,
    assert_exact,
    features,
    matmul_precision,
    normal,
)
from support import name as dtype_id

MIB = 1 << 20
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)


@DTYPES
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_contrastive_loss(
    kind: str, scale: float, dtype: torch.dtype, device: torch.device
) -> None:
    cases = [Case(*features(kind, 96, 96, 64, dtype, seed), scale) for seed in range(DRAWS)]
    assert_exact(cases, device)


@DTYPES
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_info_nce_square(kind: str, scale: float, dtype: torch.dtype, device: torch.device) -> None:
    cases = [
        Case(*features(kind, 64, 64, 48, dtype, seed), scale, one_way=True) for seed in range(DRAWS)
    ]
    assert_exact(cases, device)


@DTYPES
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_info_nce_with_three_keys_a_query(
    kind: str, scale: float, dtype: torch.dtype, device: torch.device
) -> None:
    cases = [
        Case(*features(kind, 40, 120, 48, dtype, seed), scale, one_way=True)
        for seed in range(DRAWS)
    ]
    assert_exact(cases, device)


@DTYPES
@pytest.mark.parametrize(("queries", "keys"), [(90, 37), (37, 90), (5, 1)])
def test_info_nce_with_shared_and_unsorted_targets(
    queries: int, keys: int, dtype: torch.dtype, device: torch.device
) -> None:
    cases = []
    for seed in range(DRAWS):
        x, y = normal(queries, 33, seed=seed), normal(keys, 33, seed=100 + seed)
        target = torch.randint(keys, (queries,), generator=torch.Generator().manual_seed(seed))
        cases.append(Case(x.to(dtype), y.to(dtype), one_way=True, target=target))
    assert_exact(cases, device)


@DTYPES
@pytest.mark.parametrize("one_way", [False, True], ids=["symmetric", "one_way"])
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_rows_of_any_norm_without_normalisation(
    scale: float, one_way: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Norms from 0.01 to 100: logits from nothing to 10,000."""
    cases = []
    for seed in range(DRAWS):
        x, y = features("weak", 80, 80, 40, torch.float64, seed)
        norms = 10 ** (normal(2, 80, 1, seed=seed).clamp(-2, 2))
        x, y = (x * norms[0]).to(dtype), (y * norms[1]).to(dtype)
        cases.append(Case(x, y, scale, one_way=one_way, normalize=False))
    assert_exact(cases, device)


@DTYPES
@pytest.mark.parametrize("one_way", [False, True], ids=["symmetric", "one_way"])
def test_normalisation_of_rows_of_any_norm(
    one_way: bool, dtype: torch.dtype, device: torch.device
) -> None:
    cases = []
    for seed in range(DRAWS):
        x, y = features("weak", 80, 80, 40, torch.float64, seed)
        norms = 10 ** (normal(2, 80, 1, seed=seed).clamp(-1, 2))
        x, y = (x * norms[0]).to(dtype), (y * norms[1]).to(dtype)
        cases.append(Case(x, y, one_way=one_way))
    assert_exact(cases, device)


@DTYPES
@pytest.mark.parametrize("one_way", [False, True], ids=["symmetric", "one_way"])
def test_zero_rows_have_similarity_zero_and_zero_gradient(
    one_way: bool, dtype: torch.dtype, device: torch.device
) -> None:
    cases = []
    for seed in range(DRAWS):
        x, y = features("weak", 40, 40, 16, dtype, seed)
        x[3], y[3], x[5], y[9] = 0, 0, 0, 0
        if dtype != torch.float16:  # cannot hold such a value
            x[11] = 1e-14
        cases.append(Case(x, y, one_way=one_way))
    assert_exact(cases, device)
    dead_x = [3, 5] if dtype == torch.float16 else [3, 5, 11]
    ours = cases[0].to(device).ours()
    assert not ours.dx[dead_x].any()
    assert not ours.dy[[3, 9]].any()


@DTYPES
@pytest.mark.parametrize("one_way", [False, True], ids=["symmetric", "one_way"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reduction_under_a_grad_scaler(
    reduction: str, one_way: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """The upstream gradient, 65536 times per-sample weights, is honoured (case 17)."""
    size = 72
    cases = []
    for seed in range(DRAWS):
        x, y = features("weak", size, size, 32, dtype, seed)
        weights = normal(size, seed=500 + seed).abs() / size * 65536
        upstream = {"mean": 65536.0, "sum": 65536.0 / size, "none": weights}[reduction]
        cases.append(Case(x, y, 5.0, one_way, reduction=reduction, upstream=upstream))
    assert_exact(cases, device)


@DTYPES
def test_some_pairs_weighted_zero_or_negative(dtype: torch.dtype, device: torch.device) -> None:
    cases = []
    for seed in range(DRAWS):
        weights = normal(50, seed=500 + seed).clamp_min(-0.5).round(decimals=0) * 100
        x, y = features("weak", 50, 50, 32, dtype, seed)
        cases.append(Case(x, y, reduction="none", upstream=weights))
    assert_exact(cases, device)


@DTYPES
@pytest.mark.parametrize("kind", ["weak", "cone.99"])
@pytest.mark.parametrize("batch", [70, 513])
def test_ragged_edges_of_small_tiles(
    batch: int, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    """A workspace of 1 MiB cuts the batch into many tiles, the last of them ragged."""
    cases = [Case(*features(kind, batch, batch, 33, dtype, seed)) for seed in range(DRAWS)]
    with infloss.workspace_limit(MIB):
        assert_exact(cases, device)


@DTYPES
@pytest.mark.parametrize("batch", [512, 1025])
def test_edges_of_the_preferred_tile(batch: int, dtype: torch.dtype, device: torch.device) -> None:
    case = Case(*features("weak", batch, batch, 64, dtype), reduction="none")
    assert_exact([case], device, scalars=False)


@DTYPES
@pytest.mark.parametrize(("queries", "keys"), [(513, 1026), (1030, 515)])
def test_rectangles_that_exceed_a_tile(
    queries: int, keys: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, y = features("unrelated", queries, keys, 24, dtype)
    target = torch.arange(queries).flip(0) % keys
    case = Case(x, y, one_way=True, target=target, reduction="none")
    assert_exact([case], device, scalars=False)


def test_float32_under_matmul_precision_high(cuda: torch.device) -> None:
    """'high' lets float32 products run in TF32; the dense comparison stays true float32."""
    cases = [Case(*features("weak", 200, 200, 128, torch.float32, seed)) for seed in range(DRAWS)]
    with matmul_precision("high"):
        assert_exact(cases, cuda)
