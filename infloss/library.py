"""Loads infloss._C, which registers the schemas and the compiled kernels."""

import torch  # noqa: F401  (its libraries must be loaded first)

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
