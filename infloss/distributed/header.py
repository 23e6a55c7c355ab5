"""What ranks tell each other before a call: enough to notice any disagreement.

A rank cannot know alone that another passes other shapes, asks for something else or makes one call
too many; the exchange would hang or mix up data. So each call starts with one small all-gather of
headers on a CPU-side group of its own. Every rank sees all headers and raises the same error.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from infloss.distributed.ranks import Level, Ranks, explained

Header = dict[str, Any]
T = TypeVar("T")

BYTES = 1024  # of one rank's header
LENGTH = 4  # of them, its length
REFUSED = "refused"
CALLS = "calls"


@dataclass
class Channel:
    """The CPU-side groups of some ranks, and how many calls they have made."""

    rank: int
    sizes: tuple[int, ...]  # of the ranks' levels
    groups: tuple[Any, ...]  # a gloo backend for each of them
    calls: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def exchange(self, header: Header) -> list[Header]:
        """Every rank's header, in their order."""
        rows = torch.frombuffer(_pack({**header, CALLS: self.calls}), dtype=torch.uint8)[None]
        with explained(f"exchanging headers of call {self.calls}", self.rank, self.size):
            for size, group in zip(self.sizes[::-1], self.groups[::-1], strict=True):
                parts = [torch.empty_like(rows) for _ in range(size)]
                group.allgather([parts], [rows]).wait()
                rows = torch.cat(parts)
        headers = _unpack(rows)
        # after a disagreement that was caught, the ranks count alike again
        self.calls = max(one[CALLS] for one in headers)
        return headers

    def agree(self, same: Mapping[str, Any], own: Mapping[str, Any]) -> list[Header]:
        """Exchange both; raise the same ValueError on every rank unless ``same`` is the same."""
        headers = self.exchange({**same, **own})
        refusals = [
            f"rank {rank}: {header[REFUSED]}"
            for rank, header in enumerate(headers)
            if REFUSED in header
        ]
        if refusals:
            raise ValueError(f"group: refused on {'; '.join(refusals)}")
        for name in same:
            _check_same(name, [header.get(name) for header in headers])
        return headers

    def attempt(self, check: Callable[[], T]) -> T:
        """Run local checks; where they fail, tell every rank, so that none of them waits."""
        try:
            return check()
        except (TypeError, ValueError, NotImplementedError) as error:
            self.agree({}, {REFUSED: _shortened(str(error))})
            raise


def _pack(header: Header) -> bytearray:
    text = json.dumps(header).encode()
    if len(text) > BYTES - LENGTH:
        raise ValueError(f"header: expected {BYTES - LENGTH} bytes at most, got {len(text)}")
    return bytearray(len(text).to_bytes(LENGTH, "little") + text.ljust(BYTES - LENGTH))


def _unpack(rows: Tensor) -> list[Header]:
    packed = bytearray(rows.numel())
    torch.frombuffer(packed, dtype=torch.uint8).copy_(rows.flatten())
    headers = []
    for start in range(0, len(packed), BYTES):
        text = start + LENGTH
        length = int.from_bytes(packed[start:text], "little")
        headers.append(json.loads(packed[text : text + length]))
    return headers


def _shortened(message: str) -> str:
    """What of a message fits a header beside the call number, once it is escaped."""
    while len(json.dumps(message)) > BYTES - 100:
        message = message[: len(message) * 9 // 10]
    return message


def _check_same(name: str, values: list[Any]) -> None:
    texts = [str(value) for value in values]  # a NaN is the same as another
    if len(set(texts)) == 1:
        return
    who = {text: [str(rank) for rank, other in enumerate(texts) if other == text] for text in texts}
    parts = [
        f"{text} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
        for text, ranks in who.items()
    ]
    raise ValueError(
        f"{name}: expected the same on every rank of the group, got {'; '.join(parts)}"
    )


# both forget a group with the group itself
_channels: WeakKeyDictionary[Any, dict[tuple[str, ...], Channel]] = WeakKeyDictionary()
_cpu_sides: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def channel(ranks: Ranks) -> Channel:
    """The channel of these ranks, made on their first call."""
    channels = _channels.setdefault(ranks.levels[-1].group, {})
    names = tuple(level.group.group_name for level in ranks.levels)
    if names not in channels:
        sizes = tuple(level.size for level in ranks.levels)
        channels[names] = Channel(ranks.rank, sizes, tuple(_cpu_side(one) for one in ranks.levels))
    return channels[names]


def _cpu_side(level: Level) -> Any:
    """A gloo backend of the same ranks, with the timeout of theirs; one for each group.

    It is no group of the world: torch names a new group by how many there were, so that one made
    by some ranks only would set these apart from the others.
    """
    if level.group not in _cpu_sides:
        # a connection of its own: a wait on a shared one would keep other groups' threads waiting
        own = level.group.get_group_store().clone()
        store = dist.PrefixStore("infloss", own)  # type: ignore[attr-defined]
        timeout = _timeout_of(level.group)
        own.set_timeout(timeout)
        with explained("meeting", level.rank, level.size):
            _cpu_sides[level.group] = dist.ProcessGroupGloo(store, level.rank, level.size, timeout)
    return _cpu_sides[level.group]


def _timeout_of(group: Any) -> Any:
    """How long the group's own operations may take: a timedelta."""
    kind = group._device_types[0]
    options = getattr(group._get_backend(kind), "options", None)
    return getattr(options, "_timeout", dist.default_pg_timeout)
