"""What a tower is called with, cut into chunks of rows or of tokens."""

from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from infloss.grad_cache import nest

MASK = "attention_mask"
Range = tuple[int, int]


@dataclass
class Chunk:
    """The arguments of one call of a model."""

    args: list[Any]
    kwargs: dict[str, Any]
    versions: list[int] = field(init=False)  # of the tensors, to notice edits in place

    def __post_init__(self) -> None:
        self.versions = self._versions()

    def tensors(self) -> list[Tensor]:
        leaves = nest.walk((self.args, self.kwargs))
        return [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]

    def _versions(self) -> list[int]:
        return [0 if one.is_inference() else one._version for one in self.tensors()]

    def is_unchanged(self) -> bool:
        """Whether no tensor was edited in place since the chunk was made."""
        return self._versions() == self.versions

    def copy(self, device: torch.device | None) -> "Chunk":
        """For one call, which may edit it: tensors of its own, detached, on the device if any."""

        def own(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                one = leaf.detach()
                streams = leaf.device.type == "cpu" and device not in (None, leaf.device)
                one = one.to(device, non_blocking=True) if streams else one.clone()
                return one.requires_grad_(leaf.requires_grad)
            return list(leaf) if isinstance(leaf, list) else leaf

        args, kwargs = nest.rebuild(own, (self.args, self.kwargs))
        return Chunk(args, kwargs)


def chunk_of(inputs: Any) -> Chunk:
    """The call that inputs stand for, by GradCache's rules.

    A list or tuple is the positional arguments and a dict the keyword ones; ``([...], {...})`` is
    both; anything else, a list of strings too, is the only argument.
    """
    if _is_both(inputs):
        return Chunk(list(inputs[0]), dict(inputs[1]))
    if isinstance(inputs, (dict, UserDict)):
        return Chunk([], dict(inputs))
    if isinstance(inputs, (list, tuple)) and not nest.is_texts(inputs):
        return Chunk(list(inputs), {})
    return Chunk([inputs], {})


def as_given(inputs: Any, chunk: Chunk) -> Any:
    """A chunk of inputs in the form that the whole has: what :func:`chunk_of` takes."""
    if _is_both(inputs):
        return chunk.args, chunk.kwargs
    if isinstance(inputs, (dict, UserDict)):
        return chunk.kwargs
    if isinstance(inputs, (list, tuple)) and not nest.is_texts(inputs):
        return chunk.args
    return chunk.args[0]


def _is_both(inputs: Any) -> bool:
    return (
        isinstance(inputs, tuple)
        and len(inputs) == 2
        and isinstance(inputs[0], list)
        and isinstance(inputs[1], (dict, UserDict))
    )


def split_rows(name: str, inputs: Any, chunk_size: int) -> list[Chunk]:
    """Chunks of ``chunk_size`` rows, the last of what is left; one empty chunk of no rows."""
    call = chunk_of(inputs)
    rows = _rows(name, call)
    ranges = [(start, min(start + chunk_size, rows)) for start in range(0, rows, chunk_size)]
    return _cut(call, rows, ranges or [(0, 0)])


def split_tokens(name: str, inputs: Any, max_tokens: int) -> list[Chunk]:
    """Chunks of consecutive rows whose number times the longest one's tokens is ``max_tokens``.

    Columns that are padding in all of a chunk's rows are cut off at the end.
    """
    call = chunk_of(inputs)
    rows = _rows(name, call)
    mask = _mask(name, call, rows)
    columns = torch.arange(1, mask.size(1) + 1, device=mask.device)
    lengths = (mask != 0).mul(columns).amax(1).clamp(min=1).tolist() if rows else []
    if max(lengths, default=0) > max_tokens:
        raise ValueError(
            f"{name}: max_tokens: expected at least the {max(lengths)} tokens of the longest row, "
            f"got {max_tokens}"
        )
    ranges = _token_ranges(lengths, max_tokens)
    if not ranges:
        return _cut(call, rows, [(0, 0)])
    return [
        _trimmed(chunk, (stop - start, mask.size(1)), max(lengths[start:stop]))
        for chunk, (start, stop) in zip(_cut(call, rows, ranges), ranges, strict=True)
    ]


def split_by(name: str, split: Callable[[Any, int], Any], inputs: Any, size: int) -> list[Chunk]:
    """What the user's own function makes of the inputs."""
    parts = split(inputs, size)
    if not isinstance(parts, Sequence) or len(parts) == 0:
        got = type(parts).__name__ if not isinstance(parts, Sequence) else "none"
        raise ValueError(f"{name}: split: expected a list with at least one chunk, got {got}")
    return [chunk_of(part) for part in parts]


def _row_counts(call: Chunk) -> Iterator[tuple[str, int]]:
    """Where something with rows is, and how many it has."""
    for path, leaf in [*nest.walk(call.args), *nest.walk(call.kwargs)]:
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            yield path, leaf.size(0)
        elif nest.is_texts(leaf):
            yield path, len(leaf)


def _rows(name: str, call: Chunk) -> int:
    """The rows of a batch: those of everything in it but for what has one, for every chunk."""
    counts = dict(_row_counts(call))
    if not counts:
        raise TypeError(
            f"{name}: inputs: expected a tensor or a list of strings among them, to be split; "
            "pass split= for anything else"
        )
    distinct = sorted(set(counts.values()) - {1}) or [1]
    if len(distinct) > 1:
        found = ", ".join(f"{rows} at {path}" for path, rows in counts.items())
        raise ValueError(f"{name}: inputs: expected as many rows in all of them, got {found}")
    return distinct[0]


def _cut(call: Chunk, rows: int, ranges: list[Range]) -> list[Chunk]:
    sizes = [stop - start for start, stop in ranges]

    def parts(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.size(0) == rows:
            return _Parts(leaf.split(sizes))
        if nest.is_texts(leaf) and len(leaf) == rows:
            return _Parts([leaf[start:stop] for start, stop in ranges])
        return leaf

    whole = nest.rebuild(parts, (call.args, call.kwargs))
    return [Chunk(*nest.rebuild(_at(index), whole)) for index in range(len(ranges))]


class _Parts:
    """One leaf's parts, in the place of the leaf."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts


def _at(index: int) -> Callable[[Any], Any]:
    return lambda leaf: leaf.parts[index] if isinstance(leaf, _Parts) else leaf


def _mask(name: str, call: Chunk, rows: int) -> Tensor:
    for path, leaf in nest.walk((call.args, call.kwargs)):
        if path.endswith(f"[{MASK!r}]") and isinstance(leaf, Tensor):
            if leaf.dim() == 2 and leaf.size(0) == rows:
                return leaf
            raise ValueError(f"{name}: {MASK}: expected shape [{rows}, L], got {list(leaf.shape)}")
    raise ValueError(f"{name}: max_tokens: expected an {MASK!r} among the inputs, got none")


def _token_ranges(lengths: list[int], max_tokens: int) -> list[Range]:
    ranges, start, longest = [], 0, 0
    for row, length in enumerate(lengths):
        if max(longest, length) * (row + 1 - start) > max_tokens:
            ranges.append((start, row))
            start, longest = row, 0
        longest = max(longest, length)
    return [*ranges, (start, len(lengths))] if lengths else []


def _trimmed(chunk: Chunk, shape: tuple[int, int], length: int) -> Chunk:
    """The chunk with ``length`` columns where it has those of the mask, whose shape is given."""

    def trim(leaf: Any) -> Any:
        return leaf[:, :length] if isinstance(leaf, Tensor) and leaf.shape[:2] == shape else leaf

    return Chunk(*nest.rebuild(trim, (chunk.args, chunk.kwargs)))
