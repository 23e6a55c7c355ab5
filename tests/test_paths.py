"""Which path a call takes, on which device, and what is said where none can be taken.

Devices and builds are pretended: the questions are asked of torch and of the library's own list of
architectures.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infloss
from infloss import kernels, library, paths, portable
from support import LOSSES, Loss, matmul_precision, normal
from support import name as dtype_id

EACH_LOSS = pytest.mark.parametrize("loss", LOSSES)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ARCHS = ("8.0+PTX", "9.0a")
Pretend = Callable[..., None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Pretend a library of some architectures and CUDA devices of some capabilities."""

    def as_if(*capabilities: tuple[int, int], archs: tuple[str, ...] = ARCHS) -> None:
        def capability(device: torch.device) -> tuple[int, int]:
            return capabilities[device.index or 0]

        monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(library, "CUDA_ARCHS", archs)

    return as_if


@pytest.mark.parametrize(
    ("arch", "capability", "expected"),
    [
        ("8.0", (8, 0), True),
        ("8.0", (8, 6), True),
        ("8.0", (9, 0), False),
        ("8.0", (7, 5), False),
        ("8.6", (8, 0), False),
        ("8.6", (8, 9), True),
        ("12.0", (12, 1), True),
        ("12.0", (8, 0), False),
        ("8.0+PTX", (7, 5), False),
        ("8.0+PTX", (8, 0), True),
        ("8.0+PTX", (9, 0), True),
        ("8.0+PTX", (12, 0), True),
        ("8.6+PTX", (8, 0), False),
        ("9.0a", (9, 0), True),
        ("9.0a", (8, 9), False),
        ("9.0a", (10, 0), False),
        ("9.0a+PTX", (9, 0), True),
        ("9.0a+PTX", (10, 0), False),
        ("10.0f", (10, 3), True),
        ("10.0f", (12, 0), False),
        *((nonsense, (8, 0), False) for nonsense in ("", "8", "sm_80", "8.0PTX", "8.0b", " 8.0")),
    ],
)
def test_what_code_for_an_architecture_runs_on(
    arch: str, capability: tuple[int, int], expected: bool
) -> None:
    assert library.runs_on(arch, capability) is expected


def test_any_of_the_architectures_will_do(pretend: Pretend) -> None:
    pretend((9, 0), archs=("8.0", "9.0a"))
    assert library.has_code_for(CUDA)
    pretend((9, 0), archs=("8.0", "8.6"))
    assert not library.has_code_for(CUDA)
    pretend((9, 0), archs=())
    assert not library.has_code_for(CUDA)


@pytest.mark.parametrize("dtype", kernels.DTYPES, ids=dtype_id)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_no_reason_against_the_kernels(
    capability: tuple[int, int], dtype: torch.dtype, pretend: Pretend
) -> None:
    pretend(capability)
    assert kernels.why_not("sm80", dtype, CUDA) is None
    assert paths.resolve("auto", dtype, CUDA) == "sm80"
    assert paths.resolve("sm80", dtype, CUDA) == "sm80"


@pytest.mark.parametrize(
    ("capability", "archs", "reason"),
    [
        ((9, 0), ARCHS, None),
        ((9, 0), ("9.0a+PTX",), None),
        ((8, 9), ARCHS, "needs compute capability 9.0, got 8.9"),
        ((10, 0), ARCHS, "needs compute capability 9.0, got 10.0"),
        ((9, 0), ("8.0+PTX",), "needs a build with code for compute capability 9.0a"),
    ],
)
def test_hopper_kernels_are_for_hopper_alone(
    capability: tuple[int, int], archs: tuple[str, ...], reason: str | None, pretend: Pretend
) -> None:
    """Elsewhere "auto" takes the general kernels; who asks for the others hears why not."""
    pretend(capability, archs=archs)
    assert kernels.why_not("sm90", torch.bfloat16, CUDA) == reason
    if reason is None:
        assert paths.resolve("sm90", torch.bfloat16, CUDA) == "sm90"
        return
    assert paths.resolve("auto", torch.bfloat16, CUDA) == "sm80"
    with pytest.raises(ValueError, match=f"^path: 'sm90' {reason}$"):
        paths.resolve("sm90", torch.bfloat16, CUDA)


# name -> (dtype, device, capability, archs, the reason)
REASONS: dict[str, tuple[torch.dtype, torch.device, tuple[int, int], tuple[str, ...], str]] = {
    "CPU": (torch.float32, CPU, (9, 0), ARCHS, "needs CUDA features, got cpu"),
    "float64": (
        torch.float64,
        CUDA,
        (9, 0),
        ARCHS,
        "needs float16, bfloat16 or float32 features, got torch.float64",
    ),
    "no kernels": (
        torch.bfloat16,
        CUDA,
        (9, 0),
        (),
        "needs a build with CUDA kernels, which this one is not",
    ),
    "Turing": (
        torch.float16,
        CUDA,
        (7, 5),
        ARCHS,
        "needs compute capability 8.0 or later, got 7.5",
    ),
    "Turing, with code": (
        torch.float16,
        CUDA,
        (7, 5),
        ("7.5", "8.0"),
        "needs compute capability 8.0 or later, got 7.5",
    ),
}


@pytest.mark.parametrize(
    ("dtype", "device", "capability", "archs", "reason"), REASONS.values(), ids=REASONS
)
def test_what_no_kernel_can_take_goes_the_portable_way(
    dtype: torch.dtype,
    device: torch.device,
    capability: tuple[int, int],
    archs: tuple[str, ...],
    reason: str,
    pretend: Pretend,
) -> None:
    """Silently where nothing was asked for; where the kernels were, an error that says why."""
    pretend(capability, archs=archs)
    assert paths.resolve("auto", dtype, device) == "portable"
    assert paths.resolve("portable", dtype, device) == "portable"
    for path in kernels.PATHS:
        assert kernels.why_not(path, dtype, device) == reason
        with pytest.raises(ValueError, match=f"^path: '{path}' {reason}$"):
            paths.resolve(path, dtype, device)


@pytest.mark.parametrize("path", ["auto", "sm80"])
def test_a_device_that_was_not_compiled_for_is_an_error(path: str, pretend: Pretend) -> None:
    """Not a slow fallback: a wrong TORCH_CUDA_ARCH_LIST would go unnoticed."""
    pretend((8, 6), archs=("9.0a", "12.0"))
    with pytest.raises(RuntimeError) as raised:
        paths.resolve(path, torch.float32, CUDA)
    message = str(raised.value)
    for part in ("9.0a, 12.0", "cuda:0 is 8.6", "TORCH_CUDA_ARCH_LIST=8.6", "use_path('portable')"):
        assert part in message
    assert paths.resolve("portable", torch.float32, CUDA) == "portable"
    assert paths.resolve("auto", torch.float64, CUDA) == "portable"


@EACH_LOSS
@pytest.mark.parametrize("path", kernels.PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
def test_kernels_refuse_features_on_a_cpu(loss: Loss, dtype: torch.dtype, path: str) -> None:
    x = normal(6, 4, dtype=dtype)
    with (
        infloss.use_path(path),
        pytest.raises(ValueError, match=rf"^path: '{path}' needs CUDA features, got cpu$"),
    ):
        loss(x, x, 3.0)


@EACH_LOSS
def test_kernels_refuse_float64(loss: Loss, kernel_device: torch.device) -> None:
    x = normal(6, 4, dtype=torch.float64).to(kernel_device)
    with pytest.raises(ValueError, match=r"^path: 'sm.0' needs .*, got torch.float64$"):
        loss(x, x, 3.0)


def test_auto_lifts_a_path_asked_for_outside() -> None:
    x = normal(6, 4)
    with infloss.use_path("sm80"), infloss.use_path("auto"):
        assert infloss.contrastive_loss(x, x).isfinite()


def test_backward_takes_the_path_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for by then, or on autograd's own thread."""
    asked: list[str] = []

    def spy(path: str, dtype: torch.dtype, device: torch.device) -> str:
        asked.append(path)
        return "portable"

    monkeypatch.setattr(paths, "resolve", spy)
    x = normal(6, 4).requires_grad_()
    with infloss.use_path("sm80"):
        loss = infloss.contrastive_loss(x, x.detach())
    with infloss.use_path("portable"):
        loss.backward()
    assert asked == ["sm80", "sm80"]


def test_backward_takes_the_precision_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would recompute other similarities than those whose sums were saved."""
    asked: list[str] = []

    def spy(name: str) -> Callable[..., Any]:
        def call(x: torch.Tensor, *arguments: Any, path: str, precision: str) -> Any:
            asked.append(precision)
            return getattr(portable, name)(x, *arguments)

        return call

    for name in ("lse", "grad"):
        monkeypatch.setattr(kernels, name, spy(name))
    monkeypatch.setattr(paths, "resolve", lambda path, dtype, device: "sm80")
    x = normal(6, 4).requires_grad_()
    with matmul_precision("high"):
        loss = infloss.contrastive_loss(x, x.detach())
    with matmul_precision("highest"):
        loss.backward()
    assert asked == ["high", "high"]


@pytest.mark.parametrize(
    ("is_cuda", "capability", "archs", "expected"),
    [
        (True, (8, 0), ARCHS, True),
        (True, (7, 5), ARCHS, False),
        (True, (7, 5), ("7.5",), True),
        (True, (9, 0), (), False),
        (False, (9, 0), ARCHS, False),
    ],
)
def test_statistics_are_compiled_where_there_is_code(
    is_cuda: bool,
    capability: tuple[int, int],
    archs: tuple[str, ...],
    expected: bool,
    pretend: Pretend,
) -> None:
    """Of any dtype, and on devices too old for the tile kernels."""
    pretend(capability, archs=archs)
    x: Any = SimpleNamespace(is_cuda=is_cuda, device=CUDA if is_cuda else CPU)
    assert paths.has_compiled_statistics(x) is expected


def test_build_info_says_which_path_each_device_takes(pretend: Pretend) -> None:
    pretend((9, 0), (7, 5), (8, 6))
    expected = {"cpu": "portable", "cuda:0": "sm80", "cuda:1": "portable", "cuda:2": "sm80"}
    assert infloss.build_info()["device_paths"] == expected
    with infloss.use_path("portable"):
        assert set(infloss.build_info()["device_paths"].values()) == {"portable"}


def test_build_info_says_what_would_be_refused(pretend: Pretend) -> None:
    pretend((9, 0), (8, 6), archs=("9.0a",))
    expected = {"cpu": "portable", "cuda:0": "sm80", "cuda:1": "none"}
    assert infloss.build_info()["device_paths"] == expected
    with infloss.use_path("sm80"):
        forced = {"cpu": "none", "cuda:0": "sm80", "cuda:1": "none"}
        assert infloss.build_info()["device_paths"] == forced


def test_build_info_of_this_machine(cuda: torch.device) -> None:
    assert infloss.build_info()["device_paths"][str(cuda)] == "sm80"


@pytest.mark.parametrize("value", ["highest", "high", "medium"])
def test_float32_precision(value: str) -> None:
    with matmul_precision(value):
        assert kernels.float32_precision() == value


@pytest.mark.parametrize(("value", "expected"), [("tf32", "high"), ("ieee", "highest")])
def test_float32_precision_by_the_newer_setting(
    value: str, expected: str, matmul_setting: Any
) -> None:
    matmul_setting.fp32_precision = value
    assert kernels.float32_precision() == expected


@pytest.mark.parametrize(("value", "expected"), [("tf32", "high"), ("ieee", "highest")])
def test_float32_precision_where_torch_refuses_the_older_question(
    value: str, expected: str, matmul_setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As once both settings were used."""

    def refuse() -> str:
        raise RuntimeError("you have used mix of the legacy and new APIs")

    matmul_setting.fp32_precision = value
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_float32_matmul_precision", refuse)
        assert kernels.float32_precision() == expected
