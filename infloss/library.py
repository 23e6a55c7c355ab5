"""Loads infloss._C, which registers the schemas and the compiled kernels."""

import functools
import re

import torch

try:
    from infloss import _C
except ImportError as error:
    raise ImportError(
        "infloss: the compiled library infloss._C cannot be loaded. After 'pip install .', start "
        "Python outside the source folder, whose own infloss/ has no library in it; or install "
        f"with 'pip install -e .'. Cause: {error}"
    ) from error

CUDA_ARCHS: tuple[str, ...] = tuple(_C.CUDA_ARCHS.split())
CUDA_VERSION: str | None = _C.CUDA_VERSION or None
TORCH_VERSION: str = _C.TORCH_VERSION


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for ``arch``, such as "8.0", "8.0+PTX" or "9.0a", runs on a device.

    Machine code runs on its own major version from its minor version on, PTX on everything later,
    code for an architecture's own features ("a") only on just that.
    """
    found = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch)
    if found is None:
        return False
    compiled = (int(found[1]), int(found[2]))
    if found[3] == "a":
        return capability == compiled
    return capability >= compiled and (bool(found[4]) or capability[0] == compiled[0])


@functools.cache
def _covered(archs: tuple[str, ...], capability: tuple[int, int]) -> bool:
    return any(runs_on(arch, capability) for arch in archs)


def has_code_of(arch: str) -> bool:
    """Whether the library was compiled for ``arch``, such as "9.0a"."""
    return any(compiled.removesuffix("+PTX") == arch for compiled in CUDA_ARCHS)


def has_code_for(device: torch.device) -> bool:
    """Whether any of the compiled architectures runs on a CUDA device."""
    return _covered(CUDA_ARCHS, torch.cuda.get_device_capability(device))


def check_code_for(device: torch.device) -> None:
    """Raise if :func:`has_code_for` is false.

    Raises:
        RuntimeError: naming the device's architecture and the library's.
    """
    if not has_code_for(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise RuntimeError(
            f"infloss: the library has code for compute capability {', '.join(CUDA_ARCHS)}, but "
            f"{device} is {major}.{minor}; build it with TORCH_CUDA_ARCH_LIST={major}.{minor}, or "
            "use infloss.use_path('portable')"
        )
