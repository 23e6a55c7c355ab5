"""Encoders in chunks whose gradients ranks share: DDP, FSDP2, DeepSpeed, and losses of a group."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import infloss
from cached import Encoder, contrastive, parameters_of, rows
from infloss import cached_loss
from infloss.grad_cache import gather_input_tensor
from world import RankError, World

SIZES = (7, 2, 12)  # of the ranks' shards: 3, 1 and 4 chunks
CHUNK = 3
STEPS = 3


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(3)
    yield world
    world.close()


class Towers(nn.Module):
    """Both encoders, one of them maybe both, with a scale and a parameter that nothing uses."""

    def __init__(self, tied: bool, unused: bool) -> None:
        super().__init__()
        self.img = Encoder(1)
        self.txt = self.img if tied else Encoder(2)
        self.log_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        if unused:
            self.img.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))  # type: ignore

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.img(x), self.txt(y), self.log_scale.exp()


class Whole(nn.Module):
    """A module whose forward is the loss, over its own towers in chunks."""

    def __init__(self, towers: Towers, group: Any) -> None:
        super().__init__()
        self.towers, self.group = towers, group

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def loss_fn(a: Tensor, b: Tensor) -> Tensor:
            scale = self.towers.log_scale.exp()
            return infloss.contrastive_loss(a, b, scale, group=self.group)

        def hidden(y: Tensor, call: list[Any] = [[self.towers.txt]]) -> Tensor:  # noqa: B006
            return call[0][0](y)

        towers = [(self.towers.img, x, CHUNK), (hidden, y, CHUNK + 1)]
        return cached_loss(loss_fn, towers)


@dataclass(frozen=True)
class Plan:
    """How the towers are wrapped."""

    wrapped: str = "each"  # tower by itself; "pair": both in one; "whole": with the loss; "fsdp"
    tied: bool = False
    unused: bool = False
    accumulate: bool = False  # a step of two backward passes, the first without reduction
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def wrappers(self) -> int:
        return 2 if self.wrapped == "each" and not self.tied else 1


def batch(step: int) -> tuple[Tensor, Tensor]:
    return rows(sum(SIZES), seed=2 * step), rows(sum(SIZES), seed=2 * step + 1)


def single(plan: Plan) -> list[list[Tensor]]:
    """The gradients of each step of one process, SGD between them."""
    model = Towers(plan.tied, plan.unused)

    def loss(model: Towers, x: Tensor, y: Tensor) -> Tensor:
        return infloss.contrastive_loss(*model(x, y))

    return train(model, plan, loss, parameters_of(model), lambda x: x)


def train(
    model: Any,
    plan: Plan,
    loss: Callable[[Any, Tensor, Tensor], Tensor],
    parameters: list[nn.Parameter],
    shard: Callable[[Tensor], Tensor],
    quiet: Callable[[], Any] = contextlib.nullcontext,
    unwrapped: nn.Parameter | None = None,  # to be averaged by hand
) -> list[list[Tensor]]:
    found = []
    for step in range(STEPS):
        for one in parameters:
            one.grad = None
        if plan.accumulate:
            with quiet():
                loss(model, *map(shard, batch(10 + step))).backward()
        loss(model, *map(shard, batch(step))).backward()
        if unwrapped is not None and unwrapped.grad is not None:
            dist.all_reduce(unwrapped.grad.div_(dist.get_world_size()))
        found.append([whole(one.grad) for one in parameters if one.grad is not None])
        with torch.no_grad():
            for one in parameters:
                if one.grad is not None:
                    one -= 0.1 * one.grad
    return found


def whole(grad: Any) -> Tensor:
    return grad.full_tensor().clone() if hasattr(grad, "full_tensor") else grad.clone()


def ranks_step(group: Any, plan: Plan) -> tuple[list[list[Tensor]], int]:
    """The gradients of each step of this rank, and the all-reduces of buckets in all."""
    model, calls = Towers(plan.tied, plan.unused), 0
    shard = lambda x: x.split(SIZES)[dist.get_rank(group)]  # noqa: E731

    def count(state, bucket):  # the wrapper reads annotations
        nonlocal calls
        calls += 1
        return allreduce_hook(state, bucket)

    def wrap(module: nn.Module) -> Any:
        one = DistributedDataParallel(module, process_group=group, **plan.flags)
        one.register_comm_hook(group, count)
        return one

    parameters = parameters_of(model)
    if plan.wrapped == "whole":
        outer = wrap(Whole(model, group))
        found = train(outer, plan, lambda m, x, y: m(x, y), parameters, shard, outer.no_sync)
        return found, calls
    if plan.wrapped == "pair":
        pair = wrap(model)

        def loss_of_pair(_: Any, x: Tensor, y: Tensor) -> Tensor:
            def loss_fn(out: Any) -> Tensor:
                return infloss.contrastive_loss(*out, group=group)

            return cached_loss(loss_fn, [(pair, [x, y], CHUNK)])

        return train(pair, plan, loss_of_pair, parameters, shard, pair.no_sync), calls
    if plan.wrapped == "fsdp":
        mesh = DeviceMesh.from_group(group, "cpu")
        fully_shard(model.img, mesh=mesh, **plan.flags)
        if not plan.tied:
            fully_shard(model.txt, mesh=mesh, **plan.flags)
        img, txt = model.img, model.txt
        parameters = parameters_of(model)
    else:
        img = wrap(model.img)
        txt = img if plan.tied else wrap(model.txt)

    def loss(_: Any, x: Tensor, y: Tensor) -> Tensor:
        def loss_fn(a: Tensor, b: Tensor) -> Tensor:
            return infloss.contrastive_loss(a, b, model.log_scale.exp(), group=group)

        return cached_loss(loss_fn, [(img, x, CHUNK), (txt, y, CHUNK + 1)])

    @contextlib.contextmanager
    def quiet() -> Iterator[None]:
        with img.no_sync(), txt.no_sync():
            yield

    return train(model, plan, loss, parameters, shard, quiet, model.log_scale), calls


class Parts(nn.Module):
    """One module that the towers use different parts of, with a buffer that its calls update."""

    def __init__(self) -> None:
        super().__init__()
        self.img, self.txt = Encoder(1), Encoder(2)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        given, encoder = (x, self.img) if y is None else (y, self.txt)
        assert given is not None
        if self.training:
            self.mean.lerp_(given.detach().sum(0), 0.1)
        return encoder(given + self.mean)


def parts_step(group: Any, flags: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Gradients of three steps, by cached_loss and with the chunks in one graph by hand."""
    x, y = (side.split(SIZES)[dist.get_rank(group)] for side in batch(0))
    ours, plain = Parts(), Parts()
    wrapped = DistributedDataParallel(ours, process_group=group, **flags)
    average = copy.deepcopy(wrapped)
    found: list[Any] = []
    expected: list[Any] = []
    for _ in range(STEPS):
        for one in parameters_of(ours, plain):
            one.grad = None
        towers = [
            (lambda x: wrapped(x=x), x, CHUNK),
            (lambda y: wrapped(y=y), y, CHUNK),
        ]
        cached_loss(functools.partial(ring_loss, group), towers).backward()
        found.append([one.grad.clone() for one in parameters_of(ours)])  # type: ignore
        dist.broadcast(plain.mean, 0)
        img = torch.cat([plain(x=part) for part in x.split(CHUNK)])
        txt = torch.cat([plain(y=part) for part in y.split(CHUNK)])
        ring_loss(group, img, txt).backward()
        for one in parameters_of(plain):
            dist.all_reduce(one.grad.div_(3))  # type: ignore
        expected.append([one.grad.clone() for one in parameters_of(plain)])  # type: ignore
    average(x=x).sum().backward()
    return found, expected


def ring_loss(group: Any, img: Tensor, txt: Tensor) -> Tensor:
    return infloss.contrastive_loss(img, txt, 5.0, group=group)


@pytest.mark.parametrize("flags", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_towers_in_parts_of_one_wrapper(world: World, flags: dict[str, Any]) -> None:
    """The last chunk reaches half of the parameters; buffers come from the first rank."""
    for found, expected in world.run(parts_step, 3, flags):
        assert_same_steps(found, expected)


PLANS = {
    "a wrapper each": Plan(),
    "tied": Plan(tied=True),
    "one wrapper for both and the scale": Plan("pair"),
    "one wrapper for the loss": Plan("whole"),
    "one wrapper for the loss, tied": Plan("whole", tied=True),
    "unused parameters": Plan(unused=True, flags={"find_unused_parameters": True}),
    "unused parameters, tied": Plan(tied=True, unused=True, flags={"find_unused_parameters": True}),
    "static graph": Plan(flags={"static_graph": True}),
    "static graph, tied": Plan(tied=True, flags={"static_graph": True}),
    "static graph, one wrapper": Plan("pair", flags={"static_graph": True}),
    "static graph, with the loss": Plan("whole", flags={"static_graph": True}),
    "views of buckets": Plan(flags={"gradient_as_bucket_view": True}),
    "accumulation": Plan(accumulate=True),
    "accumulation, one wrapper": Plan("pair", accumulate=True),
    "accumulation, with the loss": Plan("whole", accumulate=True),
}


@pytest.mark.parametrize("name", PLANS)
def test_one_all_reduce_a_step(world: World, name: str) -> None:
    """Chunks in different numbers on each rank; every gradient that of one process."""
    plan = PLANS[name]
    expected = single(plan)
    for found, calls in world.run(ranks_step, 3, plan):
        assert calls == STEPS * plan.wrappers
        assert_same_steps(found, expected)


def assert_same_steps(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("flags", [{}, {"reshard_after_forward": True}], ids=str)
def test_sharded_encoders(world: World, tied: bool, flags: dict[str, Any]) -> None:
    """FSDP2, where each chunk is a collective: the ranks with fewer run along."""
    plan = Plan("fsdp", tied=tied, flags=flags)
    expected = single(plan)
    for found, _ in world.run(ranks_step, 3, plan):
        assert_same_steps(found, expected)


def evaluate_sharded(group: Any) -> Tensor:
    model = fully_shard(Encoder(1), mesh=DeviceMesh.from_group(group, "cpu"))
    x = rows(sum(SIZES)).split(SIZES)[dist.get_rank(group)]
    with torch.no_grad():
        return cached_loss(lambda a: a, [(model, x, CHUNK)])


def test_sharded_encoders_without_gradients(world: World) -> None:
    found = torch.cat(world.run(evaluate_sharded, 3))
    torch.testing.assert_close(found, Encoder(1)(rows(sum(SIZES))).detach())


def other_graph(group: Any, when: str) -> str:
    """A loss that uses a wrapped tower besides, in one of several ways."""
    model = DistributedDataParallel(Encoder(1), process_group=group)
    x = rows(6)

    def loss_fn(a: Tensor) -> Tensor:
        return contrastive(a, a.flip(0))

    towers = [(model, x, 4)]
    cached_loss(loss_fn, towers)
    if when == "a parameter":
        scale = model.module.output.bias.exp().sum()
        total = cached_loss(lambda a: scale * loss_fn(a), towers)
    elif when == "in one backward":
        total = model(x).sum() + cached_loss(loss_fn, towers)
    elif when == "kept waiting":
        extra = model(x).sum()
        total = cached_loss(loss_fn, towers)
        total.backward()
        extra.backward()
        return "no error"
    elif when == "run before":
        extra = model(x).sum()
        total = cached_loss(loss_fn, towers)
        extra.backward()
    elif when == "run after":
        total = cached_loss(loss_fn, towers)
        total.backward()
        total = model(x).sum()
    else:
        model(x)  # its graph is gone at once
        with torch.no_grad():
            kept = model(x)
        total = cached_loss(loss_fn, towers)
        del kept
    total.backward()
    return "no error"


@pytest.mark.parametrize(
    ("when", "message"),
    [
        (
            "a parameter",
            "cached_loss: expected DistributedDataParallel towers to be used by cached_loss "
            "alone, got a loss that uses their parameter output.bias besides",
        ),
        (
            "in one backward",
            "cached_loss: expected DistributedDataParallel towers to be used by cached_loss "
            "alone, got a loss that uses their parameter hidden.weight besides",
        ),
        (
            "kept waiting",
            "cached_loss: expected no other graph through a DistributedDataParallel tower, got "
            "one whose backward pass has not run",
        ),
    ],
)
def test_other_graphs_through_a_wrapped_tower(world: World, when: str, message: str) -> None:
    for outcome in world.outcomes(other_graph, range(2), when):
        assert isinstance(outcome, RankError)
        assert outcome.kind == "RuntimeError"
        assert outcome.message.startswith(message)


@pytest.mark.parametrize("when", ["run before", "run after", "dropped"])
def test_graphs_that_are_in_nobodys_way(world: World, when: str) -> None:
    assert world.run(other_graph, 2, when) == ["no error"] * 2


def whole_with_search(group: Any) -> None:
    outer = DistributedDataParallel(
        Whole(Towers(False, False), group), process_group=group, find_unused_parameters=True
    )
    outer(rows(6), rows(6))


def test_inside_a_wrapper_that_searches_unused_parameters(world: World) -> None:
    for outcome in world.outcomes(whole_with_search, range(2)):
        assert isinstance(outcome, RankError)
        assert outcome.message.startswith(
            "cached_loss: expected find_unused_parameters=False of a DistributedDataParallel"
        )


def gathered_step(group: Any) -> list[list[Tensor]]:
    model = Towers(False, False)
    img = DistributedDataParallel(model.img)
    txt = DistributedDataParallel(model.txt)

    @gather_input_tensor
    def loss_fn(a: Tensor, b: Tensor, target: Tensor, scale: Any = None) -> Tensor:
        return torch.nn.functional.cross_entropy(scale * a @ b.T, target)

    def loss(_: Any, x: Tensor, y: Tensor) -> Tensor:
        start = sum(SIZES[: dist.get_rank(group)])
        target = torch.arange(start, start + len(x))
        scale = torch.tensor(0.3, dtype=torch.float64)

        def with_target(a: Tensor, b: Tensor) -> Tensor:
            return loss_fn(a, b, target=target, scale=scale)

        return cached_loss(with_target, [(img, x, CHUNK), (txt, y, CHUNK)])

    shard = lambda x: x.split(SIZES)[dist.get_rank(group)]  # noqa: E731
    return train(model, Plan(), loss, parameters_of(img, txt), shard)


def test_a_gathered_loss(world: World) -> None:
    """Positional and keyword tensors of uneven shards, integers too; a scalar stays."""
    model = Towers(False, False)

    def loss(_: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = 0.3 * model.img(x) @ model.txt(y).T
        return torch.nn.functional.cross_entropy(logits, torch.arange(len(x)))

    expected = train(model, Plan(), loss, parameters_of(model.img, model.txt), lambda x: x)
    for found in world.run(gathered_step, 3):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


class DeepSpeedEngine(nn.Module):
    """What the library's engine looks like from here."""

    def __init__(self, module: nn.Module, stage: int) -> None:
        super().__init__()
        self.module, self.stage = module, stage

    def zero_optimization_stage(self) -> int:
        return self.stage

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


def test_deepspeed_stages() -> None:
    """Row 33: refused early from stage 2 on, before any model runs."""
    x, message = (
        rows(4),
        r"^towers\[1\]: model: expected no DeepSpeed ZeRO stage above 1, got stage ",
    )
    for stage in (0, 1):
        cached_loss(lambda a: a, [(DeepSpeedEngine(Encoder(), stage), x, 2)])
    for stage in (2, 3):
        encoder = Encoder()
        engine = DeepSpeedEngine(encoder, stage)
        with pytest.raises(NotImplementedError, match=f"{message}{stage}, "):
            cached_loss(contrastive, [(encoder, x, 2), (engine, x, 2)])
        assert encoder.rows == []
    partitioned = Encoder()
    partitioned.output.bias.ds_id = 7  # type: ignore
    with pytest.raises(NotImplementedError, match=f"{message}3, "):
        cached_loss(contrastive, [(Encoder(), x, 2), (partitioned, x, 2)])
