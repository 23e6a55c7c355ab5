"""All towers of one step as one autograd node, whose backward pass replays them."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from infloss.grad_cache import buffers
from infloss.grad_cache.data_parallel import DataParallel
from infloss.grad_cache.encoder import Encoder


class Step:
    """The towers' encoders between their two passes."""

    def __init__(self, encoders: Sequence[Encoder]) -> None:
        self._encoders = list(encoders)
        modules = [module for one in encoders for module in one.modules]
        self._parallel = DataParallel(modules)

    def encode(self) -> list[Any]:
        """The representations of each tower, as its model returns them."""
        _forget_casts()
        self._parallel.broadcast_buffers()
        tensors = [one.encode(index, self._parallel) for index, one in enumerate(self._encoders)]
        _forget_casts()
        layouts = [one.layout for one in self._encoders]
        if torch.is_grad_enabled() and any(one.is_trainable for one in self._encoders):
            self._parallel.watch_graphs()
            tensors = self._connected(tensors)
        return [layout.fill(part) for layout, part in zip(layouts, tensors, strict=True)]

    def _connected(self, tensors: list[list[Tensor]]) -> list[list[Tensor]]:
        constant = [
            tensor
            for encoder, part in zip(self._encoders, tensors, strict=True)
            for tensor in part
            if not (encoder.is_trainable and (tensor.is_floating_point() or tensor.is_complex()))
        ]
        inputs = [tensor for one in self._encoders for tensor in one.inputs()]
        trigger = torch.zeros((), requires_grad=True)
        flat = [tensor for part in tensors for tensor in part]
        outputs = iter(_Replay.apply(self, flat, constant, trigger, *inputs))
        return [[next(outputs) for _ in part] for part in tensors]

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Accumulate the parameters' gradients; return those of the towers' inputs."""
        if not self._encoders:
            raise RuntimeError(
                "cached_loss: expected one backward pass, got a second; what is added up before "
                "the first, or cached_loss called again, does the same"
            )
        encoders, self._encoders = self._encoders, []
        for one in encoders:
            one.check_unchanged()
        self._parallel.refuse_other_graphs()
        left = iter(grads)
        shares = [[next(left) for _ in one.layout.paths] for one in encoders]
        found: list[Tensor | None] = []
        with contextlib.ExitStack() as stack:
            for one in encoders:
                stack.enter_context(buffers.kept(one.keys()))
            stack.callback(_forget_casts)
            _forget_casts()
            for index, (one, share) in enumerate(zip(encoders, shares, strict=True)):
                found += self._replay(index, one, share)
            self._parallel.finish()
        return found

    def _replay(
        self, index: int, encoder: Encoder, grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        if not encoder.is_trainable:
            return []
        found: list[Tensor | None] = []
        parts = encoder.layout.split(grads)
        for turn in range(encoder.turns):
            part = parts[min(turn, len(parts) - 1)]
            with self._parallel.taking((index, turn)):
                inputs = encoder.replay(turn, part, self._parallel.backward)
            found += inputs if turn < len(parts) else []
        return found


def _forget_casts() -> None:
    """What torch caches of parameters: made without a graph, it would keep gradients from them."""
    torch.clear_autocast_cache()
    parametrize._cache.clear()


class _Replay(torch.autograd.Function):
    """Representations made without a graph; their gradients are what the replay starts from."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        tensors: list[Tensor],
        constant: list[Tensor],
        trigger: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constant)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise NotImplementedError("cached_loss: expected no second derivative, got one asked")
        return None, None, None, None, *ctx.step.backward(grads)
