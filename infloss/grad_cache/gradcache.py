"""The gradient cache as a class that runs whole steps."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from infloss.grad_cache.cached_loss import cached_loss
from infloss.grad_cache.inputs import as_given, chunk_of, split_rows
from infloss.grad_cache.modules import device_of, modules_of
from infloss.grad_cache.tower import Tower, count


class GradCache:
    """Loss and gradients of a batch whose encoders run in chunks, for the optimizer to step on.

    The interface of the package ``grad_cache`` (Gao et al. 2021, arXiv 2101.06983) over
    :func:`infloss.cached_loss`, which says what a step does. Methods to override: ``split_inputs``,
    ``model_call``, ``get_reps``, ``compute_loss``.

    Args:
        models: the encoders, modules or functions; one may come twice.
        chunk_sizes: rows in a chunk, at most: for all models, or one for each.
        loss_fn: ``loss_fn(*representations, **loss_kwargs)``, a scalar.
        split_input_fn: ``split_input_fn(model_input, chunk_size)``, a list of chunks.
        get_rep_fn: the representation in a model's output; None: the output itself.
        fp16: run models and loss under autocast (float16 on a GPU, bfloat16 on a CPU), and scale
            the loss by ``scaler``.
        scaler: a GradScaler; the caller unscales, steps and updates.

    Raises:
        TypeError, ValueError: naming argument, got and expected.
    """

    def __init__(
        self,
        models: Sequence[Callable[..., Any]],
        chunk_sizes: int | Sequence[int],
        loss_fn: Callable[..., Tensor],
        split_input_fn: Callable[[Any, int], Any] | None = None,
        get_rep_fn: Callable[[Any], Any] | None = None,
        fp16: bool = False,
        scaler: Any = None,
    ) -> None:
        if len(models) == 0:
            raise ValueError("models: expected at least one, got none")
        each = isinstance(chunk_sizes, Sequence)
        sizes = list(chunk_sizes) if isinstance(chunk_sizes, Sequence) else [chunk_sizes]
        for size in sizes:
            count("chunk_sizes", size)
        if each and len(sizes) != len(models):
            raise ValueError(
                f"chunk_sizes: expected one for each of {len(models)} models, got {len(sizes)}"
            )
        if fp16 and scaler is None:
            raise ValueError("scaler: expected a GradScaler with fp16=True, got None")
        self.models = list(models)
        self.chunk_sizes = sizes if each else sizes * len(models)
        self.loss_fn = loss_fn
        self.split_input_fn = split_input_fn
        self.get_rep_fn = get_rep_fn
        self.fp16 = fp16
        self.scaler = scaler

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Same as :meth:`cache_step`."""
        return self.cache_step(*args, **kwargs)

    def cache_step(
        self, *model_inputs: Any, no_sync_except_last: bool = False, **loss_kwargs: Any
    ) -> Tensor:
        """Accumulate the gradients of one batch.

        Args:
            model_inputs: each model's: a tensor, a list (positional arguments), a dict (keyword
                arguments) or ``([...], {...})``; see :class:`infloss.Tower`.
            no_sync_except_last: taken for compatibility. Models in DistributedDataParallel
                reduce their gradients once a step either way.
            loss_kwargs: passed to ``loss_fn``.

        Returns:
            The loss, detached.
        """
        del no_sync_except_last
        if len(model_inputs) != len(self.models):
            raise ValueError(
                f"model_inputs: expected one for each of {len(self.models)} models, "
                f"got {len(model_inputs)}"
            )
        triples = zip(self.models, model_inputs, self.chunk_sizes, strict=True)
        towers = [self._tower(*triple) for triple in triples]
        loss = cached_loss(functools.partial(self._loss, **loss_kwargs), towers)
        (self.scaler.scale(loss) if self.fp16 else loss).backward()
        return loss.detach()

    def split_inputs(self, model_input: Any, chunk_size: int) -> list[Any]:
        """The input cut into chunks, each of the kind that the whole is."""
        if self.split_input_fn is not None:
            return self.split_input_fn(model_input, chunk_size)
        chunks = split_rows("model_inputs", model_input, chunk_size)
        return [as_given(model_input, chunk) for chunk in chunks]

    def model_call(self, model: Callable[..., Any], model_input: Any) -> Any:
        """The model's output for one chunk."""
        call = chunk_of(model_input)
        return model(*call.args, **call.kwargs)

    def get_reps(self, model_out: Any) -> Any:
        """The representation in a model's output."""
        return model_out if self.get_rep_fn is None else self.get_rep_fn(model_out)

    def compute_loss(self, *reps: Any, **loss_kwargs: Any) -> Tensor:
        """The loss of the whole batch's representations."""
        return self.loss_fn(*reps, **loss_kwargs)

    def _tower(self, model: Callable[..., Any], model_input: Any, chunk_size: int) -> Tower:
        def call(chunk: Any) -> Any:
            with self._autocast(model):
                out = self.model_call(model, chunk)
            return self.get_reps(out)

        def split(whole: Any, size: int) -> list[Any]:
            return [([chunk], {}) for chunk in self.split_inputs(whole, size)]

        return Tower(call, model_input, chunk_size, split=split, modules=modules_of(model))

    def _loss(self, *reps: Any, **loss_kwargs: Any) -> Tensor:
        with self._autocast(*self.models):
            return self.compute_loss(*reps, **loss_kwargs)

    def _autocast(self, *models: Callable[..., Any]) -> Any:
        if not self.fp16:
            return contextlib.nullcontext()
        device = device_of([module for model in models for module in modules_of(model)])
        return torch.autocast("cuda" if device is None else device.type)
