"""The portable path beside dense torch on a CPU: time in turns, memory in fresh processes.

``python bench/cpu.py`` times one training step of B=8192, D=512 in fp32 and prints infloss / dense
for time (target: at most 0.7) and for peak memory beyond inputs and gradients (target: below 1/20),
with dense as open_clip writes it; the leaner dense form, one logit matrix read both ways, stands
beside it.
``--large`` adds B=65,536, D=64, infloss alone: the peak of the whole process (target: below 1 GiB).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from adapters import PEERS
from cases import UNCHECKED, Case, Shape, make_inputs, training_step
from common import MIB, Plan, peak_memory_bytes, process_peak_bytes, time_burst
from peers import Benchmark
from record import (
    RESULTS,
    ROOT,
    Column,
    Result,
    command_line,
    environment,
    markdown_table,
)

TIME_TARGET = 0.7
MEMORY_TARGET = 1 / 20
LARGE_TARGET_MIB = 1024.0
LARGE = (65536, 64)
COLUMNS = [
    Column("batch", "B", "d"),
    Column("dim", "D", "d"),
    Column("dtype", "dtype"),
    Column("peer", "loss"),
    Column("fwd_bwd_burst_ms", "fwd+bwd burst ms", ".0f"),
    Column("fwd_bwd_sustained_ms", "fwd+bwd sustained ms", ".0f"),
    Column("fwd_sustained_ms", "fwd sustained ms", ".0f"),
    Column("time_ratio", "infloss time / this", ".2f"),
    Column("beyond_mib", "MiB beyond inputs and gradients", ".1f"),
    Column("memory_ratio", "infloss memory / this", ".3f"),
    Column("process_mib", "process MiB", ".0f"),
    Column("grad_error", "grad error", ".1e"),
    Column("status", "status"),
]

_WARM_BATCH = 256


def cpu_shape(batch: int, dim: int) -> Shape:
    """fp32 on the CPU at CLIP's initial scale."""
    return Shape(batch, dim, torch.float32, torch.device("cpu"), 1 / 0.07)


def measure_step(name: str, batch: int, dim: int) -> dict[str, float]:
    """One step of a loss in this process, meant to be fresh: peaks in MiB and the step's ms.

    A small batch runs first, so that what libraries load or allocate once is not counted.
    """
    peer = PEERS[name]
    loss = peer.build(torch.device("cpu"))
    steps = []
    for rows in (_WARM_BATCH, batch):
        shape = cpu_shape(rows, dim)
        steps.append(training_step(peer, loss, Case(shape, *make_inputs(shape, "paired"), None)))
    warm, step = steps
    warm()
    taken: list[float] = []
    before = process_peak_bytes()
    above = peak_memory_bytes(
        lambda: taken.append(time_burst(step, torch.device("cpu"), runs=1, idle_s=0.0)),
        torch.device("cpu"),
    )
    process = max(before, process_peak_bytes())
    gradients = 2 * batch * dim * torch.float32.itemsize
    beyond = (above - gradients) / MIB
    return {"beyond_mib": beyond, "process_mib": process / MIB, "step_ms": taken[0]}


def measure_fresh(name: str, batch: int, dim: int) -> dict[str, float]:
    """:func:`measure_step` in a process of its own."""
    command = [sys.executable, __file__, "--worker", name, str(batch), str(dim)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def compare(batch: int, dim: int, plan: Plan) -> list[dict[str, Any]]:
    """Rows of both dense forms, each with infloss's ratio to it, and of infloss."""
    names = ("dense", "dense-once", "infloss")
    benchmark = Benchmark([PEERS[name] for name in names], plan, check_cone=False)
    rows = benchmark.rows(cpu_shape(batch, dim))
    for row in rows:
        fresh = measure_fresh(row["peer"], batch, dim)
        del row["peak_mib"]  # of this process, which has already run something large
        row.update(beyond_mib=fresh["beyond_mib"], process_mib=fresh["process_mib"])
    *others, ours = rows
    for other in others:
        if "fwd_bwd_sustained_ms" in other and "fwd_bwd_sustained_ms" in ours:
            other["time_ratio"] = ours["fwd_bwd_sustained_ms"] / other["fwd_bwd_sustained_ms"]
        other["memory_ratio"] = ours["beyond_mib"] / other["beyond_mib"]
    return rows


def large_row() -> dict[str, Any]:
    """One step of infloss at B=65,536, D=64, too large to check or to repeat."""
    batch, dim = LARGE
    fresh = measure_fresh("infloss", batch, dim)
    step_ms = fresh.pop("step_ms")
    shape = {"peer": "infloss", "batch": batch, "dim": dim, "dtype": "fp32"}
    return {**shape, **fresh, "fwd_bwd_sustained_ms": step_ms, "status": UNCHECKED}


def missed_targets(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Which targets the rows miss, in words; a row without its figure misses too."""
    missed = []
    for row in rows:
        limits: dict[str, float] = {}
        if row["peer"] == "dense":
            limits = {"time_ratio": TIME_TARGET, "memory_ratio": MEMORY_TARGET}
        if (row["batch"], row["dim"]) == LARGE:
            limits = {"process_mib": LARGE_TARGET_MIB}
        for key, limit in limits.items():
            if row.get(key, float("inf")) > limit:
                missed.append(f"{key} {row.get(key)}, target {limit}")
    return missed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="turns that each loss gets")
    parser.add_argument("--large", action="store_true", help="also B=65536, D=64")
    parser.add_argument("--check-targets", action="store_true", help="exit 1 when one is missed")
    parser.add_argument("--out", default="cpu", metavar="NAME", help="bench/results/NAME.json")
    parser.add_argument("--results-dir", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="names the code where git is not there")
    parser.add_argument("--worker", nargs=3, metavar=("LOSS", "B", "D"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        name, batch, dim = options.worker
        print(json.dumps(measure_step(name, int(batch), int(dim))))
        return 0
    plan = Plan(rounds=options.rounds, burst_runs=2, limit_s=300.0)
    rows = compare(options.batch, options.dim, plan)
    if options.large:
        rows.append(large_row())
    result = Result(
        name=options.out,
        title="Portable path on a CPU",
        commands=[command_line("bench/cpu.py", sys.argv[1:] if arguments is None else arguments)],
        environment=environment("cpu", options.commit),
        settings={"scale": cpu_shape(1, 1).scale, "rounds": options.rounds},
        columns=COLUMNS,
        rows=rows,
    )
    result.write(options.results_dir)
    print(markdown_table(COLUMNS, rows))
    missed = missed_targets(rows)
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed and options.check_targets else 0


if __name__ == "__main__":
    sys.exit(main())
