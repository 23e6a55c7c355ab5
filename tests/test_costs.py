"""What a call costs: matrix products and kernels, counted by the profiler."""

import re
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


def kernels(call: Callable[[], object]) -> Counter[str]:
    """Tile and row kernels that ran on the device inside ``call``, by name."""
    call()  # loads modules
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    found = (
        re.search(r"\b(lse|coefficient|accumulate|finish_rows)_kernel", event.name)
        for event in recorded.events()
    )
    return Counter(match[1] for match in found if match)


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

    with infloss.use_path("portable"):
        assert gemms(call) == 1


@EACH_LOSS
def test_statistics_come_from_the_same_pass(loss: Callable[..., Any], device: torch.device) -> None:
    x, y = normal(32, 8).to(device), normal(32, 8, seed=1).to(device)
    with infloss.use_path("portable"):
        assert gemms(lambda: loss(x, y, 3.0, return_stats=True)) == 1


@pytest.mark.parametrize(
    ("learned", "expected"),
    [
        ((True, True, True), {"lse": 1, "coefficient": 1, "accumulate": 1, "finish_rows": 2}),
        ((True, False, False), {"lse": 1, "coefficient": 1, "accumulate": 1, "finish_rows": 1}),
        ((False, True, True), {"lse": 1, "coefficient": 1, "accumulate": 1, "finish_rows": 1}),
        ((False, False, True), {"lse": 1, "coefficient": 1}),
        ((False, False, False), {"lse": 1}),
    ],
)
@EACH_LOSS
def test_kernels_run_only_for_what_is_asked(
    loss: Loss, learned: tuple[bool, bool, bool], expected: dict[str, int], cuda: torch.device
) -> None:
    """Forward is one pass over S, backward one more; a frozen side takes no product (case 9)."""
    x, y = normal(32, 8).to(cuda), normal(32, 8, seed=1).to(cuda)
    leaves = [x, y, torch.tensor(3.0, device=cuda)]
    for leaf, grad in zip(leaves, learned, strict=True):
        leaf.requires_grad_(grad)

    def call() -> None:
        out = loss(*leaves)
        if out.requires_grad:
            out.backward()

    with infloss.use_path("sm80"):
        assert kernels(call) == expected


def test_one_query_against_many_keys_takes_few_steps() -> None:
    """Work on the keys' gradient goes by tiles of keys, however few the queries."""
    query = torch.randn(1, 8, requires_grad=True)
    key = torch.randn(5000, 8, requires_grad=True)
    loss = infloss.info_nce(query, key, torch.zeros(1, dtype=torch.int64))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        loss.backward()
    assert len(profiled.events()) < 2000
