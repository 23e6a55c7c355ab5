"""A loss over encoders that run chunk by chunk."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from infloss.checks import DTYPES
from infloss.grad_cache.buffers import batch_norms
from infloss.grad_cache.encoder import Encoder
from infloss.grad_cache.step import Step
from infloss.grad_cache.tower import Tower, tower_of
from infloss.warn import warn


@torch.compiler.disable
def cached_loss(
    loss_fn: Callable[..., Any],
    towers: Sequence[Tower | tuple[Callable[..., Any], Any, int]],
    *,
    cache_dtype: torch.dtype | None = None,
) -> Any:
    """A loss of whole batches whose encoders hold the activations of one chunk at a time.

    The gradient cache of Gao et al. 2021 (arXiv 2101.06983). The towers encode chunk by chunk
    without a graph; ``loss_fn`` sees the representations of all rows. In backward, each chunk is
    encoded once more, under the random numbers, the autocast state and the buffers of its first
    pass, and handed its part of the representations' gradient: the gradient of one pass over the
    whole batch, but for what a layer makes of its whole batch, as batch norm does. Memory is that
    of one chunk and of the representations; time one forward pass more.

    The loss is an ordinary one: add others to it, scale it, call ``backward`` on it once. Modules
    wrapped in DistributedDataParallel reduce their gradients once, and under fully_shard (FSDP2)
    ranks may have different numbers of chunks. Without gradients, this is the loss in chunks.

    Args:
        loss_fn: ``loss_fn(*representations)``, one for each tower and as its model returns it,
            with the chunks concatenated. What it is made of besides, such as a logit scale, gets
            its gradient as usual.
        towers: :class:`Tower`, or ``(model, inputs, chunk_size)``, each. A model may come twice.
        cache_dtype: hand floating representations to the loss, and keep their gradients, in this
            dtype; None: in that of the model's output.

    Returns:
        What ``loss_fn`` returns.

    Raises:
        TypeError, ValueError: before any model runs, naming tower, argument, got and expected; in
            backward, a representation that the loss does not depend on.
        NotImplementedError: a DeepSpeed ZeRO stage above 1; in backward, a second derivative.
        RuntimeError: in backward, run twice, or after inputs or parameters were changed; another
            graph through a DistributedDataParallel tower is still to be run.

    Warns:
        UserWarning: batch norm in train mode, whose statistics are those of a chunk.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: expected a callable, got {type(loss_fn).__name__}")
    if isinstance(towers, Tower) or not isinstance(towers, Sequence):
        raise TypeError(f"towers: expected a list of towers, got {type(towers).__name__}")
    if not towers:
        raise ValueError("towers: expected at least one, got none")
    if cache_dtype not in (None, *DTYPES):
        raise TypeError(f"cache_dtype: expected a floating dtype or None, got {cache_dtype!r}")
    names = [f"towers[{index}]" for index in range(len(towers))]
    checked = [tower_of(name, tower) for name, tower in zip(names, towers, strict=True)]
    encoders = [
        Encoder(name, tower, cache_dtype) for name, tower in zip(names, checked, strict=True)
    ]
    for one in encoders:
        _warn_of_batch_norm(one)
    return loss_fn(*Step(encoders).encode())


def _warn_of_batch_norm(encoder: Encoder) -> None:
    names = batch_norms(encoder.modules) if len(encoder.chunks) > 1 else []
    if names:
        warn(
            f"{encoder.name}: model: batch norm in train mode takes its statistics from each "
            f"chunk, not from the batch: {', '.join(names)}. GroupNorm, LayerNorm or eval() do not"
        )
