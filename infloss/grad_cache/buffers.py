"""Buffers that a forward pass updates (running means, codebooks), so that it can be run again."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from infloss.grad_cache.modules import submodules

Key = tuple[nn.Module, str]
Values = dict[Key, Tensor]


class Buffers:
    """The buffers of some modules over a first pass: which a chunk changed, and what they were."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._keys = [
            (module, name)
            for module in submodules(modules)
            for name, buffer in module._buffers.items()
            if isinstance(buffer, Tensor)
        ]
        self._values = {key: _value(key).clone() for key in self._keys}
        self._seen = {key: _identity(key) for key in self._keys}

    def changes(self) -> Values:
        """What the buffers were before the chunk that has just run, if it changed them."""
        before: Values = {}
        for key in self._keys:
            if _identity(key) != self._seen[key] or _updates_unseen(key[0]):
                before[key] = self._values[key]
                self._values[key] = _value(key).clone()
                self._seen[key] = _identity(key)
        return before


def _value(key: Key) -> Tensor:
    value = key[0]._buffers[key[1]]
    assert value is not None
    return value


def _identity(key: Key) -> tuple[int, int]:
    value = _value(key)
    return id(value), 0 if value.is_inference() else value._version


def _updates_unseen(module: nn.Module) -> bool:
    """Whether it is a norm whose running statistics change without a new version."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


@torch.no_grad()
def load(values: Values) -> None:
    """Put values back, in place."""
    for key, value in values.items():
        _value(key).copy_(value)


@contextlib.contextmanager
def kept(keys: Iterable[Key]) -> Iterator[None]:
    """Leave these buffers at the end as they are now."""
    values = {key: _value(key).clone() for key in keys}
    try:
        yield
    finally:
        load(values)


def batch_norms(modules: Iterable[nn.Module]) -> list[str]:
    """Names of those in train mode, whose statistics would be a chunk's and not the batch's."""
    return [
        name or type(module).__name__
        for one in modules
        for name, module in one.named_modules()
        if isinstance(module, _BatchNorm) and module.training
    ]
