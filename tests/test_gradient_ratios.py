"""Averaged over ranks, infloss's gradient is one process's; other conventions' are what they imply.

Notation: rank r holds b = B / W pairs, L is the loss of the whole batch, F_r the mean over rank r's
own pairs, so that L = (1/W) sum_r F_r. A trainer averages: a rank's gradient counts 1/W.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradient_ratios
import record
from conventions import OURS, THEIRS, single_two_way
from gradient_ratios import BATCH, TOLERANCE, WORLDS
from infloss import reference

Row = dict[str, Any]

# (encoder, logit_scale) of W ranks
EXPECTED = {
    # Each rank takes dL/dx of its own rows alone, and the average divides that by W. The logit
    # scale is on every rank: W times the whole dL/ds, averaged, is right.
    "open_clip, default": lambda world: (1 / world, 1),
    # Every rank holds L; summed over the ranks a row's gradient is W dL/dx, then averaged.
    "open_clip, gather_with_grad": lambda world: (1, 1),
    # Every rank holds F_r: sum_r dF_r/dx = W dL/dx, then averaged; for the scale likewise.
    "open_clip, local_loss and gather_with_grad": lambda world: (1, 1),
    # The same, but averaged on the way back through the gather already, and then once more. The
    # logit scale does not pass through the gather.
    "DisCo-CLIP": lambda world: (1 / world, 1),
    # As open_clip's default; the scale is multiplied into a rank's own queries and shares their
    # fate.
    "GradCache": lambda world: (1 / world, 1 / world),
    # The ring sums dF_r/dx. The scale's gradient is summed over the ranks, W dL/ds on each of
    # them, and averaging leaves that as it is.
    "Inf-CL": lambda world: (1, world),
}
NOT_PARALLEL = "open_clip, local_loss"


def uneven(world: int) -> Sequence[int]:
    """Half an even shard a rank, and all that is left for the last."""
    small = BATCH // (2 * world)
    return [small] * (world - 1) + [BATCH - small * (world - 1)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """The command's rows, as it writes them."""
    folder: Path = tmp_path_factory.mktemp("results")
    assert gradient_ratios.main(["--results-dir", str(folder)]) == 0
    written = record.read_result("gradient_ratios", folder).rows
    return {row["convention"]: row for row in written}


def test_every_convention_has_a_row(rows: dict[str, Row]) -> None:
    assert list(rows) == [convention.name for convention in (*OURS, *THEIRS)]
    assert {*EXPECTED, NOT_PARALLEL} == {convention.name for convention in THEIRS}


@pytest.mark.parametrize("name", [convention.name for convention in OURS])
def test_infloss_has_the_gradient_of_one_process(rows: dict[str, Row], name: str) -> None:
    check(rows[name], lambda world: (1, 1))


def test_infloss_has_it_whatever_the_shards() -> None:
    for row in gradient_ratios.measure(OURS, uneven):
        check(row, lambda world: (1, 1))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_convention_has_the_factor_that_follows_from_it(rows: dict[str, Row], name: str) -> None:
    check(rows[name], EXPECTED[name])


def test_without_the_gradient_of_keys_the_direction_is_wrong(rows: dict[str, Row]) -> None:
    """With local_loss alone no gathered row has gradient: a row gets its part as a query, none as
    a key of other rows, however many ranks there are. On one rank nothing is gathered."""
    row = rows[NOT_PARALLEL]
    single = gradient_ratios.single_gradient(single_two_way).encoder
    queries = gradient_ratios.single_gradient(queries_alone).encoder
    expected = gradient_ratios.compare(queries, single)
    assert expected.rest > 0.1
    for world in WORLDS:
        ratio, rest = (1, 0) if world == 1 else expected
        assert row[f"encoder_{world}"] == pytest.approx(ratio, abs=TOLERANCE)
        assert row[f"encoder_rest_{world}"] == pytest.approx(rest, abs=TOLERANCE)
        assert row[f"scale_{world}"] == pytest.approx(1, abs=TOLERANCE)
    assert row["direction"].startswith("wrong")


def test_a_wrong_gradient_of_ours_is_told() -> None:
    right = {f"{part}_{world}": 1.0 for part in ("encoder", "scale") for world in WORLDS}
    right |= {f"encoder_rest_{world}": 0.0 for world in WORLDS}
    assert gradient_ratios.is_right(right)
    for key in right:
        assert not gradient_ratios.is_right({**right, key: right[key] + 2 * TOLERANCE})


def check(row: Row, expected: Any) -> None:
    """Ratios as ``expected``, and nothing in another direction."""
    for world in WORLDS:
        encoder, scale = expected(world)
        assert row[f"encoder_{world}"] == pytest.approx(encoder, abs=TOLERANCE), world
        assert row[f"scale_{world}"] == pytest.approx(scale, abs=TOLERANCE), world
        assert row[f"encoder_rest_{world}"] <= TOLERANCE, world
    assert row["direction"] == "right"


def queries_alone(img: Tensor, txt: Tensor, scale: Tensor) -> Tensor:
    """Each direction of the CLIP loss, its keys without gradient."""
    forth = reference.info_nce(img, txt.detach(), None, scale)
    back = reference.info_nce(txt, img.detach(), None, scale)
    return (forth + back).mean() / 2


def test_a_gradient_is_split_into_right_and_rest() -> None:
    single = torch.tensor([3.0, 4.0], dtype=torch.float64)
    across = torch.tensor([-4.0, 3.0], dtype=torch.float64)
    found = gradient_ratios.compare(0.5 * single + 0.5 * across, single)
    assert found.ratio == pytest.approx(0.5)
    assert found.rest == pytest.approx(0.5**0.5)
