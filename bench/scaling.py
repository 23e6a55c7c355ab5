"""What a step over W ranks sends, holds and takes, by strategy: a model, not a measurement.

``python bench/scaling.py`` writes bench/results/scaling.json, which docs/scaling.md explains. Bytes
sent and messages are exact, and a test counts them; bytes held are counted by hand, and times
follow from the rates below.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infloss.config import DEFAULT_WORKSPACE
from infloss.distributed.ring import BLOCK_ROWS
from infloss.distributed.strategy import gathered_bytes
from record import RESULTS, Column, Result, command_line, environment, markdown_table

# assumed; latency and NVLink as NCCL's send and receive had them between two H200
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
    node: int = NODE

    @property
    def batch(self) -> int:
        return self.ranks * self.pairs

    @property
    def inner(self) -> int:
        """Ranks of a node: of the inner ring."""
        return min(self.ranks, self.node)

    @property
    def nodes(self) -> int:
        """Ranks of the outer ring; one is no ring."""
        return self.ranks // self.inner

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
    """What a ring sends of a shard in a pass."""

    ahead: int  # bytes that travel before the work: W - 1 hops
    behind: int  # bytes that follow it and come home: every hop
    work: float  # share of the step's compute


def ring_passes(step: Step) -> tuple[Pass, Pass]:
    """The forward and the backward pass."""
    return (
        Pass(step.features, STATS * step.pairs, 1 / 4),
        Pass(step.features + WEIGHTED_STATS * step.pairs, step.gradient, 3 / 4),
    )


def ring_sent(step: Step) -> int:
    """Bytes that a rank sends."""
    ahead, behind = step.ranks - 1, hops_behind(step)
    return sum(one.ahead * ahead + one.behind * behind for one in ring_passes(step))


def hops_behind(step: Step) -> int:
    """What was made of a block comes home from each inner ring and, over nodes, from the outer."""
    return step.ranks + (step.nodes if step.nodes > 1 else 0)


def ring_messages(step: Step) -> int:
    """Exchanges with the neighbours that a rank posts; tensors that leave together are one."""
    return 2 * (step.ranks - 1 + hops_behind(step)) * step.blocks


def gather_sent(step: Step) -> int:
    """Bytes that a rank sends: an all-gather and an all-to-all, an all-gather, a reduce-scatter."""
    others = step.ranks - 1
    columns = (STATS + WEIGHTED_STATS) * step.pairs
    return others * (step.features + columns + step.gradient)


GATHER_MESSAGES = 4  # collectives


def ring_held(step: Step) -> int:
    """Bytes a rank holds above its shard, gradients, accumulator and workspace.

    A sub-block's part of the shard's own gradient; and sub-blocks: of the features the one that is
    worked on and the next, of the gradient what is being made, what leaves and what comes in, and
    two of the sub-block before, on its last way home.
    """
    gradients = 3 if step.blocks == 1 else 5
    return step.gradient + (2 * step.features + gradients * step.gradient) // step.blocks


def gather_held(step: Step) -> int:
    """The same: all features of a side and the accumulator of all their gradients."""
    return gathered_bytes(step.batch, step.dim, torch.bfloat16)


def ring_seconds(step: Step) -> float:
    """Hops hide behind the products of their sub-block or the other way round; the last hides not.

    Over several nodes rings are nested: a block goes round its node between two hops outside, and
    comes home there each time.
    """
    total = 0.0
    for one in ring_passes(step):
        moved, home = ((one.ahead + one.behind) / step.blocks, one.behind / step.blocks)
        work = one.work * step.compute / (step.ranks * step.blocks)
        node = step.inner * max(work, LATENCY + moved / NVLINK)
        if step.nodes == 1:
            total += step.blocks * node + LATENCY + home / NVLINK
        else:
            node += LATENCY + home / NVLINK
            outside = LATENCY + moved / NETWORK
            total += step.blocks * step.nodes * max(node, outside) + LATENCY + home / NETWORK
    return total


def gather_seconds(step: Step) -> float:
    """Collectives before and after the products, log2(W) messages deep; a NIC for every GPU."""
    sent = gather_sent(step)
    outside = sent * (step.ranks - step.inner) / (step.ranks - 1) / step.inner
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
