"""Memory grows with B, never with B * B."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import infloss
from infloss import config
from support import LOSSES, Loss, normal, peak_beyond

MIB = 1 << 20
EACH_LOSS = pytest.mark.parametrize("loss", LOSSES)

# Prints by how many bytes the peak of a fresh process rises during one training step.
PEAK_SCRIPT = """
import sys
from pathlib import Path
import torch
import infloss

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

def step(batch):
    x = torch.randn(batch, dim, dtype=dtype, requires_grad=True)
    y = torch.randn(batch, dim, dtype=dtype, requires_grad=True)
    infloss.contrastive_loss(x, y, torch.tensor(14.3, requires_grad=True)).backward()

batch, dim, dtype, limit = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
dtype = getattr(torch, dtype)
torch.set_num_threads(1)
infloss.set_workspace_limit(limit)
step(8)
Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
before = status("VmRSS")
step(batch)
print(status("VmHWM") - before)
"""


def peak_on_cpu(batch: int, dim: int, dtype: str = "float32", limit: int = 256 * MIB) -> int:
    """Bytes that a step adds to a process, features and gradients included."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads the peak from /proc")
    run = subprocess.run(
        [sys.executable, "-c", PEAK_SCRIPT, str(batch), str(dim), dtype, str(limit)],
        cwd=Path(__file__).parent,  # not where the uncompiled package lies
        capture_output=True,
        text=True,
        check=False,
    )
    if "clear_refs" in run.stderr:
        pytest.skip("this kernel does not let a process reset its peak")
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def saved_bytes(call: Callable[[], Tensor]) -> int:
    """Bytes of all tensors that autograd keeps for the backward of ``call``."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = call()
    assert loss.requires_grad
    return sum(saved.values())


@EACH_LOSS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd_keeps_inputs_and_vectors(
    loss: Loss, dtype: torch.dtype, device: torch.device
) -> None:
    """Features and at most eight float32 vectors, whatever the number of tiles (case 28)."""

    def kept(batch: int) -> int:
        x = normal(batch, 16, dtype=dtype).to(device).requires_grad_()
        y = normal(batch, 16, seed=1, dtype=dtype).to(device).requires_grad_()
        scale = torch.tensor(14.3, device=device, requires_grad=True)
        with infloss.workspace_limit(MIB):
            size = saved_bytes(lambda: loss(x, y, scale))
        return size - 2 * x.untyped_storage().nbytes()

    small, large = kept(500), kept(2000)
    assert large <= 2000 * 8 * 4
    assert large <= 4 * small


@pytest.mark.slow
def test_peak_on_a_cpu_is_far_below_the_matrix() -> None:
    """B = 32768: one float32 matrix would take 4 GiB, and dense torch keeps several (case 29)."""
    assert peak_on_cpu(32768, 16) < 150 * MIB


@pytest.mark.slow
def test_peak_on_a_cpu_is_linear_in_the_batch() -> None:
    """Doubling B adds features, gradients and vectors; the matrix would add 192 MiB."""
    assert peak_on_cpu(8192, 16) - peak_on_cpu(4096, 16) < 24 * MIB


def test_a_lower_workspace_limit_lowers_the_peak_on_a_cpu() -> None:
    """Panels of 4096 float32 columns fill the default workspace and have no room in 4 MiB."""
    large = peak_on_cpu(1024, 4096, "bfloat16")
    small = peak_on_cpu(1024, 4096, "bfloat16", 4 * MIB)
    assert small < large - 16 * MIB


def peak_on_cuda(batch: int, dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that a step needs beyond its features and their gradients."""
    x, y = (normal(batch, dim, seed=seed, dtype=dtype).to(device) for seed in (0, 1))
    return peak_beyond(x, y)


def accumulator_and_vectors(batch: int, dim: int) -> int:
    """One float32 gradient accumulator and 64 float32 values a row."""
    return 4 * batch * dim + 64 * 4 * batch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peak_on_a_gpu_is_bounded(dtype: torch.dtype, cuda: torch.device) -> None:
    """Workspace, accumulator and O(B) vectors; the matrix alone would take 4 GiB (case 29)."""
    batch, dim = 32768, 256
    peak_on_cuda(64, dim, dtype, cuda)  # the BLAS takes its own workspace on first use
    allowed = 256 * MIB + accumulator_and_vectors(batch, dim)
    assert peak_on_cuda(batch, dim, dtype, cuda) <= allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("limit", [16 * MIB, 32 * MIB, 256 * MIB])
def test_the_workspace_limit_is_honoured_on_a_gpu(
    limit: int, dtype: torch.dtype, cuda: torch.device
) -> None:
    batch, dim = 16384, 256
    peak_on_cuda(64, dim, dtype, cuda)
    with infloss.workspace_limit(limit):
        peak = peak_on_cuda(batch, dim, dtype, cuda)
    assert peak <= limit + accumulator_and_vectors(batch, dim)


def columns_of(base: Tensor, first: int, dim: int) -> Tensor:
    return base[: len(base) // 2, first : first + dim]


# views of [2 B, D + 64] whose rows start on 16-byte boundaries
READABLE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "packed": lambda base, dim: columns_of(base, 0, dim).contiguous(),
    "leading columns": lambda base, dim: columns_of(base, 0, dim),
    "trailing columns": lambda base, dim: columns_of(base, 64, dim),
    "every other row": lambda base, dim: base[::2, :dim],
    "one row expanded": lambda base, dim: base[:1, :dim].expand(len(base) // 2, dim),
}
HALF_AND_FLOAT = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@HALF_AND_FLOAT
@pytest.mark.parametrize("view", READABLE)
def test_kernels_read_aligned_rows_where_they_lie(
    view: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """Nothing of the size of an input is allocated, but for one accumulator of half precision."""
    batch, dim = 8192, 512
    base = torch.randn(2 * batch, dim + 64, device=kernel_device, dtype=dtype)
    x, y = READABLE[view](base, dim), READABLE[view](base, dim)
    vectors = accumulator_and_vectors(batch, 0)
    if view == "one row expanded" and config.requested_path() == "sm90":
        vectors += 2 * batch * dim * dtype.itemsize  # Hopper's copy engine reads no row twice
    accumulator = 0 if dtype == torch.float32 else 4 * batch * dim
    assert accumulator_and_vectors(batch, 0) < batch * dim * dtype.itemsize / 2
    with infloss.workspace_limit(MIB):
        peak_beyond(x, y)  # loads modules
        forward, both = peak_beyond(x, y, backward=False), peak_beyond(x, y)
    assert forward <= MIB + vectors
    assert both <= MIB + vectors + accumulator


@HALF_AND_FLOAT
def test_other_rows_are_copied_once(dtype: torch.dtype, kernel_device: torch.device) -> None:
    batch, dim = 8192, 512
    base = torch.randn(2 * batch, dim + 64, device=kernel_device, dtype=dtype)
    x, y = columns_of(base, 1, dim), columns_of(base, 3, dim)
    with infloss.workspace_limit(MIB):
        peak_beyond(x, y)
        forward = peak_beyond(x, y, backward=False)
    copies = 2 * batch * dim * dtype.itemsize
    assert copies <= forward <= copies + MIB + accumulator_and_vectors(batch, 0)


def test_an_oversized_request_is_an_out_of_memory_error(cuda: torch.device) -> None:
    """The type that trainers catch to lower their batch; afterwards everything still works.

    Transposed features of 64 MiB a side need a copy or a tile that no longer fits.
    """
    x = torch.randn(4096, 4096, device=cuda).T.requires_grad_()
    y = torch.randn(4096, 4096, device=cuda).T
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(cuda) / total, cuda)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            infloss.contrastive_loss(x, y)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    infloss.contrastive_loss(x, y).backward()
    assert torch.isfinite(x.grad).all()


def test_a_workspace_that_does_not_fit_is_an_out_of_memory_error(
    kernel_device: torch.device,
) -> None:
    """And a lower limit makes it fit: no copy and no accumulator is what was too large."""
    batch, dim = 16384, 64
    x, y = (
        torch.randn(batch, dim, device=kernel_device, dtype=torch.bfloat16).requires_grad_()
        for _ in "xy"
    )
    loss = infloss.contrastive_loss(x, y)
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved(kernel_device) + 96 * MIB  # a panel takes 128 MiB
    total = torch.cuda.get_device_properties(kernel_device).total_memory
    torch.cuda.set_per_process_memory_fraction(allowed / total, kernel_device)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        with infloss.workspace_limit(8 * MIB):
            infloss.contrastive_loss(x, y).backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, kernel_device)
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(y.grad).all()
