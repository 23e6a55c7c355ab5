"""From the user's tensors to those of the ops, differentiably."""

import torch
from torch import Tensor

from infloss.portable import stats_dtype

# asked once: torch.compile cannot trace the question on every torch
AUTOCAST_DEVICES = frozenset(
    kind
    for kind in ("cpu", "cuda", "hpu", "mps", "mtia", "xpu")
    if torch.amp.is_autocast_available(kind)
)


def common_dtype(x: Tensor, y: Tensor) -> torch.dtype:
    """What both sides are promoted to; under autocast its dtype, as of torch.mm (float64 stays)."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    kind = x.device.type
    if dtype != torch.float64 and kind in AUTOCAST_DEVICES and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return dtype


def to_common_dtype(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides, promoted."""
    dtype = common_dtype(x, y)
    return x.to(dtype), y.to(dtype)


def scale_tensor(logit_scale: float | Tensor, x: Tensor) -> Tensor:
    """logit_scale as a [] tensor in the statistics' dtype on the features' device."""
    dtype = stats_dtype(x.dtype)
    if isinstance(logit_scale, Tensor):
        return logit_scale.reshape(()).to(device=x.device, dtype=dtype)
    return torch.full((), logit_scale, dtype=dtype, device=x.device)


def poison(losses: Tensor, target: Tensor | None, keys: int) -> Tensor:
    """Make value and gradient of a row NaN whose target is no key.

    On a CPU, outside a compiled graph, such a target has been refused before.
    """
    if target is None or (target.device.type == "cpu" and not torch.compiler.is_compiling()):
        return losses
    valid = (target >= 0) & (target < keys)
    # a factor, not a choice: it must reach the gradient too
    return losses * torch.where(valid, 1.0, torch.nan).to(losses.dtype)
