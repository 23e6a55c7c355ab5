"""The one timer of the tree, and the one way it measures peak memory.

A chip that is power-bound under long matrix work has two speeds, so each figure is two:

* *burst*: the median of a few runs right after 0.4 s of idling;
* *sustained*: the mean over a window of about 0.6 s of back-to-back runs.

Callables that are compared are timed in turns in one process (:func:`alternate`), so that clocks,
temperature and neighbours weigh on all of them alike. A GPU is timed by CUDA events on its current
stream, anything else by ``time.perf_counter``.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

Step = Callable[[], object]

IDLE_S = 0.4
BURST_RUNS = 5
WINDOW_S = 0.6
CUBLAS_SIZE = 8192
CUBLAS_FLOPS = 2 * CUBLAS_SIZE**3
MIB = 2**20

_SAMPLE_S = 1e-3
_RESET_SLACK_BYTES = 4 * MIB


@dataclass(frozen=True)
class Timing:
    """One callable's two speeds, in ms a call: medians over the rounds of an alternation."""

    burst_ms: float
    sustained_ms: float


@dataclass
class Alternation:
    """What :func:`alternate` saw: a timing for each callable that survived, else its exception."""

    timings: dict[str, Timing] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How long to time: rounds, runs in a burst, seconds in a sustained window, idle seconds.

    ``limit_s`` bounds the timed seconds of one callable over all rounds; a slow callable gets
    shorter bursts and windows, never fewer than one run of each a round, or is not timed at all.
    """

    rounds: int = 3
    burst_runs: int = BURST_RUNS
    window_s: float = WINDOW_S
    idle_s: float = IDLE_S
    limit_s: float = 60.0

    def least_s(self, call_ms: float) -> float:
        """Seconds that the shortest timing of a callable of ``call_ms`` takes."""
        return 2 * self.rounds * call_ms / 1e3

    def share_s(self) -> float:
        """Seconds that one burst, or one window, may take."""
        return self.limit_s / (2 * self.rounds)


class _Stopwatch:
    """Marks on the device's own clock; reading the laps between them waits for the last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._seconds: list[float] = []

    def mark(self) -> None:
        if self._device.type != "cuda":
            self._seconds.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def laps_ms(self) -> list[float]:
        if self._device.type != "cuda":
            return [(end - begin) * 1e3 for begin, end in pairwise(self._seconds)]
        self._events[-1].synchronize()
        return [begin.elapsed_time(end) for begin, end in pairwise(self._events)]


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on ``device``; nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_burst(
    fn: Step, device: torch.device, runs: int = BURST_RUNS, idle_s: float = IDLE_S
) -> float:
    """Median ms of ``runs`` calls of ``fn`` queued right after ``idle_s`` seconds of idling.

    ``fn`` must be warm (compiled, autotuned, loaded): the caller's affair, since only it knows how.
    """
    synchronize(device)
    time.sleep(idle_s)
    watch = _Stopwatch(device)
    watch.mark()
    for _ in range(runs):
        fn()
        watch.mark()
    return statistics.median(watch.laps_ms())


def time_sustained(
    fn: Step, device: torch.device, window_s: float = WINDOW_S, call_ms: float | None = None
) -> float:
    """Mean ms a call over about ``window_s`` seconds of back-to-back calls of a warm ``fn``.

    ``call_ms`` is a first guess that sizes the window; without it one call is timed. A call longer
    than the window is run once.
    """
    if call_ms is None:
        call_ms = time_burst(fn, device, runs=1, idle_s=0.0)
    calls = max(1, round(window_s * 1e3 / max(call_ms, 1e-3)))
    synchronize(device)
    watch = _Stopwatch(device)
    watch.mark()
    for _ in range(calls):
        fn()
    watch.mark()
    return watch.laps_ms()[0] / calls


def alternate(steps: Mapping[str, Step], device: torch.device, plan: Plan) -> Alternation:
    """Time warm callables in turns: in each round every burst, then every sustained window.

    Round r starts with the r-th callable, so that none always runs first, on the coolest chip. A
    callable that raises, or needs more than ``plan.limit_s``, leaves the rotation and is reported;
    the others go on.
    """
    result = Alternation()
    call_ms: dict[str, float] = {}
    bursts: dict[str, list[float]] = {name: [] for name in steps}
    windows: dict[str, list[float]] = {name: [] for name in steps}

    def guess(name: str) -> None:
        call_ms[name] = time_burst(steps[name], device, runs=1, idle_s=0.0)
        if plan.least_s(call_ms[name]) > plan.limit_s:
            raise TimeoutError(f"over the time limit ({call_ms[name] / 1e3:.1f} s a call)")

    def burst(name: str) -> None:
        fit = int(plan.share_s() * 1e3 / call_ms[name])
        runs = max(1, min(plan.burst_runs, fit))
        bursts[name].append(time_burst(steps[name], device, runs, plan.idle_s))

    def window(name: str) -> None:
        window_s = min(plan.window_s, plan.share_s())
        windows[name].append(time_sustained(steps[name], device, window_s, call_ms[name]))

    def each(action: Callable[[str], None], first: int) -> None:
        names = list(steps)
        first %= max(1, len(names))
        for name in names[first:] + names[:first]:
            if name in result.failures:
                continue
            try:
                action(name)
            except Exception as error:
                result.failures[name] = error.with_traceback(None)

    each(guess, 0)
    for index in range(plan.rounds):
        each(burst, index)
        each(window, index)
    for name in steps:
        if name not in result.failures:
            result.timings[name] = Timing(
                statistics.median(bursts[name]), statistics.median(windows[name])
            )
    return result


def cublas_step(device: torch.device) -> Step:
    """The yardstick of a GPU: a bf16 product of 8192 x 8192 random matrices by cuBLAS."""
    left, right, out = (
        torch.randn(CUBLAS_SIZE, CUBLAS_SIZE, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    return lambda: torch.mm(left, right, out=out)


def peak_memory_bytes(fn: Step, device: torch.device) -> int:
    """Most bytes that one call of ``fn`` held above what was held before it.

    CUDA: ``max_memory_allocated`` minus ``memory_allocated`` before, so it counts tensors of
    torch's allocator, results that ``fn`` returns included, and not what a library took from the
    driver.

    CPU (Linux): the peak of the resident set minus its size before. The kernel's high-water mark
    VmHWM is reset by writing 5 to /proc/self/clear_refs; where that is refused, a thread samples
    VmRSS every millisecond instead. The heap's free pages go back to the system first, yet a
    process that has already run something large may reuse memory that it kept: for an honest figure
    call this in a fresh process, after a small warm-up that loads libraries and starts threads.
    """
    gc.collect()
    if device.type != "cuda":
        return _peak_rss_above(fn)
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    held = fn()
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del held
    return peak - before


def process_peak_bytes() -> int:
    """Peak resident bytes of this whole process since it began, or since the mark was reset."""
    return _status_bytes("VmHWM")


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that a new allocation could take on ``device`` now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return _proc_bytes(Path("/proc/meminfo"), "MemAvailable")


def _peak_rss_above(fn: Step) -> int:
    _trim_heap()
    exact = _reset_high_water()
    before = _status_bytes("VmRSS")
    if exact:
        held = fn()
        peak = process_peak_bytes()
    else:
        held, peak = _sampled_peak(fn)
    del held
    return max(0, peak - before)


def _sampled_peak(fn: Step) -> tuple[object, int]:
    done = threading.Event()
    peak = _status_bytes("VmRSS")

    def sample() -> None:
        nonlocal peak
        while not done.wait(_SAMPLE_S):
            peak = max(peak, _status_bytes("VmRSS"))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        held = fn()
    finally:
        done.set()
        sampler.join()
    return held, max(peak, _status_bytes("VmRSS"))


def _reset_high_water() -> bool:
    """Set VmHWM down to VmRSS; False where the system refuses or ignores it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return process_peak_bytes() - _status_bytes("VmRSS") < _RESET_SLACK_BYTES
    except (OSError, KeyError):
        return False


def _trim_heap() -> None:
    """Give glibc's free heap pages back to the system; other allocators are left alone."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(key: str) -> int:
    return _proc_bytes(Path("/proc/self/status"), key)


def _proc_bytes(path: Path, key: str) -> int:
    """The value of a ``key:  N kB`` line, in bytes. Raises KeyError without such a line."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(f"{path} has no {key}")
