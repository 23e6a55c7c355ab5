"""Tile products of the portable path, with float32 results from half-precision operands.

On a GPU, half-precision operands go to the tensor cores as they are and come out in float32. An
accumulation-dtype factor (a tile of G) is split into two half-precision terms first, so that what
the tensor cores see of it keeps 16 bits (bfloat16) or more; rounding it to one term would leave an
error along the mean feature many times that of float32 arithmetic. Elsewhere operands are widened.
"""

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
# float16 spans 2^-24 .. 65504: a tile is scaled so that its largest entry lands near 2^14
HALF_TOP = 14.0
# below this a tile counts as zero; keeps the unit a normal float32
SPLIT_FLOOR = 1e-30


def _on_tensor_cores(operand: Tensor) -> bool:
    return operand.dtype in HALF and operand.device.type == "cuda"


def _wide(operand: Tensor) -> Tensor:
    return operand.float() if operand.dtype in HALF else operand


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two inputs of one dtype, in float32 (float64 for float64 operands)."""
    if _on_tensor_cores(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(_wide(a), _wide(b))


def accumulate(acc: Tensor, g: Tensor, b: Tensor) -> None:
    """acc += g @ b, with ``g`` in the accumulation dtype and ``b`` an input."""
    if not _on_tensor_cores(b):
        acc.addmm_(g, _wide(b))
        return
    high, low, unit = _split(g, b.dtype)
    part = torch.mm(high, b, out_dtype=torch.float32)
    part += torch.mm(low, b, out_dtype=torch.float32)
    acc.addcmul_(part, unit)


def _split(g: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(high, low, unit) with g = unit * (high + low) nearly; unit is a power of two."""
    top = g.abs().amax().clamp_min(SPLIT_FLOOR)
    unit = torch.exp2(torch.floor(torch.log2(top)) - HALF_TOP)
    scaled = g / unit
    high = scaled.to(dtype)
    low = scaled.sub_(high).to(dtype)
    return high, low, unit
