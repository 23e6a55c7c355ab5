"""The cost model of docs/scaling.md counts what is really sent, and says when a ring hides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import infloss
import scaling
from infloss.distributed import exchange, ring
from scaling import Step
from support import normal
from world import World

PAIRS, DIM, BLOCK = 7, 5, 3

# share of its input that a collective sends from a rank of W to the others
SENT = {
    "all_gather_single": lambda world: world - 1,
    "all_gather_into_tensor": lambda world: world - 1,
    "reduce_scatter_single": lambda world: (world - 1) / world,
    "reduce_scatter_tensor": lambda world: (world - 1) / world,
    "all_to_all_single": lambda world: (world - 1) / world,
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()


def traffic(group: Any, strategy: str) -> tuple[float, int]:
    """(bytes sent, messages) of one step of this rank, headers and scalars left out."""
    counted: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "BLOCK_ROWS", BLOCK)
        post = exchange.PointToPoint.post

        def counting_post(self: Any, outgoing: tuple[Tensor, ...], rows: int) -> Any:
            counted.append(sum(tensor.nbytes for tensor in outgoing))
            return post(self, outgoing, rows)

        patch.setattr(exchange.PointToPoint, "post", counting_post)
        for name, share in SENT.items():
            if hasattr(dist, name):
                patch.setattr(dist, name, counting(getattr(dist, name), share, counted))
        rank = dist.get_rank()
        img, txt = (
            normal(PAIRS, DIM, seed=2 * rank + side).bfloat16().requires_grad_()
            for side in range(2)
        )
        scale = torch.tensor(5.0, requires_grad=True)
        infloss.contrastive_loss(img, txt, scale, group=group, strategy=strategy).backward()
    return sum(counted), len(counted)


def counting(
    collective: Callable[..., Any], share: Callable[[int], float], counted: list[float]
) -> Callable[..., Any]:
    def wrapped(out: Tensor, given: Tensor, *args: Any, group: Any, **options: Any) -> Any:
        if max(out.numel(), given.numel()) > dist.get_world_size():
            counted.append(given.nbytes * share(dist.get_world_size(group)))
        return collective(out, given, *args, group=group, **options)

    return wrapped


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ring_sends_what_the_model_says(
    world: World, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(scaling, "BLOCK_ROWS", BLOCK)
    step = Step(ranks, PAIRS, DIM)
    found = world.run(traffic, ranks, "ring")
    # sub-blocks of different sizes go round, but each rank sends every row on every hop
    assert sum(sent for sent, _ in found) == ranks * scaling.ring_sent(step)
    assert {messages for _, messages in found} == {scaling.ring_messages(step)}


def traffic_on_a_mesh(group: Any) -> tuple[float, int]:
    """The same for two nodes of two ranks."""
    return traffic(dist.device_mesh.init_device_mesh("cpu", (2, 2)), "ring")


def test_nested_rings_send_what_the_model_says(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "BLOCK_ROWS", BLOCK)
    step = Step(4, PAIRS, DIM, node=2)
    found = world.run(traffic_on_a_mesh, 4)
    assert sum(sent for sent, _ in found) == 4 * scaling.ring_sent(step)
    assert {messages for _, messages in found} == {scaling.ring_messages(step)}
    assert scaling.ring_sent(step) > scaling.ring_sent(Step(4, PAIRS, DIM))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gathering_sends_what_the_model_says(world: World, ranks: int) -> None:
    step = Step(ranks, PAIRS, DIM)
    for sent, messages in world.run(traffic, ranks, "gather"):
        assert sent == scaling.gather_sent(step)
        assert messages == scaling.GATHER_MESSAGES


def test_a_large_shard_hides_the_ring() -> None:
    """Then a step costs its products and two hops, on any number of nodes."""
    for ranks in scaling.WORLDS:
        large = Step(ranks, 65536)
        assert large.compute < scaling.ring_seconds(large) < 1.05 * large.compute
        small = Step(ranks, 512)
        assert scaling.gather_seconds(small) < scaling.ring_seconds(small)
