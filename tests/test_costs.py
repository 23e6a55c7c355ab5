"""What a call costs: matrix products, counted by the profiler."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import infloss
from support import LOSSES, Loss, normal

EACH_LOSS = pytest.mark.parametrize("loss", LOSSES)
GEMMS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm_")


def gemms(call: Callable[[], object]) -> int:
    """Matrix products that ran inside ``call``."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        call()
    counts = Counter(event.name for event in recorded.events())
    return sum(counts[name] for name in GEMMS)


def gemms_of_step(
    loss: Loss, x_grad: bool, y_grad: bool, scale_grad: bool, device: torch.device
) -> tuple[int, int]:
    """Products in forward and in backward; the batch is one tile."""
    x = normal(32, 8).to(device).requires_grad_(x_grad)
    y = normal(32, 8, seed=1).to(device).requires_grad_(y_grad)
    scale = torch.tensor(3.0, device=device).requires_grad_(scale_grad)
    results: list[Tensor] = []
    with infloss.use_path("portable"):
        forward = gemms(lambda: results.append(loss(x, y, scale)))
        return forward, gemms(results[0].backward)


@pytest.mark.parametrize(
    ("learned", "backward"),
    [
        ((True, True, True), 3),
        ((True, True, False), 3),
        ((True, False, False), 2),
        ((False, True, True), 2),
        ((False, False, True), 1),
    ],
)
@EACH_LOSS
def test_a_frozen_side_costs_no_product(
    loss: Loss, learned: tuple[bool, bool, bool], backward: int, device: torch.device
) -> None:
    """Forward is one product a tile; backward one more, and one for each learned side (case 9)."""
    assert gemms_of_step(loss, *learned, device) == (1, backward)


@EACH_LOSS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_costs_the_forward_alone(
    loss: Loss, mode: Callable[[], Any], device: torch.device
) -> None:
    x, y = normal(32, 8).to(device).requires_grad_(), normal(32, 8, seed=1).to(device)

    def call() -> None:
        with mode():
            assert not loss(x, y, 3.0).requires_grad

    assert gemms(call) == 1


@EACH_LOSS
def test_statistics_come_from_the_same_pass(loss: Callable[..., Any], device: torch.device) -> None:
    x, y = normal(32, 8).to(device), normal(32, 8, seed=1).to(device)
    assert gemms(lambda: loss(x, y, 3.0, return_stats=True)) == 1


def test_one_query_against_many_keys_takes_few_steps() -> None:
    """Work on the keys' gradient goes by tiles of keys, however few the queries."""
    query = torch.randn(1, 8, requires_grad=True)
    key = torch.randn(5000, 8, requires_grad=True)
    loss = infloss.info_nce(query, key, torch.zeros(1, dtype=torch.int64))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        loss.backward()
    assert len(profiled.events()) < 2000
