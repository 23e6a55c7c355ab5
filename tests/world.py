"""Processes that stand for the ranks of a world, on the CPU over gloo."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

START_METHOD = "forkserver"  # imports torch once, not once a rank
GROUP_TIMEOUT = 20.0  # seconds
PATIENCE = 90.0  # seconds that a job may take before its ranks are taken for lost


class RankError(Exception):
    """What a job raised on one rank."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(rank, kind, message, trace)  # all, to be unpickled
        self.rank, self.kind, self.message, self.trace = rank, kind, message, trace

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind}: {self.message}\n{self.trace}"


class World:
    """``size`` processes of one initialised world, which run jobs on any of its ranks."""

    def __init__(self, size: int, timeout: float = GROUP_TIMEOUT) -> None:
        context = multiprocessing.get_context(START_METHOD)
        context.set_forkserver_preload(["torch", "torch.distributed", "infloss"])
        self._store = tempfile.TemporaryDirectory()
        store = str(Path(self._store.name) / "store")
        self._pipes = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, store, timeout, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def outcomes(self, job: Callable[..., Any], ranks: Sequence[int], *args: Any) -> list[Any]:
        """``job(group, *args)`` on each of ``ranks``: what it returned or a :class:`RankError`.

        None stands for a rank that died of its job.
        """
        message = pickle.dumps((job, tuple(ranks), args))
        for pipe in self._pipes:  # a new group is made by the whole world
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(message)
        return [self._outcome(rank) for rank in ranks]

    def run(self, job: Callable[..., Any], ranks: Sequence[int] | int, *args: Any) -> list[Any]:
        """The same, where every rank (of the first ``ranks``, if a number) is to succeed."""
        outcomes = self.outcomes(job, range(ranks) if isinstance(ranks, int) else ranks, *args)
        for outcome in outcomes:
            if isinstance(outcome, RankError):
                raise outcome
        return outcomes

    def _outcome(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        if not pipe.poll(PATIENCE):
            raise TimeoutError(f"rank {rank} gave no answer in {PATIENCE:.0f} s")
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._store.cleanup()


def _serve(rank: int, size: int, store: str, timeout: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    groups: dict[tuple[int, ...], Any] = {tuple(range(size)): dist.group.WORLD}
    while True:
        try:
            job, members, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)  # other ranks may be gone: nothing to take leave of
        if members not in groups:
            groups[members] = dist.new_group(list(members))
        if rank in members:
            pipe.send_bytes(pickle.dumps(_outcome_of(rank, job, groups[members], args)))


def _outcome_of(rank: int, job: Callable[..., Any], group: Any, args: tuple[Any, ...]) -> Any:
    try:
        return job(group, *args)
    except Exception as error:
        return RankError(rank, type(error).__name__, str(error), traceback.format_exc())
