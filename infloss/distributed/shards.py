"""Which rows of the whole batch each rank holds, and the sub-blocks that shards travel in."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from infloss.distributed.ranks import Coordinate, Ranks


@dataclass(frozen=True)
class Shards:
    """Sizes of one side's shards, in the order of the ranks."""

    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def largest(self) -> int:
        return max(self.sizes)

    @property
    def are_even(self) -> bool:
        return min(self.sizes) == self.largest

    def start(self, rank: int) -> int:
        """Index of the rank's first row in the whole batch."""
        return self._starts[rank]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return 0, *accumulate(self.sizes)

    def blocks(self, rows: int) -> int:
        """Number of sub-blocks that each shard is cut into, so that none has more than ``rows``."""
        return max(1, -(-self.largest // rows))


@dataclass(frozen=True)
class SubBlock:
    """One of the ``count`` nearly equal parts of every rank's shard."""

    ranks: Ranks
    shards: Shards
    index: int
    count: int

    def span(self, coordinate: Coordinate) -> slice:
        """Its rows within the shard of the rank at a coordinate."""
        size = self.shards.sizes[self.ranks.rank_of(coordinate)]
        return slice(size * self.index // self.count, size * (self.index + 1) // self.count)

    def rows(self, coordinate: Coordinate) -> int:
        span = self.span(coordinate)
        return span.stop - span.start

    def start(self, coordinate: Coordinate) -> int:
        """Index of its first row in the whole batch."""
        return self.shards.start(self.ranks.rank_of(coordinate)) + self.span(coordinate).start
