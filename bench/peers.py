"""infloss beside other exact contrastive losses: speed, peak memory and error, in one table.

``python bench/peers.py --batch 8192,65536 --dim 768 --out NAME`` writes bench/results/NAME.json
after every shape and prints the table. bench/README.md defines every column and the protocol.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from adapters import DEFAULT_PEERS, PEERS, Loss, Peer
from cases import (
    DTYPES,
    UNCHECKED,
    Case,
    NotOnThisDevice,
    Shape,
    describe,
    forward_step,
    make_case,
    training_step,
)
from common import (
    CUBLAS_FLOPS,
    MIB,
    Plan,
    Step,
    Timing,
    alternate,
    cublas_step,
    free_memory_bytes,
    peak_memory_bytes,
    time_burst,
)
from oracle import PEER_LIMIT, Gradients
from record import (
    RESULTS,
    Column,
    Result,
    command_line,
    environment,
    markdown_table,
    merge,
    read_result,
)

KEYS = ("peer", "batch", "dim", "dtype")
CUBLAS = "cuBLAS 8192^3"
COLUMNS = (
    Column("batch", "B", "d"),
    Column("dim", "D", "d"),
    Column("dtype", "dtype"),
    Column("peer", "loss"),
    Column("fwd_bwd_burst_ms", "fwd+bwd burst ms", ".2f"),
    Column("fwd_bwd_sustained_ms", "fwd+bwd sustained ms", ".2f"),
    Column("fwd_burst_ms", "fwd burst ms", ".2f"),
    Column("fwd_sustained_ms", "fwd sustained ms", ".2f"),
    Column("peak_mib", "peak MiB", ".0f"),
    Column("grad_error", "grad error", ".1e"),
    Column("cone_error", "grad error, cone", ".1e"),
    Column("status", "status"),
)
CUBLAS_COLUMNS = (
    Column("fwd_bwd_burst_of_cublas", "fwd+bwd burst / cuBLAS", ".2f"),
    Column("fwd_bwd_sustained_of_cublas", "fwd+bwd sustained / cuBLAS", ".2f"),
    Column("fwd_burst_of_cublas", "fwd burst / cuBLAS", ".2f"),
    Column("fwd_sustained_of_cublas", "fwd sustained / cuBLAS", ".2f"),
)
GPU_BATCHES = tuple(2**power for power in range(8, 19))
CPU_BATCHES = (256, 1024, 4096)
QUADRATIC_FROM = 8192  # below, launches and fixed costs hide the growth with B^2


@dataclass
class Entry:
    """A peer at one shape: its row so far, and its steps while it is still in the race."""

    peer: Peer
    row: dict[str, Any]
    steps: dict[str, Step] = field(default_factory=dict)

    def drop(self, status: str) -> None:
        """Out of the race: the row keeps its errors and memory, and shows no speed."""
        self.row["status"] = status
        self.steps.clear()


class Benchmark:
    """The run over all shapes; remembers how long each peer took at smaller batches."""

    def __init__(self, peers: Sequence[Peer], plan: Plan, check_cone: bool) -> None:
        self._peers = peers
        self._plan = plan
        self._check_cone = check_cone
        self._last: dict[tuple[str, int], tuple[int, float]] = {}

    def rows(self, shape: Shape) -> list[dict[str, Any]]:
        """Check, then time, every peer at ``shape``."""
        torch.compiler.reset()
        case = make_case(shape, "paired")
        cone = make_case(shape, "cone") if self._check_cone else None
        entries = [self._prepare(peer, case, cone) for peer in self._peers]
        del cone
        for mode, flops in (("fwd_bwd", shape.flops), ("fwd", shape.forward_flops)):
            self._time(entries, mode, flops, shape)
        return [entry.row for entry in entries]

    def _prepare(self, peer: Peer, case: Case, cone: Case | None) -> Entry:
        shape = case.shape
        dtype = next(name for name, value in DTYPES.items() if value is shape.dtype)
        row = {"peer": peer.name, "batch": shape.batch, "dim": shape.dim, "dtype": dtype}
        entry = Entry(peer, {**row, "status": "ok"})
        try:
            self._refuse_hopeless(peer, shape)
            loss = peer.build(shape.device)
            self._check(entry, loss, case, cone)
        except Exception as error:
            entry.drop(describe(error))
        gc.collect()
        return entry

    def _refuse_hopeless(self, peer: Peer, shape: Shape) -> None:
        """Raise for a row that cannot fit or, going by a smaller batch, would take too long."""
        if peer.gpu_only and shape.device.type != "cuda":
            raise NotOnThisDevice("needs a GPU")
        need, have = peer.predicted_bytes(shape.batch, shape.dtype), free_memory_bytes(shape.device)
        if need > have:
            raise torch.OutOfMemoryError(f"predicted {need / 2**30:.0f} GiB")
        batch, call_ms = self._last.get((peer.name, shape.dim), (shape.batch, 0.0))
        self._refuse_slow(call_ms * (shape.batch / batch) ** 2)

    def _refuse_slow(self, call_ms: float) -> None:
        if self._plan.least_s(call_ms) > self._plan.limit_s:
            raise TimeoutError(f"over the time limit ({call_ms / 1e3:.0f} s a call)")

    def _check(self, entry: Entry, loss: Loss, case: Case, cone: Case | None) -> None:
        """Warm up, compare with fp64, measure memory; keep the steps of a loss that is right."""
        peer, row, shape = entry.peer, entry.row, case.shape
        step, forward = training_step(peer, loss, case), forward_step(peer, loss, case)
        wrong = self._compare(entry, step, case, {"grad_error": "gradient", "loss_error": "loss"})
        call_ms = time_burst(step, shape.device, runs=1, idle_s=0.0)
        if shape.batch >= QUADRATIC_FROM:
            self._last[peer.name, shape.dim] = shape.batch, call_ms
        self._refuse_slow(call_ms)
        if cone is not None:
            off = self._compare(
                entry, training_step(peer, loss, cone), cone, {"cone_error": "gradient"}
            )
            wrong = wrong or (peer.ours and off)
        row["peak_mib"] = peak_memory_bytes(step, shape.device) / MIB
        forward()
        if wrong:
            entry.drop("wrong gradient: not timed")
        else:
            entry.steps.update(fwd_bwd=step, fwd=forward)

    @staticmethod
    def _compare(
        entry: Entry, step: Callable[[], Gradients], case: Case, columns: Mapping[str, str]
    ) -> bool:
        """Run a step, fill in its errors, and say whether its gradient is beyond the limit."""
        got = step()
        if case.oracle is None:
            entry.row["status"] = UNCHECKED
            return False
        errors = case.oracle.errors(got)
        for key, name in columns.items():
            value = getattr(errors, name)
            entry.row[key] = value if math.isfinite(value) else "inf"
        if errors.within_contract:
            return False
        return entry.peer.ours or errors.gradient > PEER_LIMIT[case.shape.dtype]

    def _time(self, entries: Sequence[Entry], mode: str, flops: int, shape: Shape) -> None:
        """Time one mode of all entries in turns, with cuBLAS among them on a GPU."""
        racing = {entry.peer.name: entry for entry in entries if entry.steps}
        steps = {name: entry.steps[mode] for name, entry in racing.items()}
        if shape.device.type == "cuda":
            steps[CUBLAS] = cublas_step(shape.device)
            steps[CUBLAS]()
        seen = alternate(steps, shape.device, self._plan)
        for name, error in seen.failures.items():
            if name in racing:
                racing[name].drop(describe(error))
        yardstick = seen.timings.pop(CUBLAS, None)
        for name, timing in seen.timings.items():
            racing[name].row.update(speed(timing, mode, flops, yardstick))


def speed(timing: Timing, mode: str, flops: int, yardstick: Timing | None) -> dict[str, float]:
    """A row's speeds in one mode: ms, and the fraction of cuBLAS's FLOP/s timed beside it."""
    row = {f"{mode}_burst_ms": timing.burst_ms, f"{mode}_sustained_ms": timing.sustained_ms}
    if yardstick is None:
        return row
    for kind in ("burst", "sustained"):
        theirs = getattr(yardstick, f"{kind}_ms")
        floor_ms = flops / CUBLAS_FLOPS * theirs
        row[f"{mode}_{kind}_of_cublas"] = floor_ms / row[f"{mode}_{kind}_ms"]
        row[f"{mode}_{kind}_cublas_tflops"] = CUBLAS_FLOPS / theirs / 1e9
    return row


def shapes(options: argparse.Namespace) -> list[Shape]:
    """Every shape of the run, small batches first within a width."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    return [
        Shape(batch, dim, dtype, device, options.scale)
        for dim in options.dim
        for batch in sorted(options.batch)
    ]


def integers(text: str) -> list[int]:
    """A comma list of positive integers."""
    values = [int(word) for word in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected positive integers")
    return values


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; what is left out depends on the device."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=integers, help="comma list (256..262144 on a GPU)")
    parser.add_argument("--dim", type=integers, default=[512, 768, 1024], help="comma list")
    parser.add_argument("--dtype", choices=DTYPES, help="bf16 on a GPU, else fp32")
    parser.add_argument("--scale", type=float, default=14.3, help="logit scale")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument(
        "--peers", type=lambda text: text.split(","), default=list(DEFAULT_PEERS),
        help=f"comma list of {', '.join(PEERS)}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=2, help="turns that each loss gets")
    parser.add_argument("--time-limit", type=float, default=20.0, help="timed s a row and mode")
    parser.add_argument("--quick", action="store_true", help="one round, short windows, no cone")
    parser.add_argument("--matmul-precision", choices=("highest", "high", "medium"))
    parser.add_argument("--out", default="peers", metavar="NAME", help="bench/results/NAME.json")
    parser.add_argument("--results-dir", type=Path, default=RESULTS)
    parser.add_argument("--append", action="store_true", help="keep NAME.json's other rows")
    parser.add_argument("--commit", help="names the code where git is not there")
    options = parser.parse_args(arguments)
    on_gpu = torch.device(options.device).type == "cuda"
    options.batch = options.batch or list(GPU_BATCHES if on_gpu else CPU_BATCHES)
    options.dtype = options.dtype or ("bf16" if on_gpu else "fp32")
    unknown = [name for name in options.peers if name not in PEERS]
    if unknown:
        parser.error(f"--peers: got {', '.join(unknown)}, expected some of {', '.join(PEERS)}")
    return options


def make_plan(options: argparse.Namespace) -> Plan:
    """The timing plan that the command line asks for."""
    if options.quick:
        return Plan(rounds=1, burst_runs=3, window_s=0.25, limit_s=options.time_limit)
    return Plan(rounds=options.rounds, limit_s=options.time_limit)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.matmul_precision:
        torch.set_float32_matmul_precision(options.matmul_precision)
    on_gpu = torch.device(options.device).type == "cuda"
    columns = [*COLUMNS[:-1], *(CUBLAS_COLUMNS if on_gpu else ()), COLUMNS[-1]]
    settings = {
        "scale": options.scale,
        "quick": options.quick,
        "rounds": make_plan(options).rounds,
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    result = Result(
        name=options.out,
        title=f"Symmetric contrastive loss at logit scale {options.scale}",
        commands=[command_line("bench/peers.py", sys.argv[1:] if arguments is None else arguments)],
        environment=environment(options.device, options.commit),
        settings=settings,
        columns=columns,
        rows=[],
    )
    if options.append and (options.results_dir / f"{options.out}.json").exists():
        result = merge(read_result(options.out, options.results_dir), result, KEYS)
    benchmark = Benchmark(
        [PEERS[name] for name in options.peers], make_plan(options), not options.quick
    )
    for shape in shapes(options):
        rows = benchmark.rows(shape)
        print(markdown_table(columns, rows), end="\n\n", flush=True)
        result = merge(result, replace(result, rows=rows), KEYS)
        result.rows.sort(key=lambda row: (row["dim"], row["batch"]))
        result.write(options.results_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
