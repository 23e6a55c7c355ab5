"""How contrastive losses of a batch that ranks share pass its gradient on, a few lines each.

Every convention here takes a rank's own rows, unit length or not, and the group that shares the
batch, and leaves the reduction of parameter gradients to the trainer. Other libraries' are restated
from what they publish, in torch ops on gathered features: what differs between them is where the
gradient goes and by what factor, not how the similarities are computed. All but infloss's need
shards of one size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import infloss
from infloss import reference

Loss = Callable[[Tensor, Tensor, Tensor, Any], Tensor]  # (img, txt, logit_scale, group) -> []


@dataclass(frozen=True)
class Convention:
    """A loss that ranks share, and the same loss of the whole batch in one process."""

    name: str
    loss: Loss
    single: Callable[[Tensor, Tensor, Tensor], Tensor]  # (img, txt, logit_scale) -> []


class _Gather(torch.autograd.Function):
    """Rows of all ranks; backward sums their gradients over the ranks, times ``factor``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, factor: float) -> Tensor:
        ctx.group, ctx.factor = group, factor
        return torch.cat(_copies(rows, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        summed = grad.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        own = summed.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)]
        return own * ctx.factor, None, None


class _SumInBackward(torch.autograd.Function):
    """The value as it is; backward sums its gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        summed = grad.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


def _copies(rows: Tensor, group: Any) -> list[Tensor]:
    """Every rank's rows, without gradient."""
    rows = rows.detach().contiguous()
    copies = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(copies, rows, group=group)
    return copies


def _with_own_slot(rows: Tensor, group: Any) -> Tensor:
    """Every rank's rows, of which this rank's own alone carry gradient."""
    copies = _copies(rows, group)
    copies[dist.get_rank(group)] = rows
    return torch.cat(copies)


def _one_way(query: Tensor, keys: Tensor, scale: Tensor | float, first: int = 0) -> Tensor:
    """Mean loss of queries whose positives are the keys from ``first`` on."""
    target = torch.arange(first, first + len(query))
    return F.cross_entropy(scale * query @ keys.T, target)


def _two_way(
    img: Tensor, txt: Tensor, all_img: Tensor, all_txt: Tensor, scale: Tensor, first: int = 0
) -> Tensor:
    """Mean of both directions for the pairs that stand from ``first`` on in the whole batch."""
    forth = _one_way(img, all_txt, scale, first)
    return (forth + _one_way(txt, all_img, scale, first)) / 2


def _unit(*sides: Tensor) -> list[Tensor]:
    return [F.normalize(side, dim=-1) for side in sides]


def _own_start(rows: Tensor, group: Any) -> int:
    return dist.get_rank(group) * len(rows)


def in_tiles(img: Tensor, txt: Tensor, scale: Tensor, group: Any, *, strategy: str) -> Tensor:
    """infloss: the global mean on every rank; what it adds to a gradient is undone by averaging."""
    return infloss.contrastive_loss(img, txt, scale, group=group, strategy=strategy)


def open_clip(
    img: Tensor,
    txt: Tensor,
    scale: Tensor,
    group: Any,
    *,
    local_loss: bool,
    gather_with_grad: bool,
) -> Tensor:
    """open_clip's ClipLoss (src/open_clip/loss.py).

    ``local_loss``: a rank's own rows against all, for all rows against all. ``gather_with_grad``:
    through the gathered rows gradients come back, summed over the ranks. Without it a rank's own
    rows alone carry gradient, or with ``local_loss`` no gathered row does.
    """
    img, txt = _unit(img, txt)
    if dist.get_world_size(group) == 1:
        return _two_way(img, txt, img, txt, scale)
    if gather_with_grad:
        all_img, all_txt = (_Gather.apply(side, group, 1.0) for side in (img, txt))
    elif local_loss:
        all_img, all_txt = (torch.cat(_copies(side, group)) for side in (img, txt))
    else:
        all_img, all_txt = (_with_own_slot(side, group) for side in (img, txt))
    if local_loss:
        return _two_way(img, txt, all_img, all_txt, scale, _own_start(img, group))
    return _two_way(all_img, all_txt, all_img, all_txt, scale)


def disco_clip(img: Tensor, txt: Tensor, scale: Tensor, group: Any) -> Tensor:
    """DisCo-CLIP (arXiv 2304.08480; disco/gather.py and the use that its README shows).

    A rank's rows, cut from the gathered ones, against all; the gradients of the gathered rows are
    averaged over the ranks. Its README has a constant logit scale and adds the two directions up:
    here the scale is a parameter and they are averaged, which changes no ratio.
    """
    factor = 1 / dist.get_world_size(group)
    all_img, all_txt = (_Gather.apply(side, group, factor) for side in _unit(img, txt))
    first = _own_start(img, group)
    own = slice(first, first + len(img))
    return _two_way(all_img[own], all_txt[own], all_img, all_txt, scale, first)


def grad_cache(img: Tensor, txt: Tensor, scale: Tensor, group: Any) -> Tensor:
    """GradCache's DistributedContrastiveLoss (src/grad_cache/loss.py): one direction, all rows.

    A rank's own rows alone carry gradient. The loss takes no logit scale: here the queries are
    multiplied by it before, as the only place that this leaves. Chunking the encoders, which this
    loss comes with, changes no gradient.
    """
    img, txt = _unit(img, txt)
    return _one_way(_with_own_slot(scale * img, group), _with_own_slot(txt, group), 1.0)


def inf_cl(img: Tensor, txt: Tensor, scale: Tensor, group: Any) -> Tensor:
    """Inf-CL's cal_inf_loss in both directions (arXiv 2410.17243; inf_cl/ring.py).

    A rank's rows against all. Its ring brings a block's gradient home as the sum of all ranks'
    parts, as the gather here does. Backward also sums the logit scale's gradient over the ranks.
    """
    scale = _SumInBackward.apply(scale, group)
    img, txt = _unit(img, txt)
    all_img, all_txt = (_Gather.apply(side, group, 1.0) for side in (img, txt))
    return _two_way(img, txt, all_img, all_txt, scale, _own_start(img, group))


def single_two_way(img: Tensor, txt: Tensor, scale: Tensor) -> Tensor:
    """The CLIP loss of the whole batch in one process."""
    return reference.contrastive_loss(img, txt, scale).mean()


def single_one_way(img: Tensor, txt: Tensor, scale: Tensor) -> Tensor:
    """InfoNCE of the whole batch in one process, images as queries."""
    return reference.info_nce(img, txt, None, scale).mean()


def _modes() -> list[Convention]:
    """open_clip's four; the first is its default."""
    return [
        Convention(
            "open_clip" + (f", {' and '.join(words)}" if words else ", default"),
            partial(open_clip, local_loss=local, gather_with_grad=grad),
            single_two_way,
        )
        for local, grad, words in (
            (False, False, []),
            (False, True, ["gather_with_grad"]),
            (True, False, ["local_loss"]),
            (True, True, ["local_loss", "gather_with_grad"]),
        )
    ]


OURS = [
    Convention(f"infloss, {strategy}", partial(in_tiles, strategy=strategy), single_two_way)
    for strategy in ("ring", "gather")
]
THEIRS = [
    *_modes(),
    Convention("DisCo-CLIP", disco_clip, single_two_way),
    Convention("GradCache", grad_cache, single_one_way),
    Convention("Inf-CL", inf_cl, single_two_way),
]
