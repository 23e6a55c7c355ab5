"""Buffers that a forward pass updates (running means, codebooks), so that it can be run again."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from infloss.grad_cache.modules import submodules

Key = tuple[nn.Module, str]
Values = dict[Key, Tensor | None]


class Buffers:
    """The buffers of some modules over a first pass: which a chunk changed, and what they were."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [one for one in submodules(modules) if one._buffers]
        self._values: Values = {}
        self._seen: dict[Key, tuple[Tensor | None, int]] = {}
        for key in self._keys():
            self._look(key)

    def changes(self) -> Values:
        """What the buffers were before the chunk that has just run, if it changed them."""
        keys = self._keys()
        changed = {key for key in keys if self._shows(key)}
        changed.update(self._edited([key for key in keys if key not in changed]))
        before = {key: self._values.get(key) for key in changed}
        for key in changed:
            self._look(key)
        return before

    def _keys(self) -> list[Key]:
        return [(module, name) for module in self._modules for name in module._buffers]

    def _look(self, key: Key) -> None:
        value = key[0]._buffers[key[1]]
        self._values[key] = _copy(value)
        self._seen[key] = (value, _version(value))

    def _shows(self, key: Key) -> bool:
        """Whether another tensor, another version of it, or the kind of its module tells."""
        module, name = key
        value = module._buffers[name]
        before, version = self._seen.get(key, (None, 0))
        updates = isinstance(module, _NormBase) and module.training and module.track_running_stats
        return value is not before or _version(value) != version or updates

    def _edited(self, keys: list[Key]) -> list[Key]:
        """Those that were edited behind the version counter, as through ``.data``: by value."""
        suspects = [
            (key, one, old)
            for key in keys
            if key[0].training
            and (one := key[0]._buffers[key[1]]) is not None
            and (old := self._values[key]) is not None
            and one.is_floating_point()
        ]
        differs = _any_differs([(one, old) for _, one, old in suspects])
        return [key for (key, _, _), one in zip(suspects, differs, strict=True) if one]


def _any_differs(pairs: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """Of each pair; waits for a device once."""
    found: dict[int, bool] = {}
    for device in {one.device for one, _ in pairs}:
        places = [index for index, (one, _) in enumerate(pairs) if one.device == device]
        flags = [(pairs[index][0] != pairs[index][1]).any() for index in places]
        found.update(zip(places, torch.stack(flags).tolist(), strict=True))
    return [found[index] for index in range(len(pairs))]


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def _version(value: Tensor | None) -> int:
    return 0 if value is None or value.is_inference() else value._version


@torch.no_grad()
def load(values: Values) -> None:
    """Put values back: in place where the shape is the same, for others who hold the tensor."""
    for (module, name), value in values.items():
        current = module._buffers[name]
        if value is None or current is None or current.shape != value.shape:
            module._buffers[name] = _copy(value)
        else:
            current.copy_(value)


@contextlib.contextmanager
def kept(keys: Iterable[Key]) -> Iterator[None]:
    """Leave these buffers at the end as they are now."""
    values = {(module, name): _copy(module._buffers[name]) for module, name in keys}
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
