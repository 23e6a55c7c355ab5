"""How the portable path cuts S into tiles."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from infloss import portable
from support import normal

MIB = 1 << 20
dims = st.integers(1, 200_000)
workspaces = st.integers(MIB, 1 << 32)
itemsizes = st.sampled_from([4, 8])


def bytes_of(rows: int, cols: int, dim: int, itemsize: int) -> int:
    """Live tiles and two panels of operands, as tile_shape promises."""
    return itemsize * (portable.LIVE_TILES * rows * cols + 2 * dim * (rows + cols))


@given(dims, itemsizes, workspaces, st.booleans())
def test_a_tile_fits_the_workspace(dim: int, itemsize: int, workspace: int, on_cpu: bool) -> None:
    rows, cols = portable.tile_shape(dim, itemsize, workspace, on_cpu)
    assert rows >= 1
    assert cols >= 1
    assert bytes_of(rows, cols, dim, itemsize) <= workspace or rows * cols == 1


@given(dims, itemsizes, workspaces, st.booleans())
def test_a_tile_is_not_needlessly_small(
    dim: int, itemsize: int, workspace: int, on_cpu: bool
) -> None:
    """The preferred tile where it fits, otherwise one that uses a tenth of the workspace."""
    rows, cols = portable.tile_shape(dim, itemsize, workspace, on_cpu)
    preferred = portable.CPU_TILE if on_cpu else portable.GPU_TILE
    used = bytes_of(rows, cols, dim, itemsize)
    assert (rows, cols) == preferred or used >= workspace / 10


@given(dims, itemsizes, workspaces, workspaces, st.booleans())
def test_a_larger_workspace_never_shrinks_a_tile(
    dim: int, itemsize: int, one: int, other: int, on_cpu: bool
) -> None:
    small, large = sorted((one, other))
    few = portable.tile_shape(dim, itemsize, small, on_cpu)
    many = portable.tile_shape(dim, itemsize, large, on_cpu)
    assert few[0] <= many[0]
    assert few[1] <= many[1]


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 4096))
def test_spans_cover_every_row_and_column_once(m: int, n: int, dim: int) -> None:
    x, y = torch.empty(m, 1).expand(m, dim), torch.empty(n, 1).expand(n, dim)
    sim = portable.Similarity(x, y, None, None, None, 0, 1, MIB)
    for size, spans in zip((m, n), sim.spans(), strict=True):
        assert [i for span in spans for i in range(span.start, span.stop)] == list(range(size))


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 50))
def test_every_positive_lies_in_exactly_one_tile(m: int, stride: int, offset: int) -> None:
    """With an offset, as where the columns are one block of a larger batch."""
    x, y = normal(m, 3), normal(m * stride + 7, 3)
    sim = portable.Similarity(x, y, None, None, None, offset, stride, MIB)
    rows = slice(0, m)
    found = torch.full((m,), -1)
    for start in range(0, len(y), 5):
        local, inside = sim.positives(rows, slice(start, min(start + 5, len(y))))
        assert not (inside.squeeze(1) & (found >= 0)).any()
        found = torch.where(inside, local + start, found[:, None]).squeeze(1)
    column = torch.arange(m) * stride + offset
    assert torch.equal(found, torch.where(column < len(y), column, -1))
