"""The losses of a batch spread over ranks, against the dense oracle of the whole batch."""

from collections.abc import Iterator

import pytest
import torch

from spread import Spread, SpreadCase
from support import DRAWS, FLOATS, assert_exact, features, normal
from support import name as dtype_id
from world import World

CPU = torch.device("cpu")
STRATEGIES = pytest.mark.parametrize("strategy", ["ring", "gather"])
# sizes of the shards, each for a reason
SHARDS = {
    "one rank": (40,),
    "two even": (20, 20),
    "three uneven": (23, 1, 17),
    "four with an empty one": (12, 0, 15, 13),
    "four with a full one": (0, 0, 40, 0),
    "eight of few": (5, 4, 6, 5, 5, 7, 3, 5),
    "eight of one": (1,) * 8,
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(8)
    yield world
    world.close()


def cases(spread: Spread, kind: str, dtype: torch.dtype, **options: object) -> list[SpreadCase]:
    rows, keys = sum(spread.sizes), sum(spread.key_sizes or spread.sizes)
    return [
        SpreadCase(*features(kind, rows, keys, 10, dtype, seed), spread=spread, **options)
        for seed in range(DRAWS)
    ]


@STRATEGIES
@pytest.mark.parametrize("shards", SHARDS)
def test_any_shards(world: World, shards: str, strategy: str) -> None:
    spread = Spread(world, SHARDS[shards], strategy=strategy)
    assert_exact(cases(spread, "weak", torch.float32), CPU)


@STRATEGIES
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("kind", ["unrelated", "cone.99", "identical"])
def test_any_dtype(world: World, dtype: torch.dtype, kind: str, strategy: str) -> None:
    spread = Spread(world, (9, 14, 17), strategy=strategy)
    assert_exact(cases(spread, kind, dtype), CPU)


@STRATEGIES
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("grad_reduction", ["mean", "sum"])
@pytest.mark.parametrize("normalize", [True, False])
def test_any_reduction(
    world: World, reduction: str, grad_reduction: str, normalize: bool, strategy: str
) -> None:
    spread = Spread(world, (16, 11, 13), strategy=strategy, grad_reduction=grad_reduction)
    upstream = normal(40, seed=9) if reduction == "none" else None
    options = {"reduction": reduction, "normalize": normalize, "upstream": upstream}
    assert_exact(cases(spread, "weak", torch.float64, **options), CPU)


@STRATEGIES
@pytest.mark.parametrize("frozen", ["x", "y", "xy"])
def test_frozen_sides(world: World, frozen: str, strategy: str) -> None:
    spread = Spread(world, (16, 24), strategy=strategy)
    assert_exact(cases(spread, "weak", torch.float32, frozen=frozen), CPU)


@STRATEGIES
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_targets_on_other_ranks(world: World, reduction: str, strategy: str) -> None:
    """Case 5: positives that lie on any rank, some of them twice."""
    spread = Spread(world, (16, 11, 13), key_sizes=(9, 30, 0), strategy=strategy)
    target = torch.arange(40).mul(7).remainder(39)
    options = {"one_way": True, "target": target, "reduction": reduction}
    upstream = normal(40, seed=9) if reduction == "none" else None
    assert_exact(cases(spread, "unrelated", torch.float64, upstream=upstream, **options), CPU)


@STRATEGIES
def test_positives_first_of_each_group_of_keys(world: World, strategy: str) -> None:
    spread = Spread(world, (16, 11, 13), key_sizes=(48, 30, 42), strategy=strategy)
    assert_exact(cases(spread, "weak", torch.float32, one_way=True), CPU)


@STRATEGIES
@pytest.mark.parametrize("ranks", [(1, 2), (7, 3, 5), (6,)], ids=str)
def test_any_group(world: World, ranks: tuple[int, ...], strategy: str) -> None:
    """Case 8: groups without rank 0, whose ranks are not the world's."""
    sizes = {1: (40,), 2: (25, 15), 3: (10, 19, 11)}[len(ranks)]
    spread = Spread(world, sizes, ranks=tuple(sorted(ranks)), strategy=strategy)
    assert_exact(cases(spread, "weak", torch.float32), CPU)


@STRATEGIES
def test_even_shards_without_headers(world: World, strategy: str) -> None:
    spread = Spread(world, (10,) * 4, strategy=strategy, assume_even=True)
    assert_exact(cases(spread, "weak", torch.float32), CPU)
