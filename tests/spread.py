"""A loss on one batch spread over ranks, judged as the batch of one process is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import infloss
from infloss.distributed import ring
from support import Case, Outputs
from world import World


@dataclass(frozen=True)
class Spread:
    """How a batch lies on the ranks, and what they are asked for."""

    world: World
    sizes: tuple[int, ...]  # rows of each rank
    key_sizes: tuple[int, ...] | None = None  # None: as the rows
    ranks: tuple[int, ...] | None = None  # of the world; None: the first
    strategy: str = "ring"
    grad_reduction: str = "mean"
    assume_even: bool = False
    block_rows: int = 5

    @property
    def members(self) -> tuple[int, ...]:
        return self.ranks or tuple(range(len(self.sizes)))


@dataclass(frozen=True)
class SpreadCase(Case):
    """One loss on one batch; :meth:`ours` runs it over ranks and puts the parts together.

    Gradients are reduced as a trainer would: averaged or summed for logit_scale, and for a
    feature, which one rank holds, divided by W or left.
    """

    spread: Spread | None = None

    def to(self, device: torch.device) -> SpreadCase:
        return self

    def ours(self) -> Outputs:
        spread = self.spread
        assert spread is not None
        key_sizes = spread.key_sizes or spread.sizes
        options = {
            "normalize": self.normalize,
            "reduction": self.reduction,
            "strategy": spread.strategy,
            "grad_reduction": spread.grad_reduction,
            "assume_even": spread.assume_even,
        }
        upstream = self.factor
        shards = [
            {
                "x": x.clone(),
                "y": y.clone(),
                "target": target,
                "upstream": factor,
            }
            for x, y, target, factor in zip(
                self.x.split(spread.sizes),
                self.y.split(key_sizes),
                _split(self.target, spread.sizes),
                _split(upstream if isinstance(upstream, Tensor) else None, spread.sizes),
                strict=True,
            )
        ]
        job = {
            "shards": shards,
            "scale": self.scale,
            "upstream": upstream,
            "one_way": self.one_way,
            "frozen": self.frozen,
            "options": options,
            "block_rows": spread.block_rows,
        }
        parts = spread.world.run(step_of_rank, spread.members, job)
        world = len(spread.sizes) if spread.grad_reduction == "mean" else 1
        losses = [part.loss for part in parts]
        if self.reduction != "none":
            assert all(torch.equal(loss, losses[0]) for loss in losses)
        return Outputs(
            torch.cat(losses) if self.reduction == "none" else losses[0],
            _together([part.dx for part in parts], world),
            _together([part.dy for part in parts], world),
            sum(part.dscale.double() for part in parts).div(world).to(parts[0].dscale.dtype),
        )


def _split(values: Tensor | None, sizes: Sequence[int]) -> Sequence[Tensor | None]:
    return [None] * len(sizes) if values is None else [part.clone() for part in values.split(sizes)]


def _together(parts: list[Tensor | None], world: int) -> Tensor | None:
    if parts[0] is None:
        return None
    whole = torch.cat([part for part in parts if part is not None])
    return whole.double().div(world).to(whole.dtype)


def step_of_rank(group: Any, job: dict[str, Any]) -> Outputs:
    """One rank's loss and gradients."""
    ring.BLOCK_ROWS = job["block_rows"]
    shard = job["shards"][torch.distributed.get_rank(group)]
    x = shard["x"].requires_grad_("x" not in job["frozen"])
    y = shard["y"].requires_grad_("y" not in job["frozen"])
    wide = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    scale = torch.tensor(job["scale"], dtype=wide, requires_grad=True)
    if job["one_way"]:
        loss = infloss.info_nce(x, y, shard["target"], scale, group=group, **job["options"])
    else:
        loss = infloss.contrastive_loss(x, y, scale, group=group, **job["options"])
    upstream = job["upstream"] if shard["upstream"] is None else shard["upstream"]
    (loss * upstream).sum().backward()
    return Outputs(loss.detach(), x.grad, y.grad, scale.grad)
