"""Ranks that disagree, ask for what cannot be, or die: an error on every rank, and soon."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import infloss
from infloss.distributed import header, losses
from infloss.distributed.ranks import check_device, of_group
from support import normal
from world import RankError, World

SOON = 10.0  # seconds, half of what the groups' own timeout would take
SLACK = 5.0  # seconds for everything but the waiting


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()


def call(group: Any, options: dict[int, dict[str, Any]]) -> float:
    """A valid loss of this rank's shard, but for what ``options`` say of this rank."""
    rank = dist.get_rank(group)
    arguments: dict[str, Any] = {
        "img": normal(4, 3, seed=rank),
        "txt": normal(4, 3, seed=9 + rank),
        "logit_scale": 3.0,
        "strategy": "ring",
        **options.get(rank, {}),
    }
    loss: Any = infloss.contrastive_loss
    if "target" in arguments:
        loss = infloss.info_nce
        arguments["query"], arguments["key"] = arguments.pop("img"), arguments.pop("txt")
    return float(loss(**arguments, group=group).sum())


def assert_all_raise(
    world: World, kind: str, message: str, job: Callable[..., Any], *args: Any, ranks: int = 3
) -> None:
    """The same error on every rank within seconds, after which the ranks still work together."""
    start = time.monotonic()
    outcomes = world.outcomes(job, range(ranks), *args)
    assert time.monotonic() - start < SOON
    assert [type(outcome) for outcome in outcomes] == [RankError] * ranks, outcomes
    assert {(outcome.kind, outcome.message) for outcome in outcomes} == {(kind, message)}
    after = world.run(call, ranks, {})
    assert after == [after[0]] * ranks


SAME = "expected the same on every rank of the group, got"
DISAGREEMENTS = {
    "features a row": (
        {1: {"img": torch.ones(4, 5), "txt": torch.ones(4, 5)}},
        f"features a row: {SAME} 3 on ranks 0, 2; 5 on rank 1",
    ),
    "dtype": (
        {2: {"img": torch.ones(4, 3).double(), "txt": torch.ones(4, 3).double()}},
        f"dtype: {SAME} float32 on ranks 0, 1; float64 on rank 2",
    ),
    "strategy": (
        {0: {"strategy": "gather"}},
        f"strategy: {SAME} gather on rank 0; ring on ranks 1, 2",
    ),
    "reduction": (
        {1: {"reduction": "sum"}},
        f"reduction: {SAME} mean on ranks 0, 2; sum on rank 1",
    ),
    "grad_reduction": (
        {1: {"grad_reduction": "sum"}},
        f"grad_reduction: {SAME} mean on ranks 0, 2; sum on rank 1",
    ),
    "normalize": (
        {1: {"normalize": False}},
        f"normalize: {SAME} True on ranks 0, 2; False on rank 1",
    ),
    "return_stats": (
        {1: {"return_stats": True}},
        f"return_stats: {SAME} False on ranks 0, 2; True on rank 1",
    ),
    "direction": (
        {0: {"target": None}, 2: {"target": None}},
        f"loss: {SAME} info_nce on ranks 0, 2; contrastive_loss on rank 1",
    ),
    "logit_scale": (
        {1: {"logit_scale": 4.0}},
        f"logit_scale: {SAME} 3.0 on ranks 0, 2; 4.0 on rank 1",
    ),
    "learned side": (
        {1: {"img": torch.ones(4, 3, requires_grad=True)}},
        f"img.requires_grad: {SAME} False on ranks 0, 2; True on rank 1",
    ),
    "learned scale": (
        {
            0: {"logit_scale": torch.tensor(3.0)},
            1: {"logit_scale": torch.tensor(3.0)},
            2: {"logit_scale": torch.tensor(3.0, requires_grad=True)},
        },
        f"logit_scale.requires_grad: {SAME} False on ranks 0, 1; True on rank 2",
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_a_disagreement_is_the_same_error_everywhere(world: World, what: str) -> None:
    options, message = DISAGREEMENTS[what]
    assert_all_raise(world, "ValueError", message, call, options)


REFUSALS = {
    "shape": ({1: {"txt": torch.ones(5, 3)}}, "rank 1: txt: expected 4 rows as img, got 5"),
    "type": ({0: {"img": [1.0]}}, "rank 0: img: expected a torch.Tensor, got list"),
    "option": (
        {2: {"reduction": "avg"}},
        "rank 2: reduction: expected one of ('mean', 'sum', 'none'), got 'avg'",
    ),
    "two ranks": (
        {0: {"normalize": 1}, 2: {"logit_scale": "1"}},
        "rank 0: normalize: expected a bool, got int; "
        "rank 2: logit_scale: expected a float or a floating tensor, got str",
    ),
    "dtype": (
        {1: {"img": torch.ones(4, 3, dtype=torch.int32)}},
        "rank 1: img: expected one of torch.float16, torch.bfloat16, torch.float32, torch.float64, "
        "got torch.int32",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_bad_input_on_one_rank_stops_all(world: World, what: str) -> None:
    options, message = REFUSALS[what]
    assert_all_raise(world, "ValueError", f"group: refused on {message}", call, options)


def everyone(options: dict[str, Any], ranks: int = 3) -> dict[int, dict[str, Any]]:
    return dict.fromkeys(range(ranks), options)


def test_a_batch_of_nothing(world: World) -> None:
    nothing = everyone({"img": torch.ones(0, 3), "txt": torch.ones(0, 3)})
    message = (
        "group: expected a batch with at least one row on each side, got 0 x 0 over all 3 ranks"
    )
    assert_all_raise(world, "ValueError", message, call, nothing)


def test_a_target_out_of_range_on_one_rank(world: World) -> None:
    options = everyone({"target": torch.tensor([0, 1, 2, 11])})
    options[1] = {"target": torch.tensor([0, 1, 12, 2])}
    message = "target: expected values in [0, 12), got 0 .. 12"
    assert_all_raise(world, "ValueError", message, call, options)


def test_targets_of_some_ranks_only(world: World) -> None:
    options = everyone({"target": None})
    options[1] = {"target": torch.arange(4)}
    message = f"target: {SAME} None on ranks 0, 2; explicit on rank 1"
    assert_all_raise(world, "ValueError", message, call, options)


def test_keys_that_cannot_be_dealt_evenly(world: World) -> None:
    options = everyone({"target": None, "txt": torch.ones(5, 3)})
    message = (
        "target: expected an explicit target, or a number of keys that is a multiple of "
        "the 12 queries; got None with 15 keys"
    )
    assert_all_raise(world, "ValueError", message, call, options)


def one_call_too_many(group: Any) -> None:
    x = normal(4, 3).requires_grad_()
    loss = infloss.contrastive_loss(x, x.detach(), group=group)
    if dist.get_rank(group) == 0:
        infloss.contrastive_loss(x, x.detach(), group=group)
    loss.backward()


def test_one_call_too_many(world: World) -> None:
    """Rank 0 makes a second forward pass while the others go backward."""
    start = time.monotonic()
    outcomes = world.outcomes(one_call_too_many, range(3))
    assert time.monotonic() - start < SOON
    (message,) = {outcome.message for outcome in outcomes}
    assert message.startswith("call: expected the same on every rank of the group, got ")


def mesh_of(shape: tuple[int, ...]) -> Any:
    return dist.device_mesh.init_device_mesh("cpu", shape)


def call_with(group: Any, wrong: str) -> None:
    x = normal(4, 3)
    options: dict[str, Any] = {"group": group}
    if wrong == "type":
        options["group"] = "world"
    elif wrong == "a rank":
        options["group"] = 0
    elif wrong == "assume_even":
        options["assume_even"] = 1
    elif wrong == "gather on a mesh":
        options.update(group=mesh_of((2, 2)), strategy="gather")
    infloss.contrastive_loss(x, x, **options)


WRONG_GROUPS = {
    "type": ("TypeError", "group: expected None, a ProcessGroup or a DeviceMesh, got str"),
    "a rank": ("TypeError", "group: expected None, a ProcessGroup or a DeviceMesh, got int"),
    "assume_even": ("TypeError", "assume_even: expected a bool, got int"),
    "gather on a mesh": (
        "ValueError",
        "group: refused on "
        + "; ".join(
            f"rank {rank}: strategy: expected 'ring' or 'auto' on a mesh of 2 dimensions, "
            "got 'gather', which needs one group"
            for rank in range(4)
        ),
    ),
}


@pytest.mark.parametrize("wrong", WRONG_GROUPS)
def test_what_is_no_group_for_this(world: World, wrong: str) -> None:
    kind, message = WRONG_GROUPS[wrong]
    assert_all_raise(world, kind, message, call_with, wrong, ranks=4)


def call_with_foreign_group(group: Any) -> None:
    foreign = dist.new_group([0, 2])
    x = normal(4, 3)
    infloss.contrastive_loss(x, x, group=foreign)


def test_a_group_that_this_rank_is_not_in(world: World) -> None:
    outcomes = world.outcomes(call_with_foreign_group, range(4))
    assert outcomes[0] is None
    assert outcomes[2] is None
    for rank in (1, 3):
        assert outcomes[rank].kind == "ValueError"
        assert outcomes[rank].message == (
            "group: expected a group that this process is part of, got one that rank "
            f"{rank} of the world is not in"
        )


def test_a_group_without_a_world() -> None:
    x = normal(4, 3)
    with pytest.raises(ValueError, match=r"^group: expected None where torch.distributed is not"):
        infloss.contrastive_loss(x, x, group=object())


def check_device_of(group: Any, kinds: str) -> None:
    """What is said of a group whose backend moves tensors of other devices."""
    with mock.patch.object(dist, "get_backend_config", return_value=kinds):
        call(group, {})


def test_tensors_that_the_group_cannot_move(world: World) -> None:
    message = "group: refused on " + "; ".join(
        f"rank {rank}: group: expected a group for cpu tensors, got one of backend 'gloo' for cuda"
        for rank in range(3)
    )
    assert_all_raise(world, "ValueError", message, check_device_of, "cuda:nccl")


def check_cuda_tensors(group: Any) -> None:
    check_device(of_group(group), torch.device("cuda"))


def test_gloo_moves_no_blocks_of_a_gpu(world: World) -> None:
    message = "group: expected a group for cuda tensors, got one of backend 'gloo' for cpu"
    assert_all_raise(world, "ValueError", message, check_cuda_tensors)


def call_under(group: Any, limit: int, path: str) -> None:
    """Rank 1 under another workspace limit or path."""
    if dist.get_rank(group) != 1:
        call(group, {})
        return
    with infloss.workspace_limit(limit), infloss.use_path(path):
        call(group, {})


def test_another_workspace_limit(world: World) -> None:
    message = f"workspace limit: {SAME} 268435456 on ranks 0, 2; 1048576 on rank 1"
    assert_all_raise(world, "ValueError", message, call_under, 2**20, "auto")


def test_a_path_that_cannot_take_the_features(world: World) -> None:
    message = "group: refused on rank 1: path: 'sm80' needs CUDA features"
    outcomes = world.outcomes(call_under, range(3), 2**28, "sm80")
    assert [outcome.kind for outcome in outcomes] == ["ValueError"] * 3
    assert all(outcome.message.startswith(message) for outcome in outcomes)


def refuse(group: Any, message: str) -> None:
    """Rank 0 finds fault with its input, at length."""

    def check() -> None:
        if dist.get_rank(group) == 0:
            raise ValueError(message)

    channel = header.channel(of_group(group))
    channel.attempt(check)
    channel.agree({}, {})


@pytest.mark.parametrize("letter", ["x", "\\", "\n", "é"])
def test_a_long_refusal_is_cut_to_fit_a_header(world: World, letter: str) -> None:
    outcomes = world.outcomes(refuse, range(3), 2000 * letter)
    assert {outcome.message for outcome in outcomes} == {outcomes[0].message}
    assert outcomes[0].message.startswith(f"group: refused on rank 0: {80 * letter}")


def test_a_scale_that_is_no_number_is_the_same_everywhere(world: World) -> None:
    losses_of_ranks = world.run(call, 3, everyone({"logit_scale": float("nan")}))
    assert all(loss != loss for loss in losses_of_ranks)


def gather_other(group: Any, wrong: str) -> None:
    """``infloss.all_gather`` of what rank 1 may not pass."""
    tensor: Any = torch.ones(2, 3)
    if dist.get_rank(group) == 1:
        tensor = {
            "list": [1.0],
            "sparse": torch.ones(2, 3).to_sparse(),
            "no rows": torch.ones(()),
            "shape": torch.ones(2, 4),
        }[wrong]
    infloss.all_gather(tensor, group)


WRONG_ROWS = {
    "list": "group: refused on rank 1: tensor: expected a torch.Tensor, got list",
    "sparse": "group: refused on rank 1: tensor: expected a dense (strided) tensor, "
    "got a torch.sparse_coo one",
    "no rows": "group: refused on rank 1: tensor: expected at least one dimension, got shape []",
    "shape": f"shape of a row: {SAME} [3] on ranks 0, 2; [4] on rank 1",
}


@pytest.mark.parametrize("wrong", WRONG_ROWS)
def test_rows_that_cannot_be_gathered(world: World, wrong: str) -> None:
    assert_all_raise(world, "ValueError", WRONG_ROWS[wrong], gather_other, wrong)


def test_gathering_without_a_world() -> None:
    with pytest.raises(ValueError, match=r"^group: expected torch.distributed to be initialised"):
        infloss.all_gather(torch.ones(2, 3))


def die(group: Any, when: str, strategy: str) -> float:
    """Rank 1 ends before its header, or where its first exchange would start, or in backward."""
    dying = dist.get_rank(group) == 1
    if dying and when == "before":
        os._exit(1)
    x, y = normal(4, 3).requires_grad_(), normal(4, 3, seed=1)
    if dying and when == "in the exchange":
        losses.global_pair_losses = _exit
    loss: Tensor = infloss.contrastive_loss(x, y, group=group, strategy=strategy)
    if dying:
        os._exit(1)
    loss.backward()
    return loss.item()


def stay_away(group: Any, patience: float) -> float:
    """Rank 1 does not come to the group's first call."""
    x = normal(4, 3)
    if dist.get_rank(group) == 1:
        time.sleep(patience)
        return 0.0
    return float(infloss.contrastive_loss(x, x, group=group))


def test_a_rank_that_never_comes() -> None:
    world = World(3, timeout=2)
    first, missing, last = world.outcomes(stay_away, range(3), 4.0)
    world.close()
    assert missing == 0.0
    for outcome in (first, last):
        assert outcome.kind == "RuntimeError"
        assert re.match(r"group: meeting failed on rank \d of 3; has another", outcome.message)


def edited_in_place(group: Any) -> Tensor:
    x = normal(2, 3, seed=dist.get_rank(group))
    for one in (x, x.clone().requires_grad_()):
        gathered = infloss.all_gather(one, group)
        gathered.mul_(2)
    assert torch.equal(x, normal(2, 3, seed=dist.get_rank(group)))
    return gathered.detach()


@pytest.mark.parametrize("ranks", [1, 3])
def test_gathered_rows_are_the_callers_own(world: World, ranks: int) -> None:
    expected = 2 * torch.cat([normal(2, 3, seed=rank) for rank in range(ranks)])
    for found in world.run(edited_in_place, ranks):
        assert torch.equal(found, expected)


def gather_labels(group: Any, dtype: torch.dtype) -> Tensor:
    rank = dist.get_rank(group)
    return infloss.all_gather(torch.arange(rank, rank + 2).to(dtype), group)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_labels_are_gathered_too(world: World, dtype: torch.dtype) -> None:
    expected = torch.tensor([0, 1, 1, 2, 2, 3]).to(dtype)
    for found in world.run(gather_labels, 3, dtype):
        assert torch.equal(found, expected)


def scale_of_rank(group: Any) -> float:
    x = normal(4, 3)
    scale: Any = 3 if dist.get_rank(group) else 3.0
    return float(infloss.contrastive_loss(x, x, scale, group=group))


def test_the_same_number_in_another_type(world: World) -> None:
    found = world.run(scale_of_rank, 2)
    assert found[0] == found[1]


def _exit(*args: Any) -> None:
    os._exit(1)


@pytest.mark.parametrize("strategy", ["ring", "gather"])
@pytest.mark.parametrize("when", ["before", "in the exchange", "before backward"])
def test_a_rank_that_dies(when: str, strategy: str) -> None:
    """The others get an exception within the group's timeout."""
    timeout = 5.0
    world = World(3, timeout)
    try:
        world.run(call, 3, {})
        start = time.monotonic()
        outcomes = world.outcomes(die, range(3), when, strategy)
        assert time.monotonic() - start < timeout + SLACK
        assert outcomes[1] is None
        for rank in (0, 2):
            assert outcomes[rank].kind == "RuntimeError"
            assert "of 3" in outcomes[rank].message
            assert "stopped?" in outcomes[rank].message
    finally:
        world.close()
