"""Which implementation a call takes: behind ``infloss::lse`` and ``infloss::grad``, once a call.

"auto" is the compiled kernels where they can take the features, and the portable path elsewhere.
"""

from types import ModuleType

import torch
from torch import Tensor

from infloss import config, kernels, library, portable

_MODULES = {"portable": portable, "sm80": kernels}


def resolve(path: str, dtype: torch.dtype, device: torch.device) -> str:
    """Name of the path that features of ``dtype`` on ``device`` take when ``path`` is asked for.

    Raises:
        ValueError: ``path`` cannot take them.
        RuntimeError: the library was not compiled for the device.
    """
    if path == "portable":
        return path
    reason = kernels.why_not(dtype, device)
    if path == config.AUTO:
        return "sm80" if reason is None else "portable"
    if reason is not None:
        raise ValueError(f"path: {path!r} {reason}")
    return path


def implementation(path: str, x: Tensor) -> ModuleType:
    """The module with the ``lse`` and ``grad`` of that path."""
    return _MODULES[resolve(path, x.dtype, x.device)]


def has_compiled_statistics(x: Tensor) -> bool:
    """Whether inv_norm and merge_stats have a compiled kernel for tensors like ``x``."""
    return x.is_cuda and library.has_code_for(x.device)
