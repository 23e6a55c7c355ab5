"""What the losses of a spread batch share with those of one process, and what is theirs alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import infloss
from infloss.distributed import ring
from infloss.distributed.exchange import PointToPoint
from infloss.distributed.strategy import gathered_bytes
from support import assert_same, features, normal, step
from world import World

STRATEGIES = pytest.mark.parametrize("strategy", ["ring", "gather"])
SIZES = (7, 0, 12, 5)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()


def shard(x: Tensor, group: Any, sizes: tuple[int, ...] = SIZES) -> Tensor:
    return x.split(sizes)[dist.get_rank(group)]


def batch(dtype: torch.dtype = torch.float64, size: int = 24) -> tuple[Tensor, Tensor]:
    return features("weak", size, size, 6, dtype)


def stats_of_rank(group: Any, strategy: str, one_way: bool) -> Any:
    x, y = (shard(side, group) for side in batch())
    options: dict[str, Any] = {"group": group, "strategy": strategy, "return_stats": True}
    if one_way:
        return infloss.info_nce(x, y, logit_scale=20.0, **options)
    return infloss.contrastive_loss(x, y, 20.0, **options)


@STRATEGIES
@pytest.mark.parametrize("one_way", [False, True])
def test_stats_are_those_of_one_process(world: World, strategy: str, one_way: bool) -> None:
    """Per-pair ones of a rank's own rows, accuracies of the whole batch."""
    parts = world.run(stats_of_rank, 4, strategy, one_way)
    x, y = batch()
    if one_way:
        whole: Any = infloss.info_nce(x, y, logit_scale=20.0, return_stats=True)
    else:
        whole = infloss.contrastive_loss(x, y, 20.0, return_stats=True)
    for name in whole._fields:
        values = [getattr(part, name) for part in parts]
        if name == "strategy":
            assert values == [strategy] * 4
        elif values[0].dim():
            torch.testing.assert_close(torch.cat(values), getattr(whole, name))
        else:
            assert_same(values, [values[0]] * 4)
            torch.testing.assert_close(values[0], getattr(whole, name))
    accuracies = [getattr(whole, name) for name in whole._fields if name.startswith("accuracy")]
    assert all(0 < accuracy < 1 for accuracy in accuracies)


def step_of_rank(group: Any, dtype: torch.dtype, **options: Any) -> Any:
    x, y = (shard(side, group) for side in batch(dtype))

    def loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return infloss.contrastive_loss(x, y, scale, group=group, **options)

    return step(loss, x, y, 20.0)


def twice(group: Any, strategy: str) -> bool:
    ring.BLOCK_ROWS = 3
    first, second = (step_of_rank(group, torch.float32, strategy=strategy) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@STRATEGIES
def test_two_runs_agree_bit_for_bit(world: World, strategy: str) -> None:
    assert world.run(twice, 4, strategy) == [True] * 4


def mesh_step_of_rank(group: Any, shape: tuple[int, ...], block_rows: int) -> Any:
    ring.BLOCK_ROWS = block_rows
    mesh = dist.device_mesh.init_device_mesh("cpu", shape)
    x, y = (shard(side, group) for side in batch())
    scale = torch.tensor(20.0, dtype=torch.float64, requires_grad=True)
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    out: Any = infloss.contrastive_loss(x, y, scale, group=mesh, return_stats=True)
    out.loss.backward()
    return out.loss.detach(), x.grad, y.grad, scale.grad, out.strategy


@pytest.mark.parametrize("block_rows", [3, 100])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (4,), (2, 1, 2)], ids=str)
def test_a_mesh_of_nodes_and_ranks(world: World, shape: tuple[int, ...], block_rows: int) -> None:
    """Nested rings: the inner one goes round once a step of the outer one."""
    parts = world.run(mesh_step_of_rank, 4, shape, block_rows)
    loss, dx, dy, dscale = step(infloss.contrastive_loss, *batch(), 20.0)
    assert {part[4] for part in parts} == {"gather" if len(shape) == 1 else "ring"}
    for part in parts:
        torch.testing.assert_close(part[0], loss)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]) / 4, dx)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]) / 4, dy)
    torch.testing.assert_close(sum(part[3] for part in parts) / 4, dscale)


def losses_on_slices(group: Any) -> list[Tensor]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    x, y = (shard(side, group) for side in batch())
    slices = [mesh["a", "c"], mesh["b", "c"], mesh["a"]]
    return [infloss.contrastive_loss(x, y, 20.0, group=one) for one in slices]


def test_slices_of_a_mesh_that_share_an_inner_group(world: World) -> None:
    """Two batches of two ranks each on either slice, whose innermost group is one rank's."""
    found = world.run(losses_on_slices, 4)
    shards = list(zip(*(side.split(SIZES) for side in batch()), strict=True))
    for rank, (along_a, along_b, flat) in enumerate(found):
        for loss, pair in [(along_a, (rank % 2, rank % 2 + 2)), (along_b, (rank & 2, rank | 1))]:
            x, y = (torch.cat([shards[one][side] for one in pair]) for side in (0, 1))
            torch.testing.assert_close(loss, infloss.contrastive_loss(x, y, 20.0))
        torch.testing.assert_close(flat, along_a)


def chosen(group: Any, limit: int, size: int) -> str:
    x = normal(size, 64)
    with infloss.workspace_limit(limit):
        out: Any = infloss.contrastive_loss(x, x, group=group, return_stats=True)
    return str(out.strategy)


def test_auto_gathers_what_fits_the_workspace(world: World) -> None:
    mib = 1 << 20
    most = mib // gathered_bytes(2, 64, torch.float32)
    assert gathered_bytes(2 * most, 64, torch.float32) <= mib
    assert world.run(chosen, 2, mib, most) == ["gather"] * 2
    assert world.run(chosen, 2, mib, most + 1) == ["ring"] * 2
    assert world.run(chosen, 2, 2 * mib, most + 1) == ["gather"] * 2


def compiled(group: Any) -> tuple[Tensor, Tensor]:
    x, y = (shard(side, group) for side in batch())

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return infloss.contrastive_loss(x * 2, y * 3, 20.0, group=group) * 2

    return loss(x, y), torch.compile(loss, backend="aot_eager")(x, y)


def test_a_compiled_caller_breaks_its_graph_at_the_loss(world: World) -> None:
    for eager, out in world.run(compiled, 4):
        assert torch.equal(eager, out)


def without_grad(group: Any, strategy: str) -> bool:
    """Ranks may differ in what they would learn, where nothing is learned."""
    x, y = (shard(side, group) for side in batch())
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=dist.get_rank(group) == 1)
    with torch.no_grad():
        return infloss.contrastive_loss(x, y, scale, group=group, strategy=strategy).requires_grad


@STRATEGIES
def test_no_grad(world: World, strategy: str) -> None:
    assert world.run(without_grad, 4, strategy) == [False] * 4


def mixed(group: Any, strategy: str) -> tuple[torch.dtype, ...]:
    x, y = (shard(side, group) for side in batch(torch.bfloat16))
    x, y = x.clone().requires_grad_(), y.float().T.contiguous().T.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=strategy == "ring"):
        loss = infloss.contrastive_loss(x, y, 3.0, group=group, strategy=strategy)
    loss.backward()
    assert x.grad is not None
    assert y.grad is not None
    return loss.dtype, x.grad.dtype, y.grad.dtype


@STRATEGIES
def test_mixed_dtypes_and_any_strides(world: World, strategy: str) -> None:
    """Cases 10 and 16."""
    expected = (torch.float32, torch.bfloat16, torch.float32)
    assert world.run(mixed, 4, strategy) == [expected] * 4


def second_derivative(group: Any) -> None:
    x, y = (shard(side, group).requires_grad_() for side in batch())
    loss = infloss.contrastive_loss(x, y, 3.0, group=group)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (first.sum() + x.sum()).backward()


def test_a_second_derivative_raises(world: World) -> None:
    outcomes = world.outcomes(second_derivative, range(4))
    expected = "second derivatives of the contrastive loss are not implemented"
    assert {(one.kind, one.message) for one in outcomes} == {("NotImplementedError", expected)}


class SavedBytes:
    """Counts what autograd keeps for backward."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hooks.__exit__(*exc)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.count += tensor.untyped_storage().nbytes()
        return tensor


def saved_bytes(group: Any, strategy: str, size: int) -> int:
    x, y = normal(size, 16).requires_grad_(), normal(size, 16).requires_grad_()
    with SavedBytes() as saved:
        infloss.contrastive_loss(x, y, group=group, strategy=strategy)
    return saved.count


def test_a_ring_saves_nothing_of_other_ranks(world: World) -> None:
    """O(b D) for a shard of b pairs, in any world; gathering keeps the other side: O(B D)."""
    alone = world.run(saved_bytes, 1, "ring", 256)[0]
    assert world.run(saved_bytes, 4, "ring", 256) == [alone] * 4
    side = 256 * 16 * 4
    assert world.run(saved_bytes, 4, "gather", 256) == [alone + 3 * side] * 4


def largest_sent(group: Any, block_rows: int) -> int:
    ring.BLOCK_ROWS = block_rows
    sent: list[int] = []
    post = PointToPoint.post

    def spy(self: PointToPoint, outgoing: tuple[Tensor, ...], rows: int) -> Any:
        sent.extend(len(tensor) for tensor in outgoing)
        return post(self, outgoing, rows)

    with mock.patch.object(PointToPoint, "post", spy):
        step_of_rank(group, torch.float32, strategy="ring")
    return max(sent)


@pytest.mark.parametrize(("block_rows", "largest"), [(3, 3), (8, 6), (12, 12), (100, 12)])
def test_a_ring_travels_in_sub_blocks(world: World, block_rows: int, largest: int) -> None:
    """Shards of up to 12 pairs in as few, and as equal, parts as the limit allows."""
    assert max(world.run(largest_sent, 4, block_rows)) == largest


def module_of_rank(group: Any) -> tuple[Tensor, Tensor | None]:
    x, y = (shard(side, group, (6, 6, 6, 6)) for side in batch(torch.float32))
    criterion = infloss.ContrastiveLoss(10.0, group=group, assume_even=True)
    loss: Any = criterion(x, y)
    loss.backward()
    return loss.detach(), criterion.log_logit_scale.grad


def test_the_module(world: World) -> None:
    parts = world.run(module_of_rank, 4)
    criterion = infloss.ContrastiveLoss(10.0)
    loss: Any = criterion(*batch(torch.float32))
    loss.backward()
    for part in parts:
        torch.testing.assert_close(part[0], loss.detach())
    mean = torch.stack([part[1] for part in parts]).mean(0)
    torch.testing.assert_close(mean, criterion.log_logit_scale.grad)


def copies_of_module(group: Any) -> bool:
    criterion = infloss.ContrastiveLoss(10.0, group=group)
    average = copy.deepcopy(criterion)  # as an average of weights over steps begins
    x, y = (shard(side, group) for side in batch())
    assert average.group is group
    assert average.log_logit_scale is not criterion.log_logit_scale
    return torch.equal(average(x, y), criterion(x, y))


def test_a_copy_of_the_module_shares_its_group(world: World) -> None:
    assert world.run(copies_of_module, 4) == [True] * 4


def gathered(group: Any, grad_reduction: str) -> tuple[Tensor, Tensor, bool]:
    """F_q = sum of q + 1 times all values, squared: its gradient in closed form."""
    x = shard(batch()[0], group).clone().requires_grad_()
    everything = infloss.all_gather(x, group, grad_reduction=grad_reduction)
    upstream = 2 * (dist.get_rank(group) + 1) * everything.detach()
    before = upstream.clone()
    everything.backward(upstream)
    assert x.grad is not None
    return everything.detach(), x.grad, torch.equal(upstream, before)


@pytest.mark.parametrize(("grad_reduction", "factor"), [("mean", 10.0), ("sum", 2.5)])
def test_all_gather(world: World, grad_reduction: str, factor: float) -> None:
    """Rows in order; the gradient of the sum over ranks, or of their mean where a trainer adds."""
    x, _ = batch()
    for everything, _, untouched in (parts := world.run(gathered, 4, grad_reduction)):
        assert torch.equal(everything, x)
        assert untouched
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), 2 * factor * x)


def second_derivative_of_gather(group: Any) -> bool:
    """Twice differentiated, sum over ranks q of (q + 1) times the sum of all values cubed."""
    x = shard(batch()[0], group).clone().requires_grad_()
    everything = infloss.all_gather(x, group)
    value = (everything**3).sum() * (dist.get_rank(group) + 1)
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first, 10 * 3 * x**2)
    torch.testing.assert_close(second, 10 * 6 * x)
    return True


def test_all_gather_can_be_differentiated_twice(world: World) -> None:
    assert world.run(second_derivative_of_gather, 4) == [True] * 4
