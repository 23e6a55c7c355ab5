"""Tile products of the portable path, with float32 results from half-precision operands.

On a GPU, half-precision operands go to the tensor cores as they are and come out in float32. An
accumulation-dtype factor (a tile of G) is split into half-precision terms first, enough of them to
keep its float32 digits: its rows and columns sum to almost nothing, so that what a rounding leaves
out would appear along the mean feature many times over. Elsewhere operands are widened.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# half-precision dtypes, and how many terms of each hold a float32 value
TERMS = {torch.bfloat16: 3, torch.float16: 2}
# float16 spans 2^-24 .. 65504: a tile is scaled so that its largest entry lands near 2^14
HALF_TOP = 14.0
# below this a tile counts as zero; keeps the unit a normal float32
SPLIT_FLOOR = 1e-30


def _on_tensor_cores(operand: Tensor) -> bool:
    return operand.dtype in TERMS and operand.device.type == "cuda"


def _wide(operand: Tensor) -> Tensor:
    return operand.float() if operand.dtype in TERMS else operand


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two inputs of one dtype, in float32 (float64 for float64 operands)."""
    if _on_tensor_cores(a):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(_wide(a), _wide(b))


@dataclass(frozen=True)
class Factor:
    """A tile of G as the products take it: unit * sum(terms), or one wide term."""

    terms: tuple[Tensor, ...]
    unit: Tensor | None  # []; a power of two

    @property
    def T(self) -> "Factor":
        return Factor(tuple(term.T for term in self.terms), self.unit)


def factor(g: Tensor, operand: Tensor) -> Factor:
    """Prepare ``g`` for products with inputs like ``operand``; may consume ``g``."""
    if not _on_tensor_cores(operand):
        return Factor((g,), None)
    top = torch.linalg.vector_norm(g, torch.inf).clamp_min(SPLIT_FLOOR)
    unit = torch.exp2(torch.floor(torch.log2(top)) - HALF_TOP)
    rest, terms = g.div_(unit), []
    for _ in range(TERMS[operand.dtype]):
        terms.append(rest.to(operand.dtype))
        rest.sub_(terms[-1])
    return Factor(tuple(terms), unit)


def accumulate(acc: Tensor, g: Factor, b: Tensor) -> None:
    """acc += g @ b, with ``b`` an input."""
    if g.unit is None:
        acc.addmm_(g.terms[0], _wide(b))
        return
    part = torch.mm(g.terms[0], b, out_dtype=torch.float32)
    for term in g.terms[1:]:
        part += torch.mm(term, b, out_dtype=torch.float32)
    acc.addcmul_(part, g.unit)
