"""What users of such libraries reported, one small test each.

The numbers are those of the project's list of cases; only the cases of one process are here. What
needs many shapes, compilation or memory in depth has a file of its own, which names the case too.
"""

import math
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import infloss
from infloss import reference, world
from support import (
    DRAWS,
    FLOATS,
    LOSSES,
    Case,
    Loss,
    assert_close,
    assert_exact,
    assert_same,
    features,
    normal,
    step,
    symmetric,
    unit,
)
from support import name as dtype_id

DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
EACH_LOSS = pytest.mark.parametrize("loss", LOSSES)
FLOOR_32 = reference.floor_of(torch.float32)
FLOOR_64 = reference.floor_of(torch.float64)


@pytest.fixture
def world_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An initialised process group of two ranks, as far as the package can see."""
    if not torch.distributed.is_available():
        pytest.skip("needs torch.distributed")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(world, "_warned", False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch_on(device: torch.device, kind: str = "weak", size: int = 12) -> tuple[Tensor, Tensor]:
    x, y = features(kind, size, size, 8, torch.float32)
    return x.to(device), y.to(device)


@pytest.mark.filterwarnings("ignore::UserWarning")
@EACH_LOSS
def test_labels_are_not_offset_by_rank_without_a_group(
    loss: Loss, device: torch.device, world_of_two: None
) -> None:
    """Case 6: on rank 1 of an initialised world, group=None still means local pairs."""
    case = Case(*batch_on(device), one_way=loss is not symmetric, reduction="none")
    assert_close("loss", case.ours().loss, case.dense().loss, case.exact().loss, FLOOR_32)


@EACH_LOSS
def test_local_negatives_in_a_larger_world_are_announced_once(
    loss: Loss, device: torch.device, world_of_two: None
) -> None:
    """Case 7: a clear warning that points at the caller, and only one."""
    x, y = batch_on(device)
    with pytest.warns(UserWarning, match=r"group is None in a world of 2 ranks") as caught:
        loss(x, y, 14.3)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(x, y, 14.3)


def test_the_warning_points_at_the_caller(device: torch.device, world_of_two: None) -> None:
    """Case 7: the line it names is the user's own."""
    x, y = batch_on(device)
    with pytest.warns(UserWarning, match="infloss: group is None") as caught:
        infloss.contrastive_loss(x, y)
    assert caught[0].filename == __file__


@EACH_LOSS
def test_local_negatives_are_announced_from_a_compiled_graph(
    loss: Loss, device: torch.device, world_of_two: None
) -> None:
    """Case 7: warnings.warn itself would break the graph."""
    x, y = batch_on(device)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match=r"group is None in a world of 2 ranks"):
        compiled(x, y, 14.3)


def test_no_warning_in_a_world_of_one(
    device: torch.device, world_of_two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 7: nothing is missing there."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = infloss.contrastive_loss(*batch_on(device))
    assert torch.isfinite(loss)


@pytest.mark.parametrize("frozen", ["x", "y", "both"])
@EACH_LOSS
def test_a_locked_tower_trains(loss: Loss, frozen: str, device: torch.device) -> None:
    """Case 9: what is learned gets the same gradient; what is frozen gets none."""
    x, y = batch_on(device)
    full = step(loss, x, y, 14.3)
    x.requires_grad_(frozen == "y")
    y.requires_grad_(frozen == "x")
    scale = torch.tensor(14.3, device=device, requires_grad=True)
    loss(x, y, scale).backward()
    assert_same([scale.grad], [full.dscale])
    for side, label, expected in ((x, "x", full.dx), (y, "y", full.dy)):
        if frozen in (label, "both"):
            assert side.grad is None
        else:
            assert_same([side.grad], [expected])


@DTYPES
@pytest.mark.parametrize("scale", [100.0, 1000.0])
@pytest.mark.parametrize("kind", ["identical", "unrelated"])
def test_a_large_scale_neither_overflows_nor_is_clamped(
    kind: str, scale: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Case 11: past exp's range, the value is the oracle's for that very scale."""
    cases = [Case(*features(kind, 32, 32, 16, dtype, seed), scale) for seed in range(DRAWS)]
    assert_exact(cases, device)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_nothing_is_clamped_silently(as_tensor: bool, device: torch.device) -> None:
    """Case 11: without normalisation the loss of a hopeless pair grows with the scale."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=device)
    y = x.flip(0)
    for scale in (100.0, 1000.0, 1e6):
        given = torch.tensor(scale, device=device) if as_tensor else scale
        assert infloss.contrastive_loss(x, y, given).item() == scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@EACH_LOSS
def test_half_precision_survives_training_steps(
    loss: Loss, dtype: torch.dtype, device: torch.device
) -> None:
    """Case 12: the log-sum-exp is float32, so that no step ends in NaN."""
    x, y = (side.to(device, dtype) for side in batch_on(device, size=8))
    for _ in range(5):
        out = step(loss, x, y, 100.0)
        assert out.loss.dtype == torch.float32
        assert all(torch.isfinite(value).all() for value in out)
        x, y = x - 0.1 * out.dx, y - 0.1 * out.dy


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("inside", [True, False])
def test_float32_constants_do_not_break_autocast(
    half: torch.dtype, inside: bool, device: torch.device
) -> None:
    """Case 13: forward under autocast, backward inside or outside it."""
    x, y = (side.requires_grad_() for side in batch_on(device))
    with torch.autocast(device.type, dtype=half):
        loss = infloss.contrastive_loss(x, y)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert loss.dtype == torch.float32
    assert x.grad.dtype == torch.float32
    assert torch.isfinite(x.grad).all()
    assert x.grad.any()


@EACH_LOSS
def test_ties_get_an_exact_gradient(loss: Loss, device: torch.device) -> None:
    """Case 14: the maximum is a constant to autograd, also where several entries attain it."""
    x, y = (side.double() for side in batch_on(device, size=70))
    x[1:4], y[1:4] = x[0], y[0]
    case = Case(x, y, 3.0, one_way=loss is not symmetric, reduction="none")
    assert_exact([case], device, scalars=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_half_gradients_do_not_drift_over_many_tiles(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Case 15: accumulators are float32; a sum of hundreds of rounded parts would show."""
    case = Case(*features("cone.9", 1500, 1500, 32, dtype), reduction="none", upstream=100.0)
    with infloss.workspace_limit(1 << 20):
        assert_exact([case], device, scalars=False)


@pytest.mark.parametrize("y_dtype", [torch.float32, torch.float64, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_towers_of_two_dtypes(
    x_dtype: torch.dtype, y_dtype: torch.dtype, device: torch.device
) -> None:
    """Case 16: promoted like any torch op; each gradient in its own input's dtype."""
    cases = []
    for seed in range(DRAWS):
        x, y = features("weak", 40, 40, 24, torch.float64, seed)
        cases.append(Case(x.to(x_dtype), y.to(y_dtype)))
    assert_exact(cases, device)


@EACH_LOSS
def test_weights_times_a_grad_scaler_are_honoured(
    loss: Callable[..., Tensor], device: torch.device
) -> None:
    """Case 17: weighted pairs are the weighted sum of single pairs' gradients, times 65536."""
    x, y = (side.double() for side in batch_on(device, size=5))
    weights = torch.tensor([0.0, 1.0, 0.5, -2.0, 3.0], dtype=torch.float64, device=device)

    def per_pair(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return loss(a, b, s, reduction="none")

    together = step(per_pair, x, y, 14.3, weights * 65536)
    single = [step(per_pair, x, y, 14.3, one_hot) for one_hot in torch.eye(5, device=device)]
    for label in ("dx", "dy", "dscale"):
        parts = [w * 65536 * getattr(out, label) for w, out in zip(weights, single, strict=True)]
        expected = torch.stack(parts).sum(0)
        assert_close(label, getattr(together, label), expected, expected, FLOOR_64)


@pytest.mark.parametrize("kind", ["identical", "cone.99"])
@DTYPES
def test_the_loss_of_matched_pairs_is_never_negative(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Case 18: the positive and the log-sum-exp come from the same arithmetic."""
    x, _ = features(kind, 1024, 1024, 768, dtype)
    x = x.to(device)
    losses = infloss.contrastive_loss(x, x, 100.0, reduction="none")
    assert (losses >= 0).all()
    assert (infloss.info_nce(x, x, logit_scale=100.0, reduction="none") >= 0).all()


def test_no_row_is_lost_to_a_fixed_maximum(device: torch.device) -> None:
    """Case 19: unrelated unit rows at scale 100, where every similarity is far below 100."""
    x, y = features("unrelated", 4096, 4096, 64, torch.float32)
    x, y = x.to(device), y.to(device)
    losses = infloss.contrastive_loss(x, y, 100.0, reduction="none")
    with torch.no_grad():
        exact = reference.contrastive_loss(x.double(), y.double(), 100.0, nll=reference.exact_nll)
    assert ((losses - exact).abs() <= 1e-4 * exact.abs()).all()


def views_of(packed: Tensor) -> dict[str, Tensor]:
    """The same values under other strides."""
    doubled_rows = packed.repeat_interleave(2, 0)
    doubled_columns = packed.repeat_interleave(2, 1)
    padded = torch.cat((packed, torch.full_like(packed, torch.nan)), 1)
    return {
        "x.T": packed.T.contiguous().T,
        "x[::2]": doubled_rows[::2],
        "x[:, ::2]": doubled_columns[:, ::2],
        "column slice": padded[:, : packed.size(1)],
    }


@pytest.mark.parametrize("view", ["x.T", "x[::2]", "x[:, ::2]", "column slice"])
@EACH_LOSS
def test_strides_are_honoured(loss: Loss, view: str, device: torch.device) -> None:
    """Case 20: views as Matryoshka slices and transposes make them; what lies between is unread."""
    x, y = (side.double() for side in batch_on(device))
    packed, viewed = step(loss, x, y, 14.3), step(loss, views_of(x)[view], views_of(y)[view], 14.3)
    for label in packed._fields:
        expected = getattr(packed, label)
        assert_close(label, getattr(viewed, label), expected, expected, FLOOR_64)


def test_one_key_expanded_to_many(device: torch.device) -> None:
    """Case 20: stride 0 between rows; the gradient of the one row is the sum of all."""
    x, y = (side.double() for side in batch_on(device))
    row = y[:1].clone().requires_grad_()
    infloss.contrastive_loss(x, row.expand(12, 8)).backward()
    rows = y[:1].repeat(12, 1).requires_grad_()
    infloss.contrastive_loss(x, rows).backward()
    expected = rows.grad.sum(0, keepdim=True)
    assert_close("dy", row.grad, expected, expected, FLOOR_64)


@pytest.mark.parametrize("dim", [7, 100, 1001])
def test_any_feature_size_through_the_raw_op(dim: int, device: torch.device) -> None:
    """Cases 21 and 22: no multiple of 8 or of a tile is asked for."""
    x = unit(normal(20, dim)).to(device, torch.bfloat16)
    scale = torch.tensor(14.3, device=device)
    arguments = (
        x,
        x,
        scale,
        None,
        None,
        None,
        0,
        1,
        True,
        False,
        False,
        1 << 20,
        "auto",
        "highest",
    )
    row_stats, _, positive, _, _ = torch.ops.infloss.lse(*arguments)
    s = reference.similarity(x.double(), x.double(), 14.3, normalize=False)
    lse = row_stats[0] + row_stats[1].log()
    assert_close("lse", lse, s.logsumexp(1), s.logsumexp(1), FLOOR_32)
    assert_close("positive", positive, s.diagonal(), s.diagonal(), FLOOR_32)


@EACH_LOSS
def test_an_empty_batch_is_an_error(loss: Loss, device: torch.device) -> None:
    """Case 24: not NaN."""
    empty = torch.empty(0, 8, device=device)
    with pytest.raises(ValueError, match=r"expected at least one row, got shape \[0, 8\]"):
        loss(empty, empty, 14.3)


@EACH_LOSS
def test_a_batch_of_one_is_no_error(loss: Loss, device: torch.device) -> None:
    """Case 24: a last batch of one pair adds nothing."""
    out = step(loss, *batch_on(device, size=1), 14.3)
    assert not any(value.any() for value in out)


@DTYPES
@pytest.mark.parametrize("limit", [1 << 20, 256 << 20])
@EACH_LOSS
def test_padding_never_enters_a_maximum_or_a_sum(
    loss: Loss, limit: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Case 25: B=70 with all logits near -1000; a padded 0 would win every maximum."""
    x = unit(normal(70, 16)).double() + 1
    y = -(unit(normal(70, 16, seed=1)).double() + 1)
    case = Case(
        x.to(dtype),
        y.to(dtype),
        64.0,
        one_way=loss is not symmetric,
        normalize=False,
        reduction="none",
        upstream=1.0,
    )
    assert (reference.similarity(case.x, case.y, 64.0, False) < -500).all()
    with infloss.workspace_limit(limit):
        assert_exact([case], device, scalars=False)


def test_a_learnable_scale_needs_no_process_group(device: torch.device) -> None:
    """Case 26: on one device."""
    module = infloss.ContrastiveLoss(learnable=True).to(device)
    module(*batch_on(device)).backward()
    assert math.isfinite(module.log_logit_scale.grad.item())
    assert module.log_logit_scale.grad != 0


def test_a_step_compiles_without_a_graph_break(device: torch.device, fresh_dynamo: None) -> None:
    """Case 27: dynamo's own account of the graph."""
    x, y = (side.requires_grad_() for side in batch_on(device))
    explained = torch._dynamo.explain(infloss.contrastive_loss)(x, y)
    assert explained.graph_count == 1
    assert explained.graph_break_count == 0
