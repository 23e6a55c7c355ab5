"""Which implementation a call takes: behind ``infloss::lse`` and ``infloss::grad``, once a call.

"auto" is the fastest of ``kernels.AUTO_PATHS`` that can take the features, and the portable path
where none can.
"""

import torch
from torch import Tensor

from infloss import config, kernels, library


def resolve(path: str, dtype: torch.dtype, device: torch.device) -> str:
    """Name of the path that features of ``dtype`` on ``device`` take when ``path`` is asked for.

    Raises:
        ValueError: ``path`` cannot take them.
        RuntimeError: the library was not compiled for the device.
    """
    if path == "portable":
        return path
    if path == config.AUTO:
        return next(
            (name for name in kernels.AUTO_PATHS if kernels.why_not(name, dtype, device) is None),
            "portable",
        )
    reason = kernels.why_not(path, dtype, device)
    if reason is not None:
        raise ValueError(f"path: {path!r} {reason}")
    return path


def has_compiled_statistics(x: Tensor) -> bool:
    """Whether inv_norm and merge_stats have a compiled kernel for tensors like ``x``."""
    return x.is_cuda and library.has_code_for(x.device)
