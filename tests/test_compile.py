"""torch.compile and autocast: the same numbers, one graph, no surprise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import infloss
from infloss import reference
from support import LOSSES, Loss, assert_close, features, normal, one_way, step, symmetric

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

EACH_LOSS = pytest.mark.parametrize("loss", LOSSES)
BATCHES = (5, 8, 13, 70, 500)


def with_target(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
    target = torch.arange(len(x), device=x.device).flip(0)
    return one_way(x, y, s, target=target)


def with_statistics(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
    out = symmetric(x, y, s, return_stats=True)
    return out.loss + out.accuracy_img + out.positive.mean() + out.lse_txt.mean()


def one_way_with_statistics(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
    out = one_way(x, y, s, return_stats=True)
    return out.loss + out.accuracy + out.lse.mean()


def per_pair(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
    return symmetric(x, y, s, reduction="none", normalize=False)


def in_a_step(x: Tensor, y: Tensor, s: Tensor) -> Tensor:
    """Ops of the user before and after the loss."""
    return symmetric(x.sin() * 2, y + 1, s.exp().clamp(max=100)) * 2 + x.pow(2).mean()


STEPS = [
    symmetric,
    one_way,
    with_target,
    with_statistics,
    one_way_with_statistics,
    per_pair,
    in_a_step,
]


def assert_compiles_once(
    loss: Loss, device: torch.device, backend: str, dtype: torch.dtype = torch.float32
) -> None:
    """One graph without a break serves every batch size, and equals eager execution.

    Only the first call compiles; torch may restart, and call the backend twice, within it.
    """
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(loss, backend=counter, fullgraph=True, dynamic=True)
    compiled_at = []
    for batch in BATCHES:
        x, y = (side.to(device) for side in features("weak", batch, batch, 8, dtype))
        ours, eager = step(compiled, x, y, 3.0), step(loss, x, y, 3.0)
        for label in eager._fields:
            expected = getattr(eager, label)
            floor = reference.floor_of(dtype)
            assert_close(label, getattr(ours, label), expected, expected.double(), floor)
        compiled_at.append(counter.frame_count)
    assert compiled_at[0] >= 1
    assert len(set(compiled_at)) == 1


@pytest.mark.parametrize("loss", STEPS)
def test_compiles_into_one_dynamic_graph(loss: Loss, device: torch.device) -> None:
    """Forward and backward, with B varying from call to call (case 27)."""
    assert_compiles_once(loss, device, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("loss", [in_a_step, with_target])
def test_compiles_under_inductor(loss: Loss, device: torch.device) -> None:
    assert_compiles_once(loss, device, "inductor")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_compiles_in_other_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    assert_compiles_once(symmetric, device, "aot_eager", dtype)


@EACH_LOSS
def test_compiles_without_being_told_that_shapes_vary(loss: Loss, device: torch.device) -> None:
    """The default settles after one static and one dynamic graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    compiled_at = []
    for batch in BATCHES:
        x, y = normal(batch, 8).to(device), normal(batch, 8, seed=1).to(device)
        expected = loss(x, y, torch.tensor(3.0))
        torch.testing.assert_close(compiled(x, y, torch.tensor(3.0)), expected)
        compiled_at.append(counter.frame_count)
    assert len(set(compiled_at)) == 2


def test_a_float_logit_scale_compiles(device: torch.device) -> None:
    compiled = torch.compile(symmetric, backend="aot_eager", fullgraph=True, dynamic=True)
    x, y = normal(20, 8).to(device), normal(20, 8, seed=1).to(device)
    for scale in (14.3, 20.0, 100):
        torch.testing.assert_close(compiled(x, y, scale), symmetric(x, y, scale))


def test_mixed_dtypes_compile(device: torch.device) -> None:
    x, y = normal(20, 8, dtype=torch.bfloat16).to(device), normal(20, 8, seed=1).to(device)
    compiled = torch.compile(symmetric, backend="aot_eager", fullgraph=True)
    ours, eager = step(compiled, x, y, 5.0), step(symmetric, x, y, 5.0)
    assert [out.dtype for out in ours] == [out.dtype for out in eager]
    torch.testing.assert_close(ours, eager)


def test_the_module_compiles(device: torch.device) -> None:
    """The bound on the scale, an in-place change of the parameter, included (case 27)."""
    module = infloss.ContrastiveLoss(15.0, max_logit_scale=20.0).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    compiled_at = []
    for batch in BATCHES:
        x, y = (side.to(device) for side in features("weak", batch, batch, 8, torch.float32))
        results = []
        for call in (compiled, module):
            with torch.no_grad():
                module.log_logit_scale.fill_(5.0)
            module.log_logit_scale.grad = None
            call(x, y).backward()
            torch.testing.assert_close(module.logit_scale.item(), 20.0)
            results.append(module.log_logit_scale.grad)
        torch.testing.assert_close(*results)
        compiled_at.append(counter.frame_count)
    assert len(set(compiled_at)) == 1


def test_a_frozen_side_compiles(device: torch.device) -> None:
    x, y = normal(20, 8).to(device).requires_grad_(), normal(20, 8, seed=1).to(device)
    compiled = torch.compile(symmetric, backend="aot_eager", fullgraph=True, dynamic=True)
    (ours,) = torch.autograd.grad(compiled(x, y, 5.0), x)
    (eager,) = torch.autograd.grad(symmetric(x, y, 5.0), x)
    torch.testing.assert_close(ours, eager)


def test_a_target_out_of_range_is_nan_under_compile(device: torch.device) -> None:
    """A compiled graph cannot look at values."""
    x, y = normal(6, 4).to(device).requires_grad_(), normal(6, 4, seed=1).to(device)
    target = torch.tensor([0, 1, 2, 6, 4, -1], device=device)

    def per_query(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
        return infloss.info_nce(a, b, t, reduction="none")

    losses = torch.compile(per_query, backend="aot_eager", fullgraph=True)(x, y, target)
    losses.sum().backward()
    assert losses.isnan().tolist() == [False, False, False, True, False, True]
    assert x.grad.isnan().any(1).tolist() == [False, False, False, True, False, True]


def test_newer_precision_settings_do_not_break_a_call(device: torch.device) -> None:
    """Once a backend's own fp32_precision is set, the older getter may raise."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has only the older setting")
    x, y = normal(20, 8).to(device), normal(20, 8, seed=1).to(device)
    compiled = torch.compile(symmetric, backend="aot_eager", fullgraph=True)
    expected = symmetric(x, y, 5.0)
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        for call in (symmetric, compiled):
            torch.testing.assert_close(call(x, y, 5.0), expected, rtol=1e-2, atol=1e-2)
    finally:
        matmul.fp32_precision = before


HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)


def autocast(device: torch.device, dtype: torch.dtype, call: Callable[[], Any]) -> Any:
    with torch.autocast(device.type, dtype=dtype):
        return call()


@HALVES
@EACH_LOSS
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_autocast_behaves_as_for_a_matrix_product(
    loss: Loss, half: torch.dtype, inside: bool, device: torch.device
) -> None:
    """float32 features are rounded to the autocast dtype; gradients come in float32 (case 13)."""
    x, y = (side.to(device) for side in features("weak", 40, 40, 16, torch.float32))

    def under_autocast(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        out = autocast(device, half, lambda: loss(a, b, s))
        assert out.dtype == torch.float32
        return out

    def train() -> Any:
        return step(under_autocast, x, y, 14.3)

    ours = autocast(device, half, train) if inside else train()
    rounded = step(lambda a, b, s: loss(a.to(half), b.to(half), s), x, y, 14.3)
    for out, expected in zip(ours, rounded, strict=True):
        assert out.dtype == torch.float32
        assert torch.equal(out, expected)


@HALVES
def test_autocast_leaves_float64_alone(half: torch.dtype, device: torch.device) -> None:
    x, y = (side.to(device) for side in features("weak", 40, 40, 16, torch.float64))
    plain = step(symmetric, x, y, 14.3)
    assert autocast(device, half, lambda: symmetric(x, y, 14.3)) == plain.loss


@HALVES
def test_an_encoder_under_autocast(half: torch.dtype, device: torch.device) -> None:
    """Weights stay float32 and get their gradient; the loss sees half-precision features."""
    torch.manual_seed(0)
    tower = nn.Linear(12, 16).to(device)
    x, y = normal(30, 12).to(device), normal(30, 16, seed=1).to(device)
    loss = autocast(device, half, lambda: infloss.contrastive_loss(tower(x), y))
    loss.backward()
    assert tower.weight.grad.dtype == torch.float32
    assert tower.weight.grad.abs().sum() > 0
    assert torch.isfinite(tower.weight.grad).all()


@HALVES
@EACH_LOSS
def test_autocast_compiles(loss: Loss, half: torch.dtype, device: torch.device) -> None:
    x, y = (side.to(device) for side in features("weak", 40, 40, 16, torch.float32))

    def under_autocast(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return autocast(device, half, lambda: loss(a, b, s))

    compiled = torch.compile(under_autocast, backend="aot_eager", fullgraph=True)
    ours, eager = step(compiled, x, y, 14.3), step(under_autocast, x, y, 14.3)
    for label in eager._fields:
        expected = getattr(eager, label)
        floor = reference.floor_of(half)
        assert_close(label, getattr(ours, label), expected, expected.double(), floor)
