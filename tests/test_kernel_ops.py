"""The raw ops of the compiled kernels: what they refuse, and sides without rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from infloss import config, kernels
from support import inverse_norms, normal
from support import name as dtype_id

MIB = 1 << 20
DTYPES = pytest.mark.parametrize("dtype", kernels.DTYPES, ids=dtype_id)
OPS = torch.ops.infloss


@DTYPES
@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_an_empty_side_is_what_the_portable_path_makes_of_it(
    m: int, n: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Raw ops only; the losses refuse it."""
    path = config.requested_path()
    x, y = (normal(size, 8, dtype=dtype).to(kernel_device) for size in (m, n))
    scale = torch.tensor(3.0, device=kernel_device)

    def run(path: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        common = (x, y, scale, None, None, None, 0, 1)
        stats = OPS.lse(*common, True, True, True, False, MIB, path, "highest")
        u, v = (torch.ones(size, device=kernel_device) for size in (m, n))
        sides = (stats[0], u, stats[1], v, u, None)
        return stats, OPS.grad(*common, *sides, True, True, True, False, MIB, path, "highest")

    for ours, expected in zip(run(path), run("portable"), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def lse_out_arguments(device: torch.device) -> dict[str, Any]:
    """A valid call of the compiled forward, which without a workspace only says what it needs."""
    x, y = (normal(6, 8, seed=seed, dtype=torch.bfloat16).to(device) for seed in (0, 1))
    stat = torch.empty(12, device=device)
    return {
        "x": x,
        "y": y,
        "logit_scale": torch.tensor(3.0, device=device),
        "x_inv_norm": inverse_norms(x),
        "y_inv_norm": inverse_norms(y),
        "target": None,
        "target_offset": 0,
        "target_stride": 1,
        "tf32": False,
        "limit": MIB,
        "row_stats": stat,
        "col_stats": stat.clone(),
        "positive": stat[:6].clone(),
        "row_hardest": None,
        "col_hardest": None,
        "path": config.requested_path(),
        "workspace": None,
    }


def grad_out_arguments(device: torch.device) -> dict[str, Any]:
    """A valid call of the compiled backward, which without a workspace only says what it needs."""
    forward = lse_out_arguments(device)
    names = ("x", "y", "logit_scale", "x_inv_norm", "y_inv_norm", "target", "target_offset")
    shared = {name: forward[name] for name in (*names, "target_stride", "tf32", "limit", "path")}
    weight = torch.ones(6, device=device)
    return {
        **shared,
        "row_stats": forward["row_stats"],
        "row_weight": weight,
        "col_stats": forward["col_stats"],
        "col_weight": weight.clone(),
        "target_weight": weight.clone(),
        "centre": None,
        "x_input": forward["x"],
        "y_input": forward["y"],
        "dx": torch.empty_like(forward["x"]),
        "dy": torch.empty_like(forward["y"]),
        "dscale": torch.empty((), device=device),
        "workspace": None,
    }


Bad = dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]]
BAD_ARGUMENTS: Bad = {
    "other dtype": ("y", lambda a: a["y"].half(), "y: expected the dtype of x"),
    "other feature size": ("y", lambda a: a["y"][:, :7], "y: expected 2 dimensions"),
    "features on the CPU": ("y", lambda a: a["y"].cpu(), "y: expected the device of x"),
    "column stride": ("y", lambda a: normal(8, 6).to(a["y"]).T, "y: expected column stride 1"),
    "unaligned rows": ("y", lambda a: normal(6, 9).to(a["y"])[:, :8], "y: .* 16-byte boundaries"),
    "unaligned start": ("y", lambda a: normal(6, 16).to(a["y"])[:, 1:9], "y: .* 16-byte"),
    "scale on the CPU": ("logit_scale", lambda a: torch.tensor(3.0), "logit_scale: .* device of x"),
    "half norms": ("x_inv_norm", lambda a: a["x_inv_norm"].half(), "x_inv_norm: .* ScalarType"),
    "norms of other rows": ("y_inv_norm", lambda a: a["y_inv_norm"][:5], "y_inv_norm: .* of 6"),
    "strided norms": ("x_inv_norm", lambda a: a["row_stats"][::2], "x_inv_norm: .* contiguous"),
    "int32 target": ("target", lambda a: torch.zeros(6).to(a["y"].device).int(), "target: "),
    "columns with targets": (
        "target",
        lambda a: torch.zeros(6, dtype=torch.int64, device=a["y"].device),
        "col_stats: expected none with an explicit target",
    ),
    "short statistics": ("row_stats", lambda a: a["row_stats"][:11], "row_stats: .* of 12"),
    "small workspace": (
        "workspace",
        lambda a: torch.empty(16, dtype=torch.uint8, device=a["y"].device),
        "workspace: expected .* bytes, got 16",
    ),
    "hardest without statistics": (
        "row_stats",
        lambda a: a.update(row_hardest=a["positive"].clone()),
        "row_hardest, col_hardest: expected only with their statistics",
    ),
    "no such path": ("path", lambda a: "sm70", "path: expected 'sm80' or 'sm90', got 'sm70'"),
}
BAD_GRAD_ARGUMENTS: Bad = {
    "weights without statistics": (
        "row_stats",
        lambda a: None,
        "row_weight, col_weight: expected exactly with their statistics",
    ),
    "input of other rows": ("x_input", lambda a: a["x"][:5], "x_input: expected the shape of"),
    "float64 inputs": (
        "x_input",
        lambda a: a.update(y_input=a["y"].double()) or a["x"].double(),
        "x_input: expected float16, bfloat16 or float32",
    ),
    "inputs of two dtypes": ("y_input", lambda a: a["y"].float(), "y_input: .* dtype of x_input"),
    "input on the CPU": ("y_input", lambda a: a["y"].cpu(), "y_input: expected the device of x"),
    "transposed input": (
        "x_input",
        lambda a: a["x"].T.contiguous().T,
        "x_input: expected column stride 1",
    ),
    "gradient of another dtype": ("dx", lambda a: a["dx"].float(), "dx: expected ScalarType"),
    "strided gradient": ("dy", lambda a: a["dy"].T.contiguous().T, "dy: expected a contiguous"),
    "unaligned gradient": (
        "dx",
        lambda a: a["dx"].new_empty(49)[1:].view(6, 8),
        "dx: expected 16-byte alignment",
    ),
    "unaligned workspace": (
        "workspace",
        lambda a: torch.empty(MIB, dtype=torch.uint8, device=a["x"].device)[16:],
        "workspace: expected 256-byte alignment",
    ),
    "short weights": ("target_weight", lambda a: a["target_weight"][:5], "target_weight: .* of 6"),
}


@pytest.mark.parametrize(("name", "bad", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_the_compiled_forward_refuses_what_it_cannot_read(
    name: str, bad: Callable[[dict[str, Any]], Any], message: str, kernel_device: torch.device
) -> None:
    """Whoever calls it; nothing is launched."""
    arguments = lse_out_arguments(kernel_device)
    assert OPS.lse_out(**arguments) > 16
    arguments[name] = bad(arguments)
    with pytest.raises(RuntimeError, match=message):
        OPS.lse_out(**arguments)


@pytest.mark.parametrize(
    ("name", "bad", "message"), BAD_GRAD_ARGUMENTS.values(), ids=BAD_GRAD_ARGUMENTS
)
def test_the_compiled_backward_refuses_what_it_cannot_read(
    name: str, bad: Callable[[dict[str, Any]], Any], message: str, kernel_device: torch.device
) -> None:
    arguments = grad_out_arguments(kernel_device)
    assert OPS.grad_out(**arguments) > 16
    arguments[name] = bad(arguments)
    with pytest.raises(RuntimeError, match=message):
        OPS.grad_out(**arguments)
