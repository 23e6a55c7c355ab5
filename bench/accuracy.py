"""Every output of infloss beside dense torch, against fp64, and what the tolerance rule allows.

``python bench/accuracy.py`` runs each dtype on each kind of pairs at logit scales 14.3 and 100,
writes bench/results/accuracy.json, prints the table and exits 1 if a row breaks the rule of
``infloss.reference``. bench/README.md defines every column.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cases
import infloss
from infloss import config, paths, reference
from oracle import matmul_precision
from record import RESULTS, Column, Result, command_line, environment, markdown_table

SCALES = (14.3, 100.0)
CONES = {"cone.9": 0.9, "cone.99": 0.99}  # cosine of unrelated rows
KINDS = ("unrelated", "weak", "identical", *CONES)
DTYPES = {
    "bf16": cases.DTYPES["bf16"],
    "fp16": torch.float16,
    "fp32": cases.DTYPES["fp32"],
    "fp64": torch.float64,
}
FP16_FACTOR = 4096.0  # of the loss, as a gradient scaler has it
# 'medium' lets products round float32 features to bf16. The dense comparison takes the features as
# they are, and nothing in the rule pays for that rounding: such rows are reported, with the floor
# of bf16, and not judged.
PRECISIONS = ("highest", "high", "medium")
JUDGED_PRECISIONS = ("highest", "high")

OK = "ok"
NOT_JUDGED = "not judged"
GPU_SHAPE = (4096, 768)
CPU_SHAPE = (512, 64)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Outputs(NamedTuple):
    """What a training step takes from a loss."""

    loss: Tensor  # []
    dx: Tensor  # [B, D]
    dy: Tensor  # [B, D]
    dscale: Tensor  # []


COLUMNS = [
    Column("dtype", "dtype"),
    Column("precision", "fp32 products"),
    Column("path", "path"),
    Column("batch", "B", "d"),
    Column("dim", "D", "d"),
    Column("pairs", "pairs"),
    Column("scale", "scale", "g"),
    *(
        Column(f"{name}_{key}", f"{name}{title}", ".1e")
        for name in Outputs._fields
        for key, title in (("error", ""), ("dense", ", dense"), ("allowed", ", allowed"))
    ),
    Column("dx_norm", "‖dx‖", ".1e"),
    Column("status", "status"),
]


@dataclass(frozen=True)
class Figures:
    """One output of ours and of dense torch beside what is allowed, relative to the exact norm."""

    ours: float
    dense: float
    allowed: float
    ok: bool


def features(kind: str, shape: cases.Shape, draws: int) -> tuple[Tensor, Tensor]:
    """``[draws, B, D]`` rows of either side, from ``cases.make_inputs``.

    Its pairs have a cosine of 0.45, or 6.4 / scale where that is less: "weak" takes them as they
    are, a cone adds a shared mean (a spare row of each draw), "identical" takes one side twice. At
    an infinite scale its pairs share nothing: "unrelated".
    """
    rows, scale = draws * (shape.batch + 1), math.inf if kind == "unrelated" else shape.scale
    source = replace(shape, batch=rows, scale=scale, dtype=torch.float64)
    made = cases.make_inputs(source, "paired")
    x, y = (side.detach().unflatten(0, (draws, -1)) for side in made)
    if kind == "identical":
        y = x
    if kind in CONES:
        mean = (CONES[kind] / (1 - CONES[kind])) ** 0.5 * x[:, -1:]
        x, y = x + mean, y + mean
    return x[:, :-1].to(shape.dtype), y[:, :-1].to(shape.dtype)


def step(loss_fn: Loss, x: Tensor, y: Tensor, scale: Tensor, factor: float) -> Outputs:
    """The loss, and the gradients of ``factor`` times it."""
    leaves = [leaf.detach().requires_grad_() for leaf in (x, y, scale)]
    loss = loss_fn(*leaves)
    return Outputs(loss.detach(), *torch.autograd.grad(loss * factor, leaves))


def dense_loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """The oracle as a user writes it."""
    return reference.contrastive_loss(x, y, scale).mean()


def exact_loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """The oracle without cancellation, for float64."""
    return reference.contrastive_loss(x, y, scale, nll=reference.exact_nll).mean()


def our_loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """What is judged."""
    return infloss.contrastive_loss(x, y, scale)


def compare(out: Tensor, dense: Tensor, exact: Tensor, floor: float) -> Figures | None:
    """Judge one output; None where the exact one is below what its dtype can hold."""
    if exact.abs().max().item() < torch.finfo(out.dtype).tiny:
        return None
    ours = reference.deviation(out, dense, exact, floor)
    beside = reference.deviation(dense.to(out.dtype), dense, exact, floor)
    return Figures(ours.relative, beside.relative, ours.allowed / ours.size, ours.ok)


def row_of(
    ours: Sequence[Outputs], dense: Sequence[Outputs], exact: Sequence[Outputs], floor: float
) -> dict[str, Any]:
    """Figures of every output over the draws, and which of them break the rule.

    A matrix shows its worst draw. A scalar has no norm to average its luck over: all draws of it
    are judged as one vector.
    """
    row: dict[str, Any] = {}
    wrong = []
    for name in Outputs._fields:
        # (ours, dense, exact) of this output, one of each a draw
        triples = [
            (getattr(a, name), getattr(b, name), getattr(c, name))
            for a, b, c in zip(ours, dense, exact, strict=True)
        ]
        if triples[0][0].ndim == 0:
            a, b, c = (torch.stack(scalars) for scalars in zip(*triples, strict=True))
            triples = [(a, b, c)]
        row[f"{name}_norm"] = max(torch.linalg.vector_norm(c).item() for _, _, c in triples)
        draws = [figures for triple in triples if (figures := compare(*triple, floor))]
        if not draws:
            continue
        worst = max(draws, key=lambda figures: figures.ours / figures.allowed)
        for key, value in (
            ("error", worst.ours),
            ("dense", worst.dense),
            ("allowed", worst.allowed),
        ):
            row[f"{name}_{key}"] = value if math.isfinite(value) else "inf"
        if not all(figures.ok for figures in draws):
            wrong.append(name)
    row["status"] = f"wrong: {', '.join(wrong)}" if wrong else OK
    return row


def rows_of(kind: str, shape: cases.Shape, draws: int, path: str) -> list[dict[str, Any]]:
    """The rows of one kind of pairs: one, or for float32 one for each precision of products."""
    x, y = features(kind, shape, draws)
    dense_dtype, exact_dtype = reference.oracle_dtypes(shape.dtype)
    scale = torch.tensor(shape.scale, device=shape.device, dtype=dense_dtype)
    factor = FP16_FACTOR if shape.dtype is torch.float16 else 1.0

    def run(loss: Loss, dtype: torch.dtype, scale: Tensor) -> list[Outputs]:
        return [
            step(loss, a.to(dtype), b.to(dtype), scale, factor) for a, b in zip(x, y, strict=True)
        ]

    with matmul_precision("highest"):
        dense = run(dense_loss, dense_dtype, scale)
        exact = run(exact_loss, exact_dtype, scale.to(exact_dtype))
    rows = []
    for precision in PRECISIONS if shape.dtype is torch.float32 else PRECISIONS[:1]:
        judged = precision in JUDGED_PRECISIONS
        forced = nullcontext() if path == config.AUTO else infloss.use_path(path)
        with matmul_precision(precision), forced:
            ours = run(our_loss, shape.dtype, scale)
            floor = reference.floor_of(shape.dtype if judged else torch.bfloat16)
        row = row_of(ours, dense, exact, floor)
        if not judged:
            row["status"] = NOT_JUDGED
        rows.append(
            {
                "dtype": next(name for name, value in DTYPES.items() if value is shape.dtype),
                "precision": precision if shape.dtype is torch.float32 else None,
                "path": paths.resolve(path, shape.dtype, shape.device),
                "batch": shape.batch,
                "dim": shape.dim,
                "pairs": kind,
                "scale": shape.scale,
                **row,
            }
        )
    return rows


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows; a dtype that the path cannot take is left out, with a line that says why."""
    device = torch.device(options.device)
    rows = []
    for name in options.dtype:
        dtype = DTYPES[name]
        try:
            paths.resolve(options.path, dtype, device)
        except ValueError as error:
            print(f"{name} left out: {error}", file=sys.stderr)
            continue
        for scale in SCALES:
            shape = cases.Shape(options.batch, options.dim, dtype, device, scale)
            for kind in KINDS:
                rows += rows_of(kind, shape, options.draws, options.path)
    # stable: within a dtype and a precision, the order in which they were measured
    rows.sort(key=lambda row: (list(DTYPES).index(row["dtype"]), _precision_order(row)))
    return rows


def _precision_order(row: dict[str, Any]) -> int:
    return PRECISIONS.index(row["precision"]) if row["precision"] else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; the shape that is left out depends on the device."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="4096 on a GPU, else 512; float64 B x B must fit")
    parser.add_argument("--dim", type=int, help="768 on a GPU, else 64")
    parser.add_argument(
        "--dtype", type=lambda text: text.split(","), default=list(DTYPES),
        help=f"comma list of {', '.join(DTYPES)}",
    )  # fmt: skip
    parser.add_argument("--draws", type=int, default=8, help="independent batches a row")
    parser.add_argument("--path", choices=(config.AUTO, *config.PATHS), default=config.AUTO)
    parser.add_argument("--out", default="accuracy", metavar="NAME", help="bench/results/NAME.json")
    parser.add_argument("--results-dir", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="names the code where git is not there")
    options = parser.parse_args(arguments)
    batch, dim = GPU_SHAPE if torch.device(options.device).type == "cuda" else CPU_SHAPE
    options.batch = batch if options.batch is None else options.batch
    options.dim = dim if options.dim is None else options.dim
    if min(options.batch, options.dim, options.draws) < 1:
        parser.error("--batch, --dim, --draws: expected positive integers")
    unknown = [name for name in options.dtype if name not in DTYPES]
    if unknown:
        parser.error(f"--dtype: got {', '.join(unknown)}, expected some of {', '.join(DTYPES)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    command = command_line("bench/accuracy.py", sys.argv[1:] if arguments is None else arguments)
    rows = measure(options)
    result = Result(
        name=options.out,
        title="Error against fp64, and what the tolerance rule allows",
        commands=[command],
        environment=environment(options.device, options.commit),
        settings={"path": options.path, "draws": options.draws, "fp16_factor": FP16_FACTOR},
        columns=COLUMNS,
        rows=rows,
    )
    result.write(options.results_dir)
    print(markdown_table(COLUMNS, rows))
    judged = [row for row in rows if row["status"] != NOT_JUDGED]
    wrong = [row for row in judged if row["status"] != OK]
    print(f"{len(judged)} rows judged, {len(wrong)} wrong")
    return 1 if wrong or not judged else 0


if __name__ == "__main__":
    sys.exit(main())
