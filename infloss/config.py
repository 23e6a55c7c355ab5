"""Process-wide settings: the workspace limit and the path a call takes.

Both are plain module state, read when a forward pass starts and handed on as arguments, so that a
backward pass on another thread uses what its forward used.
"""

from collections.abc import Iterator
from contextlib import contextmanager

MIB = 1 << 20
DEFAULT_WORKSPACE = 256 * MIB
MIN_WORKSPACE = MIB
AUTO = "auto"  # the fastest path on record that can take a call's features
PATHS = ("portable", "sm80", "sm90")

_workspace = DEFAULT_WORKSPACE
_path = AUTO


def get_workspace_limit() -> int:
    """Bytes that one call may use for tiles, beyond inputs, gradients and O(B) statistics."""
    return _workspace


def set_workspace_limit(limit: int) -> None:
    """Bound the tile workspace of later calls in this process.

    Args:
        limit: bytes, at least 1 MiB. A larger workspace means larger tiles. One tile of at most
            256 x 256, with its rows of gradient accumulators, is always held.

    Raises:
        TypeError: ``limit`` is not an int.
        ValueError: ``limit`` is below 1 MiB.
    """
    global _workspace
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"limit: expected an int (bytes), got {type(limit).__name__}")
    if limit < MIN_WORKSPACE:
        raise ValueError(f"limit: expected at least {MIN_WORKSPACE} bytes (1 MiB), got {limit}")
    _workspace = limit


@contextmanager
def workspace_limit(limit: int) -> Iterator[None]:
    """Bound the tile workspace of calls made inside the context.

    Args and errors as in :func:`set_workspace_limit`; the limit before is restored.
    """
    before = _workspace
    set_workspace_limit(limit)
    try:
        yield
    finally:
        set_workspace_limit(before)


@contextmanager
def use_path(path: str) -> Iterator[None]:
    """Force the named path for calls made inside the context (tests and benchmarks).

    Args:
        path: "portable" (torch ops, any device and dtype), "sm80" (CUDA kernels for compute
            capability 8.0 and later; float16, bfloat16, float32), "sm90" (those for 9.0; what they
            do not take is computed by the "sm80" kernels), or "auto" ("sm80" where it can take the
            features, else "portable"; "sm90" has to be asked for).

    Raises:
        ValueError: there is no such path; from a call inside, if the path cannot take its features.
    """
    global _path
    if path not in (AUTO, *PATHS):
        raise ValueError(f"path: expected one of {(AUTO, *PATHS)}, got {path!r}")
    before, _path = _path, path
    try:
        yield
    finally:
        _path = before


def requested_path() -> str:
    """The path that calls made now ask for: "auto" outside :func:`use_path`."""
    return _path
