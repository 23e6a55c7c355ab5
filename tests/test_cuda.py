"""What only a GPU has: streams, graphs, several devices, and a host that never waits."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import infloss
from support import LOSSES, Loss, assert_same, captured_step, features, normal, one_way, step

EACH_LOSS = pytest.mark.parametrize("loss", LOSSES)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@pytest.fixture
def batch(cuda: torch.device) -> tuple[Tensor, Tensor]:
    x, y = features("weak", 300, 300, 64, torch.float32)
    return x.to(cuda), y.to(cuda)


@contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def train(loss: Loss, x: Tensor, y: Tensor, scale: float | Tensor) -> None:
    loss(x.detach().requires_grad_(), y.detach().requires_grad_(), scale).backward()


@DTYPES
@pytest.mark.parametrize("form", ["float", "tensor"])
@EACH_LOSS
def test_the_host_never_waits(
    loss: Loss, form: str, dtype: torch.dtype, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = (side.to(dtype) for side in batch)
    scale = 14.3 if form == "float" else torch.tensor(14.3, device=x.device, requires_grad=True)
    train(loss, x, y, scale)  # the first call may load modules
    with synchronising_is_an_error():
        train(loss, x, y, scale)


def test_the_host_never_waits_for_targets_or_statistics(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    target = torch.arange(len(x), device=x.device)

    def loss(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return one_way(a, b, s, target=target, return_stats=True).loss

    train(loss, x, y, 14.3)
    with synchronising_is_an_error():
        train(loss, x, y, 14.3)


def test_the_host_never_waits_for_the_module(batch: tuple[Tensor, Tensor]) -> None:
    module = infloss.ContrastiveLoss(max_logit_scale=100.0).to(batch[0].device)
    module(*batch).backward()
    with synchronising_is_an_error():
        module(*batch).backward()


@DTYPES
@EACH_LOSS
def test_a_captured_graph_replays_on_new_values(
    loss: Loss, dtype: torch.dtype, batch: tuple[Tensor, Tensor]
) -> None:
    x, y = (side.to(dtype).requires_grad_() for side in batch)
    scale = torch.tensor(14.3, device=x.device, requires_grad=True)
    graph, outputs = captured_step(loss, (x, y, scale))
    with torch.no_grad():
        x.copy_(normal(*x.shape, seed=7))
        y.copy_(normal(*y.shape, seed=8))
        scale.fill_(30.0)
    graph.replay()
    assert_same(outputs, step(loss, x, y, scale))


@EACH_LOSS
def test_work_goes_to_the_current_stream(loss: Loss, batch: tuple[Tensor, Tensor]) -> None:
    """Inputs made late on a side stream are seen only by work queued after them there."""
    expected = step(loss, *batch, 14.3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(side) for side in batch]
        torch.cuda._sleep(100_000_000)
        for target, source in zip(late, batch, strict=True):
            target.copy_(source)
        ours = step(loss, *late, 14.3)
    stream.synchronize()
    assert_same(ours, expected)


@EACH_LOSS
def test_features_of_a_device_that_is_not_current(loss: Loss, cuda: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second CUDA device")
    x, y = features("weak", 100, 100, 32, torch.float32)
    first, second = (step(loss, x.to(d), y.to(d), 14.3) for d in ("cuda:0", "cuda:1"))
    assert all(out.device == torch.device("cuda:1") for out in second)
    assert_same(first, (out.to("cuda:0") for out in second))


def test_backward_on_another_thread(batch: tuple[Tensor, Tensor]) -> None:
    """Autograd runs a GPU's backward on a thread of its own, where no setting of this one holds."""
    x, y = (side.detach().requires_grad_() for side in batch)
    with infloss.workspace_limit(1 << 20):
        loss = infloss.contrastive_loss(x, y)
    loss.backward()
    with infloss.workspace_limit(1 << 20):
        expected = step(lambda a, b, s: infloss.contrastive_loss(a, b), x, y, 1.0)
    assert_same((x.grad, y.grad), (expected.dx, expected.dy))
