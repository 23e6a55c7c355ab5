"""What a step over W ranks sends, holds and takes, by strategy: a model, not a measurement.

``python bench/scaling.py`` writes bench/results/scaling.json, which docs/scaling.md explains. Bytes
and messages are exact, and a test counts them; times follow from the rates below.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infloss.config import DEFAULT_WORKSPACE
from infloss.distributed.ring import BLOCK_ROWS
from record import RESULTS, Column, Result, command_line, environment, markdown_table

FLOPS = 700e12  # of the products, a GPU and second
LATENCY = 130e-6  # s until a message moves
NVLINK = 343e9  # bytes a GPU and second, each way
NETWORK = 50e9  # the same between nodes: 400 Gb/s a GPU
NODE = 8  # GPUs of a node
STATS, WEIGHTED_STATS, ACCUMULATOR = 8, 12, 4  # bytes: of a column forward, backward; of a value
MIB = 2**20

WORLDS = (2, 8, 64, 512, 4096)
SHARDS = (512, 4096, 16384, 65536)

COLUMNS = [
    Column("ranks", "GPUs", "d"),
    Column("pairs", "pairs a GPU", "d"),
    Column("compute_ms", "compute ms", ",.1f"),
    Column("ring_ms", "ring ms", ",.1f"),
    Column("gather_ms", "gather ms", ",.1f"),
    Column("ring_sent_mib", "ring sends MiB", ",.0f"),
    Column("gather_sent_mib", "gather sends MiB", ",.0f"),
    Column("ring_messages", "ring messages", ",d"),
    Column("gather_messages", "gather messages", "d"),
    Column("ring_mib", "ring holds MiB", ",.0f"),
    Column("gather_mib", "gather holds MiB", ",.0f"),
    Column("auto", "auto, one group"),
]


@dataclass(frozen=True)
class Step:
    """Forward and backward of the symmetric loss, every side and scale trained."""

    ranks: int
    pairs: int  # of a rank
    dim: int = 768
    itemsize: int = 2  # of the features

    @property
    def batch(self) -> int:
        return self.ranks * self.pairs

    @property
    def blocks(self) -> int:
        """Sub-blocks of a shard."""
        return -(-self.pairs // BLOCK_ROWS)

    @property
    def features(self) -> int:
        """Bytes of one side's shard."""
        return self.pairs * self.dim * self.itemsize

    @property
    def gradient(self) -> int:
        """Bytes of the same shard's accumulator."""
        return self.pairs * self.dim * ACCUMULATOR

    @property
    def compute(self) -> float:
        """Seconds of a rank's products: a quarter of them forward."""
        return 8 * self.batch * self.pairs * self.dim / FLOPS


@dataclass(frozen=True)
class Pass:
    """What a ring sends in a pass: on each hop but the last, and on every hop, with each block."""

    forward: int  # bytes of a shard that travel ahead of the work: W - 1 hops
    behind: int  # bytes that follow it and come home: W hops
    work: float  # share of the step's compute


def ring_passes(step: Step) -> tuple[Pass, Pass]:
    """The forward and the backward pass."""
    return (
        Pass(step.features, STATS * step.pairs, 1 / 4),
        Pass(step.features + WEIGHTED_STATS * step.pairs, step.gradient, 3 / 4),
    )


def ring_sent(step: Step) -> int:
    """Bytes that a rank sends."""
    hops = step.ranks
    return sum(one.forward * (hops - 1) + one.behind * hops for one in ring_passes(step))


def ring_messages(step: Step) -> int:
    """Exchanges with the neighbours that a rank posts; tensors that leave together are one."""
    return 2 * (2 * step.ranks - 1) * step.blocks


def gather_sent(step: Step) -> int:
    """Bytes that a rank sends: an all-gather and an all-to-all, an all-gather, a reduce-scatter."""
    others = step.ranks - 1
    columns = (STATS + WEIGHTED_STATS) * step.pairs
    return others * (step.features + columns + step.gradient)


GATHER_MESSAGES = 4  # collectives


def ring_held(step: Step) -> int:
    """Bytes a rank holds above its shard, gradients, accumulator and workspace.

    A sub-block's part of the shard's own gradient; and sub-blocks: of the features the one that is
    worked on and the next, of the gradient what was made, what came in, what leaves, and the last
    on its way home.
    """
    return step.gradient + (2 * step.features + 4 * step.gradient) // step.blocks


def gather_held(step: Step) -> int:
    """The same: all features of a side and the accumulator of all their gradients."""
    return step.ranks * (step.features + step.gradient)


def ring_seconds(step: Step) -> float:
    """Hops hide behind the products of their sub-block or the other way round; the last hides not.

    Over several nodes rings are nested: a block goes round its node between two hops outside.
    """
    inner = min(step.ranks, NODE)
    nodes = step.ranks // inner
    total = 0.0
    for one in ring_passes(step):
        moved = (one.forward + one.behind) / step.blocks
        work = one.work * step.compute / (step.ranks * step.blocks)
        node = inner * max(work, LATENCY + moved / NVLINK)
        outside = LATENCY + moved / NETWORK if nodes > 1 else 0.0
        home = LATENCY + one.behind / step.blocks / (NVLINK if nodes == 1 else NETWORK)
        total += step.blocks * nodes * max(node, outside) + home
    return total


def gather_seconds(step: Step) -> float:
    """Collectives before and after the products, log2(W) messages deep; a NIC for every GPU."""
    inner = min(step.ranks, NODE)
    sent = gather_sent(step)
    outside = sent * (step.ranks - inner) / (step.ranks - 1) / inner
    latency = GATHER_MESSAGES * math.log2(2 * step.ranks) / 2 * LATENCY
    return step.compute + latency + max(sent / NVLINK, outside / NETWORK)


def row_of(step: Step) -> dict[str, Any]:
    """One line of the table."""
    held = gather_held(step)
    return {
        "ranks": step.ranks,
        "pairs": step.pairs,
        "compute_ms": 1e3 * step.compute,
        "ring_ms": 1e3 * ring_seconds(step),
        "gather_ms": 1e3 * gather_seconds(step),
        "ring_sent_mib": ring_sent(step) / MIB,
        "gather_sent_mib": gather_sent(step) / MIB,
        "ring_messages": ring_messages(step),
        "gather_messages": GATHER_MESSAGES,
        "ring_mib": ring_held(step) / MIB,
        "gather_mib": held / MIB,
        "auto": "gather" if held <= DEFAULT_WORKSPACE else "ring",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results-dir", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="names the code where git is not there")
    options = parser.parse_args(arguments)

    words = sys.argv[1:] if arguments is None else arguments
    rows = [row_of(Step(ranks, pairs)) for ranks in WORLDS for pairs in SHARDS]
    result = Result(
        name="scaling",
        title="What a step over W ranks sends, holds and takes: a model",
        commands=[command_line("bench/scaling.py", words)],
        environment=environment("cpu", options.commit),
        settings={"dim": 768, "dtype": "bf16", "block_rows": BLOCK_ROWS},
        columns=COLUMNS,
        rows=rows,
    )
    result.write(options.results_dir)
    print(markdown_table(COLUMNS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
