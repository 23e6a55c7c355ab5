"""One encoder with what it is to encode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from infloss.grad_cache import inputs
from infloss.grad_cache.inputs import Chunk


@dataclass(frozen=True)
class Tower:
    """An encoder and a batch of its inputs, which it is to take in chunks.

    Args:
        model: a module or a function. What it returns, the representations, may be a tensor or a
            tuple, dict or dataclass with tensors: [b, ...] for a chunk of b rows, all of which the
            loss is to use. One of shape [], such as a logit scale, is the same for every chunk;
            what is no tensor is that of the first.
        inputs: a tensor, the only argument; a list or tuple, the positional arguments; a dict, the
            keyword ones; ``([...], {...})``, both. Tensors and lists of strings as long as the
            batch are split, in containers too; tensors with one row or none, and anything else,
            go to every chunk. Tensors on the CPU are moved to the model's device with their chunk.
        chunk_size: rows in a chunk, at most.
        max_tokens: instead of it, rows in a chunk times tokens of its longest row, at most: rows
            are taken in their order, and columns in which "attention_mask" is 0 for all of a
            chunk's rows are cut off at the end.
        split: ``split(inputs, chunk_size)`` makes the list of chunks' inputs, of any kind.
        modules: those that ``model`` calls. None: itself, or what a function closes over.
    """

    model: Callable[..., Any]
    inputs: Any
    chunk_size: int | None = None
    max_tokens: int | None = None
    split: Callable[[Any, int], Any] | None = None
    modules: Sequence[nn.Module] | None = None

    def check(self, name: str) -> None:
        """Raise TypeError or ValueError unless this can be cut into chunks."""
        if not callable(self.model):
            raise TypeError(f"{name}: model: expected a callable, got {type(self.model).__name__}")
        sizes = {"chunk_size": self.chunk_size, "max_tokens": self.max_tokens}
        given = {what: size for what, size in sizes.items() if size is not None}
        if len(given) != 1:
            raise ValueError(
                f"{name}: expected either chunk_size or max_tokens, got "
                f"{'both' if given else 'neither'}"
            )
        for what, size in given.items():
            count(f"{name}: {what}", size)
        if self.split is not None and not callable(self.split):
            kind = type(self.split).__name__
            raise TypeError(f"{name}: split: expected a callable, got {kind}")
        if self.split is not None and self.chunk_size is None:
            raise ValueError(f"{name}: split: expected a chunk_size beside it, got max_tokens")

    def chunks(self, name: str) -> list[Chunk]:
        """The calls of the model, at least one."""
        if self.split is not None:
            return inputs.split_by(name, self.split, self.inputs, self.chunk_size or 0)
        if self.max_tokens is not None:
            return inputs.split_tokens(name, self.inputs, self.max_tokens)
        return inputs.split_rows(name, self.inputs, self.chunk_size or 0)


def count(name: str, value: Any) -> None:
    """Raise unless ``value`` is an int of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: expected 1 or more, got {value}")


def tower_of(name: str, value: Any) -> Tower:
    """The Tower that a user gave as such or as ``(model, inputs, chunk_size)``."""
    if not isinstance(value, Tower):
        if not isinstance(value, (tuple, list)) or len(value) != 3:
            got = (
                f"{len(value)} values" if isinstance(value, (tuple, list)) else type(value).__name__
            )
            raise TypeError(f"{name}: expected a Tower or (model, inputs, chunk_size), got {got}")
        value = Tower(*value)
    value.check(name)
    return value
