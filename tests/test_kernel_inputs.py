"""What the tile kernels are given: precisions, strides, far rows, NaN, ties, and bad arguments."""

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
    inverse_norms,
    laid_out,
    matmul_precision,
    normal,
    one_way,
    step,
    symmetric,
)
from support import name as dtype_id

MIB = 1 << 20
DTYPES = pytest.mark.parametrize("dtype", kernels.DTYPES, ids=dtype_id)
EACH_LOSS = pytest.mark.parametrize("loss", LOSSES)
BOTH_WAYS = pytest.mark.parametrize("one_way", [False, True], ids=["symmetric", "one_way"])
OPS = torch.ops.infloss


@BOTH_WAYS
@pytest.mark.parametrize("kind", ["weak", "cone.9"])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_under_each_matmul_precision(
    precision: str, kind: str, one_way: bool, sm80: torch.device
) -> None:
    """Three TF32 products keep float32's accuracy, one keeps TF32's; the rule's floor follows."""
    keys = 600 if one_way else 300
    cases = [
        Case(*features(kind, 300, keys, 136, torch.float32, seed), one_way=one_way)
        for seed in range(DRAWS)
    ]
    with matmul_precision(precision):
        assert_exact(cases, sm80)


@BOTH_WAYS
@pytest.mark.parametrize("layout", ["packed", "transposed"])
def test_float32_under_matmul_precision_medium(
    layout: str, one_way: bool, sm80: torch.device
) -> None:
    """bfloat16 values in float32 keep the rule of bfloat16 features; gradients come in float32."""
    half = features("weak", 300, 300, 136, torch.bfloat16)
    sides = [side.float() for side in half]
    x, y = (side.T.contiguous().T if layout == "transposed" else side for side in sides)
    case = Case(x, y, one_way=one_way, reduction="none").to(sm80)
    in_half = Case(*half, one_way=one_way, reduction="none").to(sm80)
    with matmul_precision("medium"):
        ours = case.ours()
    dense, exact = in_half.dense(), in_half.exact()
    floor = reference.floor_of(torch.bfloat16)
    for label in ("loss", "dx", "dy"):
        out = getattr(ours, label)
        assert out.dtype == torch.float32
        rounded = getattr(dense, label).to(torch.bfloat16 if label != "loss" else torch.float32)
        assert_close(label, out, rounded, getattr(exact, label), floor)


def test_each_matmul_precision_has_products_of_its_own(sm80: torch.device) -> None:
    x, y = (side.to(sm80) for side in features("weak", 300, 300, 136, torch.float32))
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
    newer: str, older: str, matmul_setting: Any, sm80: torch.device
) -> None:
    x, y = (side.to(sm80) for side in features("weak", 300, 300, 136, torch.float32))
    with matmul_precision(older):
        expected = step(symmetric, x, y, 14.3)
    matmul_setting.fp32_precision = newer
    assert_same(step(symmetric, x, y, 14.3), expected)


@DTYPES
@pytest.mark.parametrize("dim", [33, 64, 65])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_no_bit(
    layout: str, dim: int, dtype: torch.dtype, sm80: torch.device
) -> None:
    """Whether rows are read where they lie or from a copy.

    Without normalisation, since the sum of a row's squares may take another order.
    """
    x, y = (laid_out(layout, 300, dim, seed, dtype, sm80) for seed in (0, 1))
    packed = [view.clone(memory_format=torch.contiguous_format) for view in (x, y)]

    def loss(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return symmetric(a, b, s, normalize=False, reduction="none")

    upstream = normal(300).to(sm80)
    viewed, expected = (step(loss, *sides, dim**-0.5, upstream) for sides in ((x, y), packed))
    assert_same(viewed, expected)


# a constant row has no gradient under normalisation, only rounding
NORMALISABLE = [layout for layout in LAYOUTS if layout != "one column expanded"]


@DTYPES
@BOTH_WAYS
@pytest.mark.parametrize("layout", NORMALISABLE)
def test_normalised_rows_of_any_strides(
    layout: str, one_way: bool, dtype: torch.dtype, sm80: torch.device
) -> None:
    """The projection of a gradient reads the caller's rows, whatever the products read."""
    cases = [
        Case(
            laid_out(layout, 200, 33, seed, dtype, sm80),
            normal(200, 33, seed=50 + seed, dtype=dtype),
            one_way=one_way,
        )
        for seed in range(DRAWS)
    ]
    assert_exact(cases, sm80)


@DTYPES
@pytest.mark.parametrize("view", ["every other", "expanded"])
def test_targets_of_any_stride(view: str, dtype: torch.dtype, sm80: torch.device) -> None:
    x, y = (side.to(sm80) for side in features("weak", 200, 300, 24, dtype))
    columns = torch.randint(300, (400,), generator=torch.Generator().manual_seed(0)).to(sm80)
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
    dtype: torch.dtype, one_way: bool, sm80: torch.device
) -> None:
    """B * B > 2**32 and, in bfloat16, row starts beyond 2**31 elements (case 23).

    Only a few pairs have weight, so that their own rows and columns of S give every gradient.
    """
    batch, dim, wide = 70_000, 8, 32_768
    if torch.cuda.get_device_properties(sm80).total_memory < 24 << 30:
        pytest.skip("needs 24 GiB of device memory")
    x, y = (side.to(sm80) for side in features("weak", batch, batch, dim, dtype))
    if dtype == torch.bfloat16:
        assert batch * wide > 2**31
        base = torch.empty(batch, wide, dtype=dtype, device=sm80)
        base[:, :dim], base[:, -dim:] = x, y
        x, y = base[:, :dim], base[:, -dim:]
    rows = torch.tensor([0, 127, 23_169, 46_341, 65_535, 65_536, 69_998, 69_999], device=sm80)
    upstream = torch.zeros(batch, device=sm80)
    upstream[rows] = torch.linspace(1, 2, len(rows), device=sm80)
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
    sm80: torch.device,
) -> None:
    """Losses one by one and gradients row by row; the row lies in a second tile.

    An infinite float32 value is split into two TF32 terms, infinity and NaN, so that it poisons
    what it meets where dense maths may still give an infinite or vanishing term.
    """
    sides = list(features("weak", 300, 300, 24, dtype))
    sides[side][130, 5] = value
    one_way = loss is not symmetric
    case = Case(*sides, 10.0, one_way, normalize=normalize, reduction="none", upstream=1.0)
    ours, dense = case.to(sm80).ours(), case.to(sm80).dense()
    assert dense.loss.isnan().any()
    split = dtype == torch.float32 and value in (INF, -INF)
    for label in ("loss", "dx", "dy", "dscale"):
        out, expected = (getattr(outputs, label).isnan() for outputs in (ours, dense))
        if out.ndim == 2:
            out, expected = out.any(1), expected.any(1)
        agree = torch.equal(out | expected, out) if split else torch.equal(out, expected)
        assert agree, f"{label}: {out.sum()} rows, not {expected.sum()}"


@DTYPES
@pytest.mark.parametrize("path", ["portable", "sm80"])
def test_ties_are_no_correct_answers(path: str, dtype: torch.dtype, sm80: torch.device) -> None:
    """Each of a pair of equal rows ties with the other, within a tile and across tiles."""
    x, _ = features("unrelated", 300, 300, 32, dtype)
    for copy, row in ((200, 5), (70, 68), (299, 140)):
        x[copy] = x[row]
    x = x.to(sm80)
    with infloss.use_path(path):
        out = symmetric(x, x, 14.3, return_stats=True)
        one = one_way(x, x, 14.3, return_stats=True)
    for accuracy in (out.accuracy_img, out.accuracy_txt, one.accuracy):
        assert round(accuracy.item() * 300, 3) == 294


def lse_out_arguments(device: torch.device) -> dict[str, Any]:
    """A valid call of the compiled forward, which without a workspace only says what it needs."""
    x, y = (normal(6, 8, seed=seed, dtype=torch.bfloat16).to(device) for seed in (0, 1))
    stat = torch.empty(12, device=device)
    return {
        "x": x,
        "y": y,
        "logit_scale": torch.tensor(3.0, device=device),
        "x_inv_norm": inverse_norms(x),
        "y_inv_norm": inverse_norms(y),
        "target": None,
        "target_offset": 0,
        "target_stride": 1,
        "tf32": False,
        "limit": MIB,
        "row_stats": stat,
        "col_stats": stat.clone(),
        "positive": stat[:6].clone(),
        "row_hardest": None,
        "col_hardest": None,
        "workspace": None,
    }


BAD_ARGUMENTS: dict[str, tuple[str, Callable[[dict[str, Any]], Tensor], str]] = {
    "other dtype": ("y", lambda a: a["y"].half(), "y: expected the dtype of x"),
    "other feature size": ("y", lambda a: a["y"][:, :7], "y: expected 2 dimensions"),
    "features on the CPU": ("y", lambda a: a["y"].cpu(), "y: expected the device of x"),
    "column stride": ("y", lambda a: normal(8, 6).to(a["y"]).T, "y: expected column stride 1"),
    "unaligned rows": ("y", lambda a: normal(6, 9).to(a["y"])[:, :8], "y: .* 16-byte boundaries"),
    "unaligned start": ("y", lambda a: normal(6, 16).to(a["y"])[:, 1:9], "y: .* 16-byte"),
    "scale on the CPU": ("logit_scale", lambda a: torch.tensor(3.0), "logit_scale: .* device of x"),
    "half norms": ("x_inv_norm", lambda a: a["x_inv_norm"].half(), "x_inv_norm: .* ScalarType"),
    "norms of other rows": ("y_inv_norm", lambda a: a["y_inv_norm"][:5], "y_inv_norm: .* of 6"),
    "strided norms": ("x_inv_norm", lambda a: a["row_stats"][::2], "x_inv_norm: .* contiguous"),
    "int32 target": ("target", lambda a: torch.zeros(6).to(a["y"].device).int(), "target: "),
    "columns with targets": (
        "target",
        lambda a: torch.zeros(6, dtype=torch.int64, device=a["y"].device),
        "col_stats: expected none with an explicit target",
    ),
    "short statistics": ("row_stats", lambda a: a["row_stats"][:11], "row_stats: .* of 12"),
    "small workspace": (
        "workspace",
        lambda a: torch.empty(16, dtype=torch.uint8, device=a["y"].device),
        "workspace: expected .* bytes, got 16",
    ),
}


@pytest.mark.parametrize(("name", "bad", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_the_compiled_forward_refuses_what_it_cannot_read(
    name: str, bad: Callable[[dict[str, Any]], Tensor], message: str, sm80: torch.device
) -> None:
    """Whoever calls it; nothing is launched."""
    arguments = lse_out_arguments(sm80)
    assert OPS.lse_out(**arguments) > 16
    with pytest.raises(RuntimeError, match=message):
        OPS.lse_out(**{**arguments, name: bad(arguments)})
