"""One contrastive step through a transformer: chunked in several ways, and in one piece.

``python bench/encoders.py`` takes each way of bench/chunking.py on the same encoder and batch: time
in turns in one process, peak memory in a fresh one each (on a GPU, in this one), and the error of
the parameters' gradient against float64 in one piece. Writes bench/results/encoders.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chunking import VOCABULARY, WAYS, TextEncoder, available, one_piece
from common import MIB, Plan, alternate, peak_memory_bytes
from record import RESULTS, ROOT, Column, Result, command_line, environment, markdown_table

COLUMNS = [
    Column("way", "way"),
    Column("batch", "B", "d"),
    Column("chunk", "chunk", "d"),
    Column("burst_ms", "burst ms", ".0f"),
    Column("sustained_ms", "sustained ms", ".0f"),
    Column("peak_mib", "peak MiB", ".0f"),
    Column("grad_error", "grad error", ".1e"),
    Column("status", "status"),
]


def make_batch(rows: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two sides of token ids; a pair shares two tokens in three."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(VOCABULARY, (rows, tokens), generator=generator) for _ in range(2))
    shared = torch.rand(rows, tokens, generator=generator) < 2 / 3
    return x.to(device), torch.where(shared, x, y).to(device)


def make_encoder(device: torch.device) -> TextEncoder:
    torch.manual_seed(0)
    return TextEncoder().to(device)


def step_of(
    name: str, encoder: nn.Module, x: Tensor, y: Tensor, chunk: int
) -> Callable[[], Tensor]:
    """One step, which leaves fresh gradients."""

    def step() -> Tensor:
        encoder.zero_grad()
        return WAYS[name](encoder, x, y, chunk)

    return step


def gradient(encoder: nn.Module) -> Tensor:
    """Of all parameters, in one float64 vector."""
    grads = [one.grad for one in encoder.parameters() if one.grad is not None]
    return torch.cat([one.flatten().double() for one in grads])


def exact_gradient(encoder: TextEncoder, x: Tensor, y: Tensor) -> Tensor:
    """By ordinary autograd in float64, in one piece."""
    exact = copy.deepcopy(encoder).double()
    exact.zero_grad()
    one_piece(exact, x, y, 0)
    return gradient(exact)


def peak_mib(name: str, options: argparse.Namespace) -> float:
    """Of one step above the encoder and the batch, after one of a small batch."""
    device = torch.device(options.device)
    encoder, sides = make_encoder(device), make_batch(options.batch, options.tokens, device)
    few, whole = (
        step_of(name, encoder, x, y, options.chunk)
        for x, y in (tuple(side[: options.chunk] for side in sides), sides)
    )
    few()
    return peak_memory_bytes(whole, device) / MIB


def peak_mib_fresh(name: str, options: argparse.Namespace) -> float:
    """:func:`peak_mib` in a process of its own, where memory on a CPU can be told."""
    if options.device != "cpu":
        return peak_mib(name, options)
    sizes = [f"--{key}={getattr(options, key)}" for key in ("batch", "tokens", "chunk")]
    command = [sys.executable, __file__, "--worker", name, "--device", "cpu", *sizes]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def rows_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way: checked first, then timed in turns."""
    device = torch.device(options.device)
    encoder, sides = make_encoder(device), make_batch(options.batch, options.tokens, device)
    expected = exact_gradient(encoder, *sides)
    rows: dict[str, dict[str, Any]] = {}
    steps = {}
    for name in WAYS:
        row = rows[name] = {"way": name, "batch": options.batch, "chunk": options.chunk}
        if name not in available():
            row["status"] = "not installed"
            continue
        step = step_of(name, encoder, *sides, options.chunk)
        step()
        row["grad_error"] = ((gradient(encoder) - expected).norm() / expected.norm()).item()
        row["status"] = "ok" if row["grad_error"] < options.tolerance else "wrong gradient"
        if row["status"] == "ok":
            steps[name] = step
    timed = alternate(steps, device, Plan(rounds=options.rounds, burst_runs=2, limit_s=600.0))
    for name, timing in timed.timings.items():
        rows[name].update(burst_ms=timing.burst_ms, sustained_ms=timing.sustained_ms)
        rows[name]["peak_mib"] = peak_mib_fresh(name, options)
    for name, failure in timed.failures.items():
        rows[name]["status"] = f"failed: {failure}"
    return list(rows.values())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="turns that each way gets")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of the gradient's error")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", default="encoders", metavar="NAME", help="bench/results/NAME.json")
    parser.add_argument("--results-dir", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="names the code where git is not there")
    parser.add_argument("--worker", metavar="WAY", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        print(json.dumps(peak_mib(options.worker, options)))
        return 0
    rows = rows_of(options)
    result = Result(
        name=options.out,
        title="Encoders in chunks",
        commands=[
            command_line("bench/encoders.py", sys.argv[1:] if arguments is None else arguments)
        ],
        environment=environment(options.device, options.commit),
        settings={"tokens": options.tokens, "rounds": options.rounds},
        columns=COLUMNS,
        rows=rows,
    )
    result.write(options.results_dir)
    print(markdown_table(COLUMNS, rows))
    return int(any(row["status"].startswith(("wrong", "failed")) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
