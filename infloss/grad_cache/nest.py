"""Containers inside containers, as models take and return them: walked and rebuilt."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any


def is_texts(value: Any) -> bool:
    """Whether this is a list or tuple of strings: one input, split like a tensor."""
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(one, str) for one in value)
    )


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf with where it is, such as ``[0]['input_ids']``. A list of strings is a leaf."""
    for key, child in _children(value) or ():
        yield from walk(child, path + key)
    if _children(value) is None:
        yield path, value


def rebuild(change: Callable[[Any], Any], value: Any) -> Any:
    """Such containers anew, with ``change(leaf)`` for each leaf in the order of :func:`walk`."""
    if _children(value) is None:
        return change(value)
    if isinstance(value, MutableMapping):
        duplicate = copy.copy(value)
        for key, child in value.items():
            duplicate[key] = rebuild(change, child)
        return duplicate
    if isinstance(value, (list, tuple)):
        children = [rebuild(change, child) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    duplicate = copy.copy(value)
    for field in dataclasses.fields(value):
        object.__setattr__(duplicate, field.name, rebuild(change, getattr(value, field.name)))
    return duplicate


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """What a container holds, by its key in a path; None of a leaf."""
    if isinstance(value, MutableMapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, (list, tuple)) and not is_texts(value):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [(f".{field.name}", getattr(value, field.name)) for field in fields]
    return None
