"""The tile kernels by themselves: edges of tiles, panels, exponentials, bits.

What both losses promise of any path is asked of the kernels too, by the tests that take a device.
Here are the shapes and values at which a kernel takes another way through its code.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import infloss
from infloss import config, kernels, reference
from support import (
    DRAWS,
    LOSSES,
    Case,
    assert_close,
    assert_exact,
    assert_same,
    captured_step,
    features,
    inverse_norms,
    normal,
    step,
)
from support import name as dtype_id

MIB = 1 << 20
DTYPES = pytest.mark.parametrize("dtype", kernels.DTYPES, ids=dtype_id)
BOTH_WAYS = pytest.mark.parametrize("one_way", [False, True], ids=["symmetric", "one_way"])

# Tiles have 128 or 256 rows or columns, stages 32 or 64 features, copies 4 or 8 of them; a draw
# for each, since a handful of values is judged over the draws.
DIMS = (1, 7, 8, 63, 64, 65, 136, 200)
BATCHES = (1, 127, 128, 129, 255, 256, 257, 640)
RECTANGLES = (
    (1, 640),
    (640, 1),
    (127, 129),
    (129, 255),
    (128, 256),
    (256, 128),
    (255, 257),
    (257, 127),
    (640, 127),
)
assert len(DIMS) >= DRAWS


def edge_cases(
    rows: int,
    keys: int,
    dtype: torch.dtype,
    target: Callable[[int], Tensor] | None = None,
    dims: Sequence[int] = DIMS,
) -> list[Case]:
    """A case for each of ``dims``, one-way with the target of a draw; symmetric without targets."""
    cases = []
    for seed, dim in enumerate(dims):
        normalize = dim > 1  # one normalised feature has no gradient, only rounding
        cases.append(
            Case(
                normal(rows, dim, seed=2 * seed, dtype=dtype),
                normal(keys, dim, seed=2 * seed + 1, dtype=dtype),
                14.3 if normalize else 1.0,
                one_way=target is not None,
                target=None if target is None else target(seed),
                normalize=normalize,
                reduction="none",
                upstream=64.0 / rows,  # whose gradients float16 holds
            )
        )
    return cases


@DTYPES
@pytest.mark.parametrize("batch", BATCHES)
def test_edges_of_square_tiles(batch: int, dtype: torch.dtype, kernel_device: torch.device) -> None:
    assert_exact(edge_cases(batch, batch, dtype), kernel_device)


@DTYPES
@pytest.mark.parametrize(("queries", "keys"), RECTANGLES)
def test_edges_of_rectangles(
    queries: int, keys: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """With targets in any order, some shared and some keys nobody's."""

    def target(seed: int) -> Tensor:
        return torch.randint(keys, (queries,), generator=torch.Generator().manual_seed(seed))

    assert_exact(edge_cases(queries, keys, dtype, target), kernel_device)


@DTYPES
@pytest.mark.parametrize(("queries", "keys"), RECTANGLES)
def test_one_key_that_all_queries_share(
    queries: int, keys: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """The last, the first and a middle key, by turns.

    That key's gradient is most of dy, so there are features enough to average its luck over.
    """
    places = (keys - 1, 0, keys // 2)
    dims = [dim for dim in DIMS if dim > 8] * 2

    def target(seed: int) -> Tensor:
        return torch.full((queries,), places[seed % len(places)])

    assert_exact(edge_cases(queries, keys, dtype, target, dims), kernel_device)


@DTYPES
@BOTH_WAYS
@pytest.mark.parametrize("frozen", ["", "x", "y", "xy"], ids=lambda sides: f"frozen {sides}")
def test_many_panels_of_coefficients(
    frozen: str, one_way: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """1 MiB holds a fraction of S in either direction; what is frozen changes the panels."""
    rows, keys = (1100, 2200) if one_way else (1500, 1500)
    cases = [
        Case(*features("cone.9", rows, keys, 72, dtype, seed), one_way=one_way, frozen=frozen)
        for seed in range(DRAWS)
    ]
    with infloss.workspace_limit(MIB):
        assert_exact(cases, kernel_device)


@DTYPES
def test_many_panels_of_statistics(dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Forward needs a batch of thousands before its slots outgrow 1 MiB in both directions."""
    batch, dim, scale = 6700, 136, 30.0
    x, y = (side.to(kernel_device) for side in features("weak", batch, batch, dim, dtype))
    with infloss.workspace_limit(MIB):
        out = infloss.contrastive_loss(x, y, scale, reduction="none", return_stats=True)
    dense, exact = (
        reference.similarity(x.to(wide), y.to(wide), scale, normalize=True)
        for wide in (torch.float32, torch.float64)
    )
    floor = reference.floor_of(torch.float32)
    for label, got, values in (
        ("lse_img", out.lse_img, [s.logsumexp(1) for s in (dense, exact)]),
        ("lse_txt", out.lse_txt, [s.logsumexp(0) for s in (dense, exact)]),
        ("positive", out.positive, [s.diagonal() for s in (dense, exact)]),
    ):
        assert_close(label, got, *values, floor)
    own = torch.arange(batch, device=kernel_device)
    for got, best in ((out.accuracy_img, exact.argmax(1)), (out.accuracy_txt, exact.argmax(0))):
        right = (best == own).double().mean().item()
        assert abs(got.item() - right) <= 2 / batch  # near-ties may fall either way
        assert 0.01 < right < 0.99


# Rows and columns of a tile share one exponential where their maxima lie close enough together;
# elsewhere each takes its own. Each returns x and y in float64, the scale, and normalize.
Batch = tuple[Tensor, Tensor, float, bool]


def rows_of_any_norm(seed: int) -> Batch:
    x, y = features("weak", 600, 600, 48, torch.float64, seed)
    norms = 10 ** normal(2, 600, 1, seed=seed, dtype=torch.float64).clamp(-2, 2)
    return x * norms[0], y * norms[1], 10.0, False


def one_outlier(seed: int) -> Batch:
    x, y = features("weak", 2000, 2000, 48, torch.float64, seed)
    x[777] *= 1e3
    return x, y, 10.0, False


def opposite_rows(seed: int) -> Batch:
    """Every other row points away from all keys."""
    x, y = features("cone.9", 600, 600, 48, torch.float64, seed)
    x[::2] *= -1
    return x, y, 100.0, True


def opposite_pairs(seed: int) -> Batch:
    x, _ = features("cone.9", 600, 600, 48, torch.float64, seed)
    return x, -x, 100.0, True


def some_far_tiles(seed: int) -> Batch:
    """Rows from 300 on are 300 times as long: some tiles can share, some cannot, one is mixed."""
    x, y = features("weak", 600, 600, 48, torch.float64, seed)
    x[300:] *= 300
    return x, y, 1.0, False


def one_long_row(norm: float) -> Callable[[int], Batch]:
    """All but one row's similarities lie within 1 of 0, far below what that row's may be.

    One reference for all of S is kept 96 powers of two below that bound, and serves a row down to
    2^-86: up to a norm of about 130.
    """

    def batch(seed: int) -> Batch:
        x, y = features("weak", 600, 600, 48, torch.float64, seed)
        x[77] *= norm
        return x, y, 1.0, False

    return batch


def one_row_turned_away(scale: float) -> Callable[[int], Batch]:
    """In a cone one row of x points away from all keys; no column is far below the bound.

    Its log-sum-exp lies almost 2 scale / ln 2 - log2(600) powers of two below: 174 at scale 64,
    which the reference serves, 191 at scale 70, which it does not.
    """

    def batch(seed: int) -> Batch:
        x, y = features("cone.99", 600, 600, 48, torch.float64, seed)
        x[77] *= -1
        return x, y, scale, True

    return batch


def at_scale(kind: str, scale: float) -> Callable[[int], Batch]:
    def batch(seed: int) -> Batch:
        return *features(kind, 600, 600, 48, torch.float64, seed), scale, True

    return batch


def lengths(x: Tensor, normalize: bool) -> Tensor:
    """[B] norms that the rows of [B, D] have in the similarities."""
    return x.new_ones(len(x)) if normalize else torch.linalg.vector_norm(x, dim=1)


SPREADS: dict[str, Callable[[int], Batch]] = {
    "any norm": rows_of_any_norm,
    "one outlier": one_outlier,
    "opposite rows": opposite_rows,
    "opposite pairs": opposite_pairs,
    "some far tiles": some_far_tiles,
    "one long row": one_long_row(120.0),
    "one row too long": one_long_row(145.0),
    "one row turned away": one_row_turned_away(64.0),
    "one row too far away": one_row_turned_away(70.0),
    "always shared": at_scale("unrelated", 1.0),
    "scale 100": at_scale("unrelated", 100.0),
    "scale 100, identical": at_scale("identical", 100.0),
    "scale 200": at_scale("weak", 200.0),
    "scale 1000": at_scale("unrelated", 1000.0),
    "scale 1000, identical": at_scale("identical", 1000.0),
    "scale 1000, rolled": at_scale("rolled", 1000.0),
}

# whose gradients are too small for a float32
FORWARD_SPREADS = SPREADS | {"scale 200, identical": at_scale("identical", 200.0)}

# csrc/sm90/certify.cu: 96 powers of two of headroom, and 86 for the smallest sum that is relied on.
SERVED = 96 + 86
# spread -> how many rows and columns of the 600 lie farther below the bound than that
UNSERVED = {
    "always shared": (0, 0),
    "one long row": (0, 0),
    "one row turned away": (0, 0),
    "one row too far away": (1, 0),
    "opposite rows": (300, 0),
    "opposite pairs": (600, 600),
    "scale 1000": (600, 600),
}


@pytest.mark.parametrize("spread", UNSERVED)
def test_spreads_go_both_ways_through_hoppers_forward(spread: str) -> None:
    """Of the spreads themselves, on a CPU: else only one of both ways might be tested.

    Clear of the limit, so that rounded features go the same way.
    """
    for seed in range(DRAWS):
        x, y, scale, normalize = SPREADS[spread](seed)
        s = reference.similarity(x, y, scale, normalize=normalize)
        s.fill_diagonal_(-torch.inf)  # positives are left out
        bound = scale * lengths(x, normalize).max() * lengths(y, normalize).max()
        below = [(bound - s.logsumexp(dim)) / math.log(2) for dim in (1, 0)]
        assert all(((gap < SERVED - 5) | (gap > SERVED + 5)).all() for gap in below)
        assert tuple(int((gap > SERVED).sum()) for gap in below) == UNSERVED[spread]


@DTYPES
@BOTH_WAYS
@pytest.mark.parametrize("spread", SPREADS)
def test_shared_and_own_exponentials(
    spread: str, one_way: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    factor = 4096.0 if dtype == torch.float16 else 1.0
    cases = []
    for seed in range(DRAWS):
        x, y, scale, normalize = SPREADS[spread](seed)
        options: dict[str, Any] = {"normalize": normalize, "upstream": factor / len(x)}
        x, y = x.to(dtype), y.to(dtype)
        cases.append(Case(x, y, scale, one_way, reduction="none", **options))
    assert_exact(cases, kernel_device)


@DTYPES
@pytest.mark.parametrize("spread", FORWARD_SPREADS)
def test_the_statistics_of_every_row_and_column(
    spread: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """One by one: a norm over all of them would hide a row that went the wrong way."""
    x, y, scale, normalize = FORWARD_SPREADS[spread](0)
    x, y = x.to(kernel_device, dtype), y.to(kernel_device, dtype)
    inverse = (inverse_norms(x), inverse_norms(y)) if normalize else (None, None)
    row_stats, col_stats, *_ = torch.ops.infloss.lse(
        *(x, y, torch.tensor(scale, device=kernel_device), *inverse, None, 0, 1),
        *(True, True, False, MIB, config.requested_path(), "highest"),
    )
    x, y = x.double(), y.double()
    s = reference.similarity(x, y, scale, normalize=normalize)
    norms = [lengths(side, normalize) for side in (x, y)]
    for stats, dim, own, other in ((row_stats, 1, *norms), (col_stats, 0, *norms[::-1])):
        error = (stats[0] + stats[1].log() - s.logsumexp(dim)).abs()
        worst = (error / (1 + scale * own * other.max())).max().item()
        assert worst <= 1e-5, f"{worst:.1e} of what a similarity of its line may be"


@DTYPES
@pytest.mark.parametrize("loss", LOSSES)
def test_two_runs_and_a_replay_agree_bit_for_bit(
    loss: Callable[..., Any], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    x, y = (side.to(kernel_device) for side in features("cone.9", 3000, 3000, 200, dtype))
    scale = torch.tensor(14.3, device=kernel_device)
    first = step(loss, x, y, scale)
    assert_same(step(loss, x, y, scale), first)
    graph, outputs = captured_step(loss, tuple(leaf.requires_grad_() for leaf in (x, y, scale)))
    for _ in range(2):
        for output in outputs:
            output.zero_()
        graph.replay()
        assert_same(outputs, first)


@DTYPES
@pytest.mark.parametrize("loss", LOSSES)
def test_a_graph_chooses_its_exponentials_on_every_replay(
    loss: Callable[..., Any], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """At scale 1000 no reference serves unrelated rows; the device sees that, not the host."""
    x, y = (side.to(kernel_device) for side in features("unrelated", 700, 700, 72, dtype))
    scale = torch.tensor(14.3, device=kernel_device)
    graph, outputs = captured_step(loss, tuple(leaf.requires_grad_() for leaf in (x, y, scale)))
    for value in (1000.0, 14.3, 1000.0):
        with torch.no_grad():
            scale.fill_(value)
        graph.replay()
        assert_same(outputs, step(loss, x, y, value))


@DTYPES
@pytest.mark.parametrize("loss", LOSSES)
def test_a_graph_sees_one_row_turn_away_and_back(
    loss: Callable[..., Any], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """At one scale, new features alone decide; see one_row_turned_away."""
    x, y = (side.to(kernel_device) for side in features("cone.99", 700, 700, 72, dtype))
    scale = torch.tensor(70.0, device=kernel_device)
    graph, outputs = captured_step(loss, tuple(leaf.requires_grad_() for leaf in (x, y, scale)))
    for _ in range(3):
        with torch.no_grad():
            x[77].neg_()
        graph.replay()
        assert_same(outputs, step(loss, x, y, 70.0))


@DTYPES
@pytest.mark.parametrize("loss", LOSSES)
def test_statistics_agree_bit_for_bit(
    loss: Callable[..., Any], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Hardest negatives rule out shared exponentials; the loss is the same but for rounding."""
    x, y = (side.to(kernel_device) for side in features("cone.9", 3000, 3000, 200, dtype))
    first, second = (loss(x, y, 14.3, return_stats=True)[:-1] for _ in range(2))
    assert_same(first, second)
    plain = loss(x, y, 14.3)
    assert_close("loss", first[0], plain, plain.double(), reference.floor_of(torch.float32))
