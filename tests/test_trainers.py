"""Training under DDP, FSDP2 and torch.compile follows that of one process on the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import infloss
from infloss import reference
from trainers import (
    LOGIT_SCALE,
    WRAPPERS,
    Encoders,
    Plan,
    Trained,
    WithLoss,
    batch,
    encoders_of,
    fit,
    named,
    shards,
    train,
    trainable,
)
from world import World

TOLERANCE = 1e-11  # of float64 parameters of about 1, after two steps that round some 100 times
LEAST_MOVE = 1e-3  # of each parameter's norm: a gradient off by a factor shows 10^8-fold

STRATEGIES = pytest.mark.parametrize("strategy", ["ring", "gather"])
EACH_WRAPPER = pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
PLACES = pytest.mark.parametrize("loss", ["inside", "outside"])
SHARDS = pytest.mark.parametrize("sizes", [(8, 8), (5, 3), (8, 0), (6, 1, 5)], ids=str)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()


def moved(plan: Plan, whole: Trained) -> dict[str, Tensor]:
    """How far each parameter that learns has gone; the others stay."""
    model = WithLoss(encoders_of(plan), infloss.ContrastiveLoss(LOGIT_SCALE)).double()
    learns = {name for name, value in model.named_parameters() if value.requires_grad}
    return {
        name: whole.parameters[name] - before
        for name, before in named(model).items()
        if name in learns
    }


def assert_same_training(parts: list[Trained], whole: Trained) -> None:
    """Losses and parameters of every rank are those of one process."""
    exactly = {"rtol": 0.0, "atol": TOLERANCE, "check_stride": False}
    for part in parts:
        torch.testing.assert_close(part.losses, whole.losses, **exactly)
        assert list(part.parameters) == list(whole.parameters)
        for name, value in part.parameters.items():
            torch.testing.assert_close(
                value.reshape(whole.parameters[name].shape), whole.parameters[name], **exactly
            )


def assert_trains_as_one(world: World, plan: Plan) -> list[Trained]:
    parts, whole = world.run(train, len(plan.sizes), plan), train(None, plan.alone())
    moves = moved(plan, whole)
    assert all(move.norm() > LEAST_MOVE for move in moves.values()), moves
    assert_same_training(parts, whole)
    return parts


@STRATEGIES
@PLACES
@EACH_WRAPPER
@SHARDS
def test_two_steps(
    world: World, sizes: tuple[int, ...], wrapper: str, loss: str, strategy: str
) -> None:
    """Even, uneven and empty shards, whose sizes differ from step to step.

    With the criterion "inside" the wrapped module DDP averages logit_scale's gradient; "outside",
    and under FSDP2, whose ``fully_shard`` refuses parameters of shape () and is told to ignore it,
    the trainer does: ``dist.all_reduce(grad); grad /= W`` before the optimiser's step.
    """
    assert_trains_as_one(world, Plan(sizes, wrapper, strategy, loss=loss))


@STRATEGIES
@PLACES
@EACH_WRAPPER
def test_a_trainer_that_sums(world: World, wrapper: str, loss: str, strategy: str) -> None:
    """DDP with a communication hook that adds up; FSDP2 with a divide factor of 1."""
    plan = Plan((5, 3), wrapper, strategy, "sum", averages=False, loss=loss)
    assert_trains_as_one(world, plan)


@EACH_WRAPPER
def test_a_wrong_factor_would_show(world: World, wrapper: str) -> None:
    """Gradients meant to be summed, which the wrapper averages."""
    plan = Plan((5, 3), wrapper, grad_reduction="sum")
    wrong, whole = world.run(train, 2, plan), train(None, plan.alone())
    torch.testing.assert_close(wrong[0].losses[0], whole.losses[0])
    for name, move in moved(plan, whole).items():
        assert (wrong[0].parameters[name] - whole.parameters[name]).norm() > 0.1 * move.norm()
    with pytest.raises(AssertionError):
        assert_same_training(wrong, whole)


@pytest.mark.parametrize(
    ("wrapper", "flags"),
    [
        ("ddp", {"static_graph": True}),
        ("ddp", {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}),
        ("fsdp", {"reshard_after_forward": False}),
        ("fsdp", {"reshard_after_forward": True}),
    ],
    ids=str,
)
def test_wrappers_options(world: World, wrapper: str, flags: dict[str, Any]) -> None:
    assert_trains_as_one(world, Plan((5, 3), wrapper, flags=flags))


@STRATEGIES
@PLACES
@EACH_WRAPPER
def test_a_frozen_tower(world: World, wrapper: str, loss: str, strategy: str) -> None:
    """Frozen before it is wrapped, a tower asks for no option: its parameters are not reduced."""
    assert_trains_as_one(world, Plan((6, 1, 5), wrapper, strategy, loss=loss, frozen="txt"))


@STRATEGIES
@PLACES
@EACH_WRAPPER
def test_gradient_accumulation(world: World, wrapper: str, loss: str, strategy: str) -> None:
    """The mean of two micro-batches' losses, each with its own negatives; reduced once."""
    assert_trains_as_one(world, Plan((5, 3), wrapper, strategy, loss=loss, micro_batches=2))


@pytest.mark.parametrize("compiled", ["towers", "model"])
@PLACES
@EACH_WRAPPER
def test_compiled(world: World, wrapper: str, loss: str, compiled: str) -> None:
    """Towers alone, or the whole of them and the loss, at which the graph breaks."""
    parts = assert_trains_as_one(world, Plan((5, 3), wrapper, loss=loss, compiled=compiled))
    assert all(part.graphs > 0 for part in parts)


def test_fsdp_of_a_scale_with_one_dimension(world: World) -> None:
    """A logit scale of shape (1,) is FSDP2's like any other parameter."""
    assert_trains_as_one(world, Plan((5, 3), "fsdp", loss="own"))


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)], ids=str)
def test_hsdp_on_a_mesh_of_nodes_and_ranks(world: World, mesh: tuple[int, int]) -> None:
    """Replicated over nodes and sharded within; one mesh is the wrapper's and the loss's."""
    assert_trains_as_one(world, Plan((5, 3, 0, 4), "fsdp", mesh=mesh))


class Dense(infloss.ContrastiveLoss):
    """The oracle as a criterion, for one process."""

    def forward(self, img: Tensor, txt: Tensor) -> Tensor:
        return reference.contrastive_loss(img, txt, self.logit_scale).mean()


def gradient(
    group: Any, sizes: tuple[int, ...], criterion: nn.Module, dtype: torch.dtype, autocast: bool
) -> Tensor:
    """Of all parameters, in one vector, after DDP's all-reduce; ``group`` None: of one process."""
    model: nn.Module = WithLoss(Encoders(), criterion).to(dtype)
    rank = 0 if group is None else dist.get_rank(group)
    img, txt = (side.split(sizes)[rank] for side in batch(0, sum(sizes), dtype))
    forward = model if group is None else DistributedDataParallel(model, process_group=group)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = forward(img, txt)
    loss.backward()
    return torch.cat([value.grad.flatten() for value in model.parameters()])


def autocast_gradient(group: Any, sizes: tuple[int, ...], strategy: str) -> Tensor:
    criterion = infloss.ContrastiveLoss(LOGIT_SCALE, group=group, strategy=strategy)
    return gradient(group, sizes, criterion, torch.float32, autocast=True)


@STRATEGIES
@pytest.mark.parametrize("sizes", [(16, 16), (19, 2, 11)], ids=str)
def test_autocast(world: World, sizes: tuple[int, ...], strategy: str) -> None:
    """Towers and features in bfloat16: by the tolerance rule, beside dense torch under autocast."""
    alone, dense = (sum(sizes),), Dense(LOGIT_SCALE)
    usual = gradient(None, alone, dense, torch.float32, autocast=True)
    exact = gradient(None, alone, dense, torch.float64, autocast=False)
    for part in world.run(autocast_gradient, len(sizes), sizes, strategy):
        found = reference.deviation(part, usual, exact, reference.FLOORS[torch.bfloat16])
        assert found.ok, found


class GatheredLoss(nn.Module):
    """A user's own loss: dense, of all ranks' features."""

    def __init__(self, group: Any, grad_reduction: str) -> None:
        super().__init__()
        self.log_logit_scale = nn.Parameter(torch.tensor(LOGIT_SCALE).log())
        self.group, self.grad_reduction = group, grad_reduction
        if grad_reduction == "sum":  # every rank has the whole gradient of what comes after
            self.log_logit_scale.register_hook(lambda grad: grad / dist.get_world_size(group))

    def forward(self, img: Tensor, txt: Tensor) -> Tensor:
        img, txt = (
            infloss.all_gather(side, self.group, grad_reduction=self.grad_reduction)
            for side in (img, txt)
        )
        return reference.contrastive_loss(img, txt, self.log_logit_scale.exp()).mean()


def train_on_gathered(group: Any, plan: Plan) -> Trained:
    """Two steps under DDP of a loss that a user makes of ``infloss.all_gather``."""
    model = WithLoss(Encoders(), GatheredLoss(group, plan.grad_reduction)).double()
    forward, no_sync = WRAPPERS[plan.wrapper](model, group, plan)
    losses = fit(forward, trainable(model), shards(plan, dist.get_rank(group)), no_sync)
    return Trained(losses, named(model), 0)


@pytest.mark.parametrize("grad_reduction", ["mean", "sum"])
@SHARDS
def test_a_loss_of_gathered_features(
    world: World, sizes: tuple[int, ...], grad_reduction: str
) -> None:
    plan = Plan(sizes, grad_reduction=grad_reduction, averages=grad_reduction == "mean")
    assert_same_training(world.run(train_on_gathered, len(sizes), plan), train(None, plan.alone()))
