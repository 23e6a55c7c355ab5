"""The gradient cache as decorators, for a batch that arrives in pieces.

The interface of ``grad_cache.functional`` (Gao et al. 2021, arXiv 2101.06983)::

    @infloss.grad_cache.cached
    def encode(model, x):
        return model(x)

    @infloss.grad_cache.cat_input_tensor
    def loss_fn(img, txt):
        return infloss.contrastive_loss(img, txt)

    images, texts, closures = [], [], []
    for x, y in pieces:
        image, replay_image = encode(image_model, x)
        text, replay_text = encode(text_model, y)
        images.append(image)
        texts.append(text)
        closures += [(replay_image, image), (replay_text, text)]
    loss_fn(images, texts).backward()
    for replay, rep in closures:
        replay(rep)
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from infloss.distributed.all_gather import all_gather
from infloss.grad_cache.buffers import kept
from infloss.grad_cache.data_parallel import DataParallel
from infloss.grad_cache.encoder import Encoder
from infloss.grad_cache.modules import modules_of
from infloss.grad_cache.tower import Tower


def cached(func: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Have a function that calls a model return leaves for the loss, and what replays the call.

    The decorated function returns ``(*representations, replay)``. After the loss has been run
    backward, ``replay(representations)`` calls ``func`` again, under the random numbers, the
    autocast state and the buffers of the first call, and takes their gradient on to its
    parameters. ``replay`` takes one tensor, or a tuple of several, and runs once.

    Args:
        func: what it returns is a tensor or a tuple of tensors.
    """

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = [module for one in [*args, *kwargs.values()] for module in modules_of(one)]
        tower = Tower(
            func,
            None,
            1,
            split=lambda *_: [(list(args), kwargs)],
            modules=[*modules_of(func), *given],
        )
        encoder = Encoder("cached", tower, None)
        tensors = encoder.encode(0, DataParallel([]))
        leaves = [one.requires_grad_(one.is_floating_point()) for one in tensors]
        waiting = [encoder]

        def replay(reps: Tensor | Sequence[Tensor]) -> None:
            if not waiting:
                raise RuntimeError("cached: expected one replay of a call, got a second")
            one = waiting.pop()
            one.check_unchanged()
            grads = [rep.grad for rep in ([reps] if isinstance(reps, Tensor) else reps)]
            if len(grads) != len(leaves):
                raise ValueError(
                    f"reps: expected the {len(leaves)} that the call returned, got {len(grads)}"
                )
            with kept(one.keys()):
                one.replay(0, grads, _backward)

        return (*leaves, replay)

    return call


def _backward(outputs: list[Tensor], grads: list[Tensor], _: list[Tensor]) -> None:
    torch.autograd.backward(outputs, grads)


def cat_input_tensor(func: Callable[..., Any]) -> Callable[..., Any]:
    """Have a loss take lists of tensors, positional or keyword, and concatenate each on dim 0."""

    def joined(value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(one, Tensor) for one in value):
            return torch.cat(value)
        return value

    return _on_each_argument(func, joined)


def gather_input_tensor(func: Callable[..., Any], axis: int = 0) -> Callable[..., Any]:
    """Have a loss take every rank's tensors, positional or keyword, concatenated on ``axis``.

    By :func:`infloss.all_gather` over the whole world: with gradients that the trainer averages
    over the ranks, training follows the loss of the whole batch. Tensors of shape [] stay.
    """

    def gathered(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return all_gather(value.movedim(axis, 0)).movedim(0, axis)

    return _on_each_argument(func, gathered)


def _on_each_argument(func: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return func(*map(change, args), **{key: change(one) for key, one in kwargs.items()})

    return call
