"""What this build of infloss is made of."""

from typing import Any

import torch

from infloss import config, library, paths
from infloss.version import __version__


def _nccl_version() -> str | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    if torch.version.cuda is None:
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _path_of(device: torch.device) -> str:
    """What half-precision and float32 features on a device take; float64 stays portable."""
    try:
        return paths.resolve(config.requested_path(), torch.float32, device)
    except (ValueError, RuntimeError):
        return "none"


def _device_paths() -> dict[str, str]:
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return {name: _path_of(torch.device(name)) for name in names}


def build_info() -> dict[str, Any]:
    """Versions, compiled architectures, and which path each device of this machine takes.

    Returns:
        ``infloss``, ``torch``, ``built_with_torch``, ``cuda`` (toolkit of the build, or None),
        ``cuda_archs`` (compute capabilities with code in the library), ``nccl`` (as loaded by
        torch, or None), ``paths`` (the paths in this build), ``device_paths`` (device to path, or
        to "none" where a call would be refused, for want of code or under ``use_path``).
    """
    return {
        "infloss": __version__,
        "torch": torch.__version__,
        "built_with_torch": library.TORCH_VERSION,
        "cuda": library.CUDA_VERSION,
        "cuda_archs": library.CUDA_ARCHS,
        "nccl": _nccl_version(),
        "paths": config.PATHS,
        "device_paths": _device_paths(),
    }
