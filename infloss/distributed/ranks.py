"""Who shares a batch: the ranks of a process group, or of a mesh of nodes by ranks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Coordinate = tuple[int, ...]  # a rank's index in each level


@dataclass(frozen=True)
class Level:
    """One process group: this rank's index in it and its size."""

    group: Any
    rank: int
    size: int


@dataclass(frozen=True)
class Ranks:
    """This process's coordinate among those that share a batch, and the groups that span them.

    The last level is the innermost: ranks are counted along it first, as in a DeviceMesh.
    """

    levels: tuple[Level, ...]

    @property
    def size(self) -> int:
        size = 1
        for level in self.levels:
            size *= level.size
        return size

    @property
    def coordinate(self) -> Coordinate:
        return tuple(level.rank for level in self.levels)

    @property
    def rank(self) -> int:
        return self.rank_of(self.coordinate)

    def rank_of(self, coordinate: Coordinate) -> int:
        """Rank of the process at that coordinate."""
        rank = 0
        for index, level in zip(coordinate, self.levels, strict=True):
            rank = rank * level.size + index
        return rank

    def gather(self, tensor: Tensor) -> Tensor:
        """The contiguous ``tensor`` of every rank, in their order: [W, *shape]. One shape."""
        # all_gather_single is the later name; torch releases that have it warn about the other
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        shape = tensor.shape
        with explained("gathering", self.rank, self.size):
            for level in reversed(self.levels):
                if level.size > 1:
                    out = tensor.new_empty((level.size * tensor.numel(),))
                    all_gather(out, tensor.reshape(-1), group=level.group)
                    tensor = out
        return tensor.reshape(self.size, *shape)


@contextmanager
def explained(action: str, rank: int, size: int) -> Iterator[None]:
    """Have a failed collective say what it was for and what may be the matter."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"group: {action} failed on rank {rank} of {size}; has another rank stopped? {error}"
        ) from error


def of_group(group: Any) -> Ranks:
    """The ranks of a ``group`` argument.

    Raises:
        TypeError: it is neither a ProcessGroup nor a DeviceMesh.
        ValueError: this process is not part of it, or torch.distributed is not initialised.
    """
    groups = _groups(group)
    for one in groups:
        if dist.get_rank(one) < 0:
            raise ValueError(
                "group: expected a group that this process is part of, got one that rank "
                f"{dist.get_rank()} of the world is not in"
            )
    return Ranks(tuple(Level(one, dist.get_rank(one), dist.get_world_size(one)) for one in groups))


def _groups(group: Any) -> tuple[Any, ...]:
    """The process groups behind the argument, outermost first."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"group: expected None where torch.distributed is not initialised, got {group!r}"
        )
    if isinstance(group, dist.ProcessGroup) or _is_no_member(group):
        return (group,)
    mesh = sys.modules.get("torch.distributed.device_mesh")
    if mesh is not None and isinstance(group, mesh.DeviceMesh):
        if group.get_coordinate() is None:
            return (dist.GroupMember.NON_GROUP_MEMBER,)
        return tuple(group.get_group(dim) for dim in range(group.ndim))
    raise TypeError(
        f"group: expected None, a ProcessGroup or a DeviceMesh, got {type(group).__name__}"
    )


def _is_no_member(group: Any) -> bool:
    """Whether ``new_group`` returned this to a rank that it left out: an object or a number."""
    nobody = dist.GroupMember.NON_GROUP_MEMBER
    return type(group) is type(nobody) and bool(group == nobody)


def check_device(ranks: Ranks, device: torch.device) -> None:
    """Raise ValueError unless the groups can move tensors of that device."""
    for level in ranks.levels:
        config = dist.get_backend_config(level.group)  # "cpu:gloo,cuda:nccl"
        backends = dict(part.split(":") for part in config.split(","))
        if device.type == "cuda" and backends.get("cuda") == "gloo":
            del backends["cuda"]  # it has no point-to-point messages there
        if device.type not in backends:
            raise ValueError(
                f"group: expected a group for {device.type} tensors, "
                f"got one of backend {dist.get_backend(level.group)!r} for {', '.join(backends)}"
            )
