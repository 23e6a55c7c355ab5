"""Which rows of the whole batch each rank holds, and the sub-blocks that shards travel in."""

from dataclasses import dataclass
from itertools import accumulate

from infloss.distributed.ranks import Place, Ranks


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

    def start(self, rank: int) -> int:
        """Index of the rank's first row in the whole batch."""
        return (0, *accumulate(self.sizes))[rank]

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

    def span(self, place: Place) -> slice:
        """Its rows within the shard of the rank at a place."""
        size = self.shards.sizes[self.ranks.rank_of(place)]
        return slice(size * self.index // self.count, size * (self.index + 1) // self.count)

    def rows(self, place: Place) -> int:
        span = self.span(place)
        return span.stop - span.start

    def start(self, place: Place) -> int:
        """Index of its first row in the whole batch."""
        return self.shards.start(self.ranks.rank_of(place)) + self.span(place).start
