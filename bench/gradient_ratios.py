"""The gradient that data-parallel training ends up with, beside that of one process.

``python bench/gradient_ratios.py`` starts one process a rank over gloo. Each holds the same two
linear towers and a learnable logit scale in DistributedDataParallel, which averages gradients over
the ranks, and its part of one float64 batch. For every convention of bench/conventions.py and
W = 1 .. 4 ranks the table shows <g, s> / <s, s>, g the averaged gradient and s that of the whole
batch in one process: 1 is right, anything else is a factor on the learning rate. Writes
bench/results/gradient_ratios.json and exits 1 unless every ratio of infloss is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from conventions import OURS, THEIRS, Convention
from record import RESULTS, Column, Result, command_line, environment, markdown_table

WORLDS = (1, 2, 3, 4)
BATCH = 24  # a multiple of every world
INPUT, DIM = 10, 6
SCALE = 1 / 0.07
TOLERANCE = 1e-9
PATIENCE = timedelta(seconds=60)  # until a rank that waits for another gives up

COLUMNS = [
    Column("convention", "loss"),
    *(Column(f"encoder_{world}", f"encoder, W={world}", ".2f") for world in WORLDS),
    Column("direction", "encoder's direction"),
    *(Column(f"scale_{world}", f"logit_scale, W={world}", ".2f") for world in WORLDS),
]

Split = Callable[[int], Sequence[int]]  # number of ranks -> rows of each


class Gradient(NamedTuple):
    """What a step leaves in the parameters."""

    encoder: Tensor  # both towers' weights, flat
    scale: Tensor  # of the logarithm of logit_scale, [1]


class Ratio(NamedTuple):
    """A gradient g beside the right one s."""

    ratio: float  # <g, s> / <s, s>
    rest: float  # |g - ratio s| / |g|: the sine of the angle between them


class Towers(nn.Module):
    """A linear layer a side and a learnable logit scale; the same at every start."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.img = nn.Linear(INPUT, DIM, bias=False, dtype=torch.float64)
        self.txt = nn.Linear(INPUT, DIM, bias=False, dtype=torch.float64)
        self.log_scale = nn.Parameter(torch.tensor(math.log(SCALE), dtype=torch.float64))

    def forward(self, img: Tensor, txt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.img(img), self.txt(txt), self.log_scale.exp()

    def gradient(self) -> Gradient:
        weights = (self.img.weight, self.txt.weight)
        encoder = [weight.grad.flatten() for weight in weights if weight.grad is not None]
        assert self.log_scale.grad is not None
        return Gradient(torch.cat(encoder), self.log_scale.grad.reshape(1))


def batch() -> tuple[Tensor, Tensor]:
    """Images and weakly matching texts, [B, INPUT] each."""
    generator = torch.Generator().manual_seed(1)
    img, noise = (
        torch.randn(BATCH, INPUT, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    return img, img + noise


def even(world: int) -> list[int]:
    """Shards of one size."""
    return [BATCH // world] * world


def single_gradient(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Gradient:
    """The whole batch in one process."""
    towers = Towers()
    loss(*towers(*batch())).backward()
    return towers.gradient()


def shared_gradient(convention: Convention, sizes: Sequence[int], group: Any) -> Gradient:
    """The batch in shards, one a rank of ``group``; the same on all of them."""
    towers = Towers()
    model = DistributedDataParallel(towers, process_group=group)
    img, txt = (side.split(list(sizes))[dist.get_rank(group)] for side in batch())
    img, txt, scale = model(img, txt)
    convention.loss(img, txt, scale, group).backward()
    return towers.gradient()


def compare(gradient: Tensor, single: Tensor) -> Ratio:
    """How much of the right gradient there is, and how much of anything else."""
    ratio = (gradient @ single / (single @ single)).item()
    norm = torch.linalg.vector_norm
    return Ratio(ratio, (norm(gradient - ratio * single) / norm(gradient)).item())


def row_of(convention: Convention, gradients: dict[int, Gradient]) -> dict[str, Any]:
    """One line of the table, from a convention's gradient at each number of ranks."""
    single = single_gradient(convention.single)
    row: dict[str, Any] = {"convention": convention.name}
    rests = []
    for world, gradient in gradients.items():
        encoder = compare(gradient.encoder, single.encoder)
        row[f"encoder_{world}"] = encoder.ratio
        row[f"encoder_rest_{world}"] = encoder.rest
        row[f"scale_{world}"] = compare(gradient.scale, single.scale).ratio
        rests.append(encoder.rest)
    worst = max(rests)
    parallel = worst <= TOLERANCE
    row["direction"] = "right" if parallel else f"wrong, by {math.degrees(math.asin(worst)):.0f}°"
    return row


def is_right(row: dict[str, Any]) -> bool:
    """Whether every gradient of a row is the single process's."""
    ratios = [row[f"{part}_{world}"] for part in ("encoder", "scale") for world in WORLDS]
    rests = [row[f"encoder_rest_{world}"] for world in WORLDS]
    return all(abs(ratio - 1) <= TOLERANCE for ratio in ratios) and max(rests) <= TOLERANCE


def _serve(rank: int, conventions: Sequence[Convention], split: Split, folder: str) -> None:
    """One rank's part of everything; rank 0 leaves the rows in ``folder``."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=max(WORLDS), timeout=PATIENCE
    )
    gradients: list[dict[int, Gradient]] = [{} for _ in conventions]
    for world in WORLDS:
        group = dist.new_group(list(range(world)))  # by every rank, its members or not
        if rank < world:
            for convention, found in zip(conventions, gradients, strict=True):
                found[world] = shared_gradient(convention, split(world), group)
    if rank == 0:
        rows = [row_of(*pair) for pair in zip(conventions, gradients, strict=True)]
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def measure(conventions: Sequence[Convention], split: Split = even) -> list[dict[str, Any]]:
    """The rows of ``conventions``, a process for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_serve, (conventions, split, folder), nprocs=max(WORLDS))
        rows: list[dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text())
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results-dir", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="names the code where git is not there")
    options = parser.parse_args(arguments)

    words = sys.argv[1:] if arguments is None else arguments
    torch.set_num_threads(1)
    rows = measure([*OURS, *THEIRS])
    result = Result(
        name="gradient_ratios",
        title="Averaged gradient of W ranks over that of one process",
        commands=[command_line("bench/gradient_ratios.py", words)],
        environment=environment("cpu", options.commit),
        settings={"batch": BATCH, "dim": DIM, "scale": SCALE, "dtype": "fp64", "backend": "gloo"},
        columns=COLUMNS,
        rows=rows,
    )
    result.write(options.results_dir)
    print(markdown_table(COLUMNS, rows))
    wrong = [row["convention"] for row in rows[: len(OURS)] if not is_right(row)]
    if wrong:
        print(f"not the gradient of one process: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
