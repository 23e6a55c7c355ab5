"""Warnings that point at the user's line."""

import sys
import warnings
from pathlib import Path

import torch

_LIBRARIES = tuple(str(Path(module).parent) for module in (__file__, str(torch.__file__)))


def warn(message: str) -> None:
    """A UserWarning at the innermost caller outside of this package and of torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
