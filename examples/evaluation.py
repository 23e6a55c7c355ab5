"""Held-out recall, and the record of a run."""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import emoji_data
from emoji_data import EmojiData
from model import TwoTower

CUTOFFS = (1, 5, 10)
Recall = dict[str, list[float]]  # by direction, one share for each cutoff


@dataclass
class History:
    """What the plots show: a loss each step, recalls after some of them."""

    loss: list[float] = field(default_factory=list)
    evaluated_at: list[int] = field(default_factory=list)
    recall: list[Recall] = field(default_factory=list)


@torch.no_grad()
def similarity(model: TwoTower, data: EmojiData, indices: np.ndarray) -> Tensor:
    """Cosines of pictures (rows) and full captions (columns) of the given emoji, [n, n]."""
    model.eval()
    captions = [emoji_data.full_caption(data, index) for index in indices]
    img = F.normalize(model.image(emoji_data.pictures(data, indices)))
    txt = F.normalize(model.text(*emoji_data.hash_captions(captions, img.device)))
    model.train()
    return img @ txt.T


def ranks_of_match(scores: Tensor) -> Tensor:
    """[n, n] scores, a query a row -> [n] places of the diagonal, 0 the best."""
    return (scores > scores.diagonal()[:, None]).sum(1)


def recall(similarities: Tensor) -> Recall:
    """Share of queries whose match is among the best k, for each k in ``CUTOFFS``."""

    def one_way(scores: Tensor) -> list[float]:
        ranks = ranks_of_match(scores)
        return [(ranks < k).float().mean().item() for k in CUTOFFS]

    return {"image -> text": one_way(similarities), "text -> image": one_way(similarities.T)}


def chance(count: int) -> list[float]:
    """Recall of a random order of ``count`` candidates."""
    return [min(1.0, k / count) for k in CUTOFFS]


def table(before: Recall, after: Recall, count: int) -> str:
    """Recall before and after training, chance beside it."""
    title = f"recall over {count} unseen concepts"
    lines = [f"{title:34}{'before':>9}{'after':>9}{'chance':>9}"]
    for direction in before:
        columns = (CUTOFFS, before[direction], after[direction], chance(count))
        for k, old, new, guess in zip(*columns, strict=True):
            label = f"  {direction}  recall@{k}"
            lines.append(f"{label:34}{old:>9.1%}{new:>9.1%}{guess:>9.1%}")
    return "\n".join(lines)
