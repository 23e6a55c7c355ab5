"""Encoders to run in chunks, and the same chunks in one ordinary graph to judge them by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import infloss
from support import normal

WIDTH = 6  # features of an input row
DIM = 8  # of a representation


class Encoder(nn.Module):
    """A small tower in float64, with dropout if asked; counts its calls and their rows."""

    def __init__(self, seed: int = 0, dropout: float = 0.0, width: int = 16) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(WIDTH, width), nn.Linear(width, DIM)
        self.dropout = nn.Dropout(dropout)
        self.rows: list[int] = []
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=97 * seed + index))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.output(self.dropout(self.hidden(x).tanh()))


def rows(count: int = 11, seed: int = 0) -> Tensor:
    """[count, WIDTH] float64 inputs."""
    return normal(count, WIDTH, seed=100 + seed, dtype=torch.float64)


def contrastive(img: Tensor, txt: Tensor) -> Tensor:
    """The loss that most tests take."""
    return infloss.contrastive_loss(img, txt, 5.0)


def in_one_graph(model: Callable[..., Tensor], x: Tensor, chunk_size: int) -> Tensor:
    """The representations by ordinary autograd, chunk after chunk."""
    return torch.cat([model(part) for part in x.split(chunk_size)])


def parameters_of(*modules: nn.Module) -> list[nn.Parameter]:
    """Each parameter once."""
    return list(dict.fromkeys(one for module in modules for one in module.parameters()))


def gradients(
    step: Callable[[], Tensor], parameters: Iterable[Tensor], seed: int = 0
) -> tuple[Tensor, list[Tensor | None]]:
    """Loss of a step under one seed, and the gradients that it leaves."""
    parameters = list(parameters)
    for one in parameters:
        one.grad = None
    torch.manual_seed(seed)
    loss = step()
    loss.backward()
    return loss.detach(), [None if one.grad is None else one.grad.clone() for one in parameters]


def assert_same_step(
    cached: Callable[[], Tensor],
    plain: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    **tolerance: Any,
) -> None:
    """Both steps have one loss, and leave the same gradients with every parameter."""
    tolerance = {"rtol": 1e-10, "atol": 1e-12, **tolerance}
    loss, found = gradients(cached, parameters)
    expected_loss, expected = gradients(plain, parameters)
    torch.testing.assert_close(loss, expected_loss, **tolerance)
    assert any(one is not None for one in expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, **tolerance)
