"""The statistics of S where its columns come in blocks; see ``infloss::lse`` in ops.py."""

from dataclasses import dataclass

import torch
from torch import Tensor

from infloss.portable import stats_dtype


@dataclass(frozen=True)
class Statistics:
    """What ``infloss::lse`` returns, and what its parts are merged into."""

    row_stats: Tensor  # [2, M]
    col_stats: Tensor  # [2, N], or N = 0 without column direction
    positive: Tensor  # [M], NaN until its column was seen
    row_hardest: Tensor  # [M], or [0] if not asked for
    col_hardest: Tensor  # [N], or [0]

    @classmethod
    def empty(cls, x: Tensor, y: Tensor, *, cols: bool, hardest: bool) -> "Statistics":
        """Of ``x`` [M, D] before any column was seen; the columns' own are to be put."""

        def new(*shape: int, value: float) -> Tensor:
            return torch.full(shape, value, dtype=stats_dtype(x.dtype), device=x.device)

        m, n = len(x), len(y) if cols else 0
        row_stats = new(2, m, value=0.0)
        row_stats[0] = -torch.inf
        return cls(
            row_stats,
            new(2, n, value=0.0),
            new(m, value=torch.nan),
            new(m if hardest else 0, value=-torch.inf),
            new(n if hardest else 0, value=-torch.inf),
        )

    def add_rows(self, part: "Statistics") -> None:
        """Merge what a block of columns gave to the rows."""
        torch.ops.infloss.merge_stats(self.row_stats, part.row_stats[None])
        seen = torch.where(part.positive.isnan(), self.positive, part.positive)
        self.positive.copy_(seen)
        self.row_hardest.copy_(torch.maximum(self.row_hardest, part.row_hardest))

    def packed_columns(self, *, hardest: bool) -> Tensor:
        """The columns' statistics with the columns first: [N, 2], or [N, 3] with the hardest."""
        parts = (self.col_stats, self.col_hardest[None])
        return torch.cat(parts if hardest else parts[:1]).T.contiguous()

    def put_columns(self, span: slice, packed: Tensor) -> None:
        """Set the statistics of the columns in ``span``."""
        self.col_stats[:, span] = packed.T[:2]
        if len(self.col_hardest):
            self.col_hardest[span] = packed.T[2]


def merge_columns(first: Tensor, second: Tensor) -> Tensor:
    """What two sets of rows gave to the same columns, both packed, in this order."""
    merged, other = first.T.contiguous(), second.T.contiguous()
    torch.ops.infloss.merge_stats(merged[:2], other[None, :2])
    merged[2:] = torch.maximum(merged[2:], other[2:])
    return merged.T.contiguous()
