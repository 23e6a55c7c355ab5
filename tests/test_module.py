"""infloss.ContrastiveLoss: its state, its bound, and training with it."""

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infloss
from infloss import reference
from support import assert_close, features, normal


@pytest.fixture
def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    x, y = features("weak", 24, 24, 8, torch.float32)
    return x.to(device), y.to(device)


def test_state_has_one_scalar_logarithm() -> None:
    state = infloss.ContrastiveLoss(20.0).state_dict()
    assert list(state) == ["log_logit_scale"]
    assert state["log_logit_scale"].shape == ()
    assert state["log_logit_scale"].dtype == torch.float32
    assert math.isclose(state["log_logit_scale"].item(), math.log(20.0), rel_tol=1e-6)


def test_default_is_the_temperature_of_clip() -> None:
    assert math.isclose(infloss.ContrastiveLoss().logit_scale.item(), 1 / 0.07, rel_tol=1e-6)


def test_a_learnable_scale_is_a_parameter() -> None:
    module = infloss.ContrastiveLoss(learnable=True)
    assert [name for name, _ in module.named_parameters()] == ["log_logit_scale"]
    assert not list(module.buffers())


def test_a_fixed_scale_is_a_buffer_under_the_same_key() -> None:
    module = infloss.ContrastiveLoss(5.0, learnable=False)
    assert not list(module.parameters())
    assert [name for name, _ in module.named_buffers()] == ["log_logit_scale"]
    module.load_state_dict(infloss.ContrastiveLoss(30.0).state_dict())
    assert math.isclose(module.logit_scale.item(), 30.0, rel_tol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("normalize", [True, False])
def test_equals_the_function(batch: tuple[Tensor, Tensor], normalize: bool, reduction: str) -> None:
    module = infloss.ContrastiveLoss(9.0, normalize=normalize, reduction=reduction)
    module.to(batch[0].device)
    scale = module.log_logit_scale.exp()
    expected = infloss.contrastive_loss(*batch, scale, normalize=normalize, reduction=reduction)
    assert torch.equal(module(*batch), expected)


def test_returns_statistics(batch: tuple[Tensor, Tensor]) -> None:
    module = infloss.ContrastiveLoss().to(batch[0].device)
    out = module(*batch, return_stats=True)
    assert isinstance(out, infloss.ContrastiveOutput)
    assert torch.equal(out.loss, module(*batch))


def test_gradient_of_the_logarithm(batch: tuple[Tensor, Tensor]) -> None:
    module = infloss.ContrastiveLoss(9.0, reduction="sum").to(batch[0].device)
    module(*batch).backward()

    def oracle(dtype: torch.dtype, nll: object) -> Tensor:
        log_scale = module.log_logit_scale.detach().to(dtype).requires_grad_()
        x, y = (side.to(dtype) for side in batch)
        reference.contrastive_loss(x, y, log_scale.exp(), nll=nll).sum().backward()
        return log_scale.grad

    dense = oracle(torch.float32, reference.dense_nll)
    exact = oracle(torch.float64, reference.exact_nll)
    floor = reference.floor_of(torch.float32)
    assert_close("dlog_logit_scale", module.log_logit_scale.grad, dense, exact, floor)


def test_the_bound_brings_the_parameter_back(batch: tuple[Tensor, Tensor]) -> None:
    module = infloss.ContrastiveLoss(90.0, max_logit_scale=100.0).to(batch[0].device)
    with torch.no_grad():
        module.log_logit_scale.fill_(math.log(500.0))
    loss = module(*batch)
    torch.testing.assert_close(module.logit_scale.item(), 100.0, rtol=1e-5, atol=0)
    expected = infloss.contrastive_loss(*batch, module.logit_scale)
    assert torch.equal(loss, expected)


def test_at_the_bound_the_gradient_stays_true(batch: tuple[Tensor, Tensor]) -> None:
    """A clamp inside the graph would stop it, and the scale could never come down again."""
    bounded = infloss.ContrastiveLoss(100.0, max_logit_scale=100.0).to(batch[0].device)
    free = infloss.ContrastiveLoss(100.0).to(batch[0].device)
    bounded(*batch).backward()
    free(*batch).backward()
    torch.testing.assert_close(bounded.log_logit_scale.grad, free.log_logit_scale.grad)
    assert bounded.log_logit_scale.grad > 0


def test_the_scale_comes_down_from_the_bound(batch: tuple[Tensor, Tensor]) -> None:
    """Weakly matched pairs want a scale far below 100."""
    module = infloss.ContrastiveLoss(100.0, max_logit_scale=100.0).to(batch[0].device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        module(*batch).backward()
        optimizer.step()
    assert module.logit_scale < 60


def test_no_bound_without_being_asked(batch: tuple[Tensor, Tensor]) -> None:
    module = infloss.ContrastiveLoss(1000.0).to(batch[0].device)
    module(*batch)
    assert math.isclose(module.logit_scale.item(), 1000.0, rel_tol=1e-5)


def test_evaluation_changes_no_state(batch: tuple[Tensor, Tensor]) -> None:
    module = infloss.ContrastiveLoss(90.0, max_logit_scale=100.0).to(batch[0].device).eval()
    with torch.no_grad():
        module.log_logit_scale.fill_(math.log(500.0))
    module(*batch)
    assert math.isclose(module.logit_scale.item(), 500.0, rel_tol=1e-5)


def test_training_lowers_the_loss(device: torch.device) -> None:
    torch.manual_seed(0)
    x, y = normal(64, 12).to(device), normal(64, 12, seed=1).to(device)
    towers = nn.ModuleList([nn.Linear(12, 32), nn.Linear(12, 32)]).to(device)
    module = infloss.ContrastiveLoss(max_logit_scale=100.0).to(device)
    optimizer = torch.optim.Adam([*towers.parameters(), *module.parameters()], lr=3e-2)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = module(towers[0](x), towers[1](y))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_moves_with_its_model_to_another_dtype(
    batch: tuple[Tensor, Tensor], dtype: torch.dtype
) -> None:
    """model.half() and the like convert the parameter too."""
    module = infloss.ContrastiveLoss(9.0, max_logit_scale=100.0).to(batch[0].device, dtype)
    x, y = (side.to(dtype).requires_grad_() for side in batch)
    loss = module(x, y)
    loss.backward()
    assert module.log_logit_scale.grad.dtype == dtype
    assert x.grad.dtype == dtype
    scale = module.log_logit_scale.detach().exp()
    assert torch.equal(loss.detach(), infloss.contrastive_loss(x, y, scale).detach())


@pytest.mark.parametrize("learnable", [True, False])
def test_survives_copy_and_pickle(batch: tuple[Tensor, Tensor], learnable: bool) -> None:
    module = infloss.ContrastiveLoss(
        9.0, learnable=learnable, max_logit_scale=50.0, normalize=False, reduction="sum"
    ).to(batch[0].device)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*batch), module(*batch))
        assert repr(other) == repr(module)


def test_survives_a_checkpoint(batch: tuple[Tensor, Tensor]) -> None:
    module = infloss.ContrastiveLoss(9.0).to(batch[0].device)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other = infloss.ContrastiveLoss(3.0).to(batch[0].device)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(*batch), module(*batch))


def test_describes_itself() -> None:
    text = repr(infloss.ContrastiveLoss(20.0, max_logit_scale=100.0, reduction="sum"))
    for part in ("logit_scale=20", "learnable=True", "max_logit_scale=100.0", "reduction='sum'"):
        assert part in text


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_not_positive_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"^logit_scale: expected a positive number, got"):
        infloss.ContrastiveLoss(bad)


@pytest.mark.parametrize("bad", [13.9, 0.0, -1.0, math.nan])
def test_a_bound_below_the_scale_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"^max_logit_scale: expected at least logit_scale = 14"):
        infloss.ContrastiveLoss(14.0, max_logit_scale=bad)


@pytest.mark.parametrize("option", ["reduction", "strategy", "grad_reduction"])
def test_an_unknown_choice_is_refused_at_construction(option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option}: expected one of .* got 'other'"):
        infloss.ContrastiveLoss(**{option: "other"})


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"logit_scale": "14"}, "logit_scale"),
        ({"logit_scale": True}, "logit_scale"),
        ({"max_logit_scale": "100"}, "max_logit_scale"),
        ({"learnable": "no"}, "learnable"),
        ({"normalize": 1}, "normalize"),
    ],
)
def test_options_of_a_wrong_type_are_refused(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(TypeError, match=f"^{argument}: expected"):
        infloss.ContrastiveLoss(**options)


def test_a_module_without_data_can_be_printed() -> None:
    assert "logit_scale=meta" in repr(infloss.ContrastiveLoss().to("meta"))
