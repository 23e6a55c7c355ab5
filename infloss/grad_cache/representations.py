"""What a tower returns: the tensors in it, joined over chunks and split again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infloss.grad_cache import nest


@dataclass
class Outputs:
    """One call's output: its tensors, and the containers around them."""

    structure: Any
    paths: list[str]
    tensors: list[Tensor]

    @classmethod
    def of(cls, name: str, value: Any, dtype: torch.dtype | None) -> "Outputs":
        """Those of a model's output; the floating ones in ``dtype`` if given."""
        found = [(path, leaf) for path, leaf in nest.walk(value) if isinstance(leaf, Tensor)]
        if not found:
            raise TypeError(
                f"{name}: expected a tensor, or a tuple, dict or dataclass with tensors, as the "
                f"model's output, got {type(value).__name__}"
            )
        tensors = [
            leaf.to(dtype) if dtype is not None and leaf.is_floating_point() else leaf
            for _, leaf in found
        ]
        return cls(value, [name + path for path, _ in found], tensors)


class _Slot:
    """In the place of a tensor: a leaf, so no dataclass."""

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass
class Layout:
    """How a tower's outputs over all chunks are joined, without the tensors."""

    structure: Any  # of _Slots
    paths: list[str]
    sizes: list[list[int]]  # rows of each tensor in each chunk; [] of one that all chunks share
    chunks: int

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The containers with these tensors in them."""
        return nest.rebuild(
            lambda leaf: tensors[leaf.index] if isinstance(leaf, _Slot) else leaf, self.structure
        )

    def split(self, grads: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """Each chunk's part of the tensors' gradients.

        A shared one's is the last chunk's, in whose turn DDP waits for every parameter.
        """
        parts: list[Sequence[Tensor | None]] = []
        for grad, sizes in zip(grads, self.sizes, strict=True):
            if grad is None or not sizes:
                parts.append([None] * (self.chunks - 1) + [grad])
            else:
                parts.append(grad.split(sizes))
        return [list(one) for one in zip(*parts, strict=True)]


def join(chunks: Sequence[Outputs]) -> tuple[Layout, list[Tensor]]:
    """Concatenate the outputs of all chunks."""
    first = chunks[0]
    for other in chunks[1:]:
        if other.paths != first.paths:
            raise ValueError(
                f"{first.paths[0]}: expected outputs {first.paths} of every chunk, "
                f"got {other.paths}"
            )
    columns = list(zip(*(chunk.tensors for chunk in chunks), strict=True))
    tensors = [_joined(path, column) for path, column in zip(first.paths, columns, strict=True)]
    sizes = [[len(one) for one in column] if column[0].dim() else [] for column in columns]
    slots = iter(range(len(tensors)))
    structure = nest.rebuild(
        lambda leaf: _Slot(next(slots)) if isinstance(leaf, Tensor) else leaf, first.structure
    )
    return Layout(structure, first.paths, sizes, len(chunks)), tensors


def _joined(path: str, column: Sequence[Tensor]) -> Tensor:
    if column[0].dim() == 0:
        if len(column) > 1 and not bool((torch.stack(list(column)) == column[0]).all()):
            raise ValueError(
                f"{path}: expected an output of shape [] to be the same for every chunk, got "
                f"{[float(one) for one in column]}"
            )
        return column[0].clone()
    shapes = {tuple(one.shape[1:]) for one in column}
    if len(shapes) > 1:
        raise ValueError(
            f"{path}: expected one shape of a row in every chunk, got {sorted(shapes)}"
        )
    return torch.cat(list(column))
