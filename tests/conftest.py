"""Fixtures shared by all tests: the devices a test runs on, and what makes runs repeatable."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import infloss
from infloss import kernels
from support import matmul_precision

# The same examples in every run, and no deadline: a test never depends on the machine's speed. The
# device fixture holds no state that an example could leave behind.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("repeatable")

NO_CUDA = "needs a CUDA device, and torch.cuda.is_available() is False"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device kind that the suite covers."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(NO_CUDA)
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    """The current CUDA device; for tests of what only a GPU has."""
    if not torch.cuda.is_available():
        pytest.skip(NO_CUDA)
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=kernels.PATHS)
def kernel_device(request: pytest.FixtureRequest, cuda: torch.device) -> Iterator[torch.device]:
    """The current CUDA device, where every call takes one path's tile kernels and nothing else."""
    reason = kernels.why_not(request.param, torch.bfloat16, cuda)
    if reason is not None:
        pytest.skip(f"{request.param!r} {reason}")
    with infloss.use_path(request.param):
        yield cuda


@pytest.fixture
def matmul_setting() -> Iterator[Any]:
    """torch's newer settings of float32 products on CUDA, put back afterwards."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    with matmul_precision("highest"):
        yield setting
        setting.fp32_precision = before


@pytest.fixture
def fresh_dynamo() -> None:
    """No compiled graph or guard of another test."""
    torch._dynamo.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that asks for the ``cuda`` fixture as ``gpu``."""
    for item in items:
        if "cuda" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiles this small gain nothing from threads, which wait for each other on shared cores."""
    torch.set_num_threads(1)
