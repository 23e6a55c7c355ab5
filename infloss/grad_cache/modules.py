"""Which modules a tower is made of, and where they are."""

import functools
import inspect
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def modules_of(model: Any) -> list[nn.Module]:
    """The modules that a callable may call: itself, or what it is bound to, holds or closes over.

    Rather too many than too few; a function that it calls in turn is not looked into.
    """
    return list(dict.fromkeys(one for value in _reached(model) for one in _modules_in(value)))


def _reached(model: Any) -> list[Any]:
    if isinstance(model, functools.partial):
        return [*_reached(model.func), *model.args, *model.keywords.values()]
    if inspect.ismethod(model):
        return [*_reached(model.__func__), model.__self__]
    if inspect.isfunction(model):
        variables = inspect.getclosurevars(model)
        return [*variables.nonlocals.values(), *variables.globals.values()]
    return [model]


def _modules_in(value: Any) -> list[nn.Module]:
    """A module itself; those directly in a container or an object."""
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, dict):
        return _only_modules(value.values())
    if isinstance(value, (list, tuple)):
        return _only_modules(value)
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return []
    return _only_modules(getattr(value, "__dict__", {}).values())


def _only_modules(values: Iterable[Any]) -> list[nn.Module]:
    return [one for one in values if isinstance(one, nn.Module)]


def device_of(modules: list[nn.Module]) -> torch.device | None:
    """Where all parameters are; None if that is several places, or none."""
    places = {one.device for module in modules for one in module.parameters()}
    return places.pop() if len(places) == 1 else None


def submodules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """All modules inside these, each once."""
    return list(dict.fromkeys(one for module in modules for one in module.modules()))
