"""Wrong input is refused by name before anything runs; bad values are never hidden."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import infloss
from infloss import config
from support import LOSSES, Loss, normal, one_way, symmetric

X = normal(6, 4)
Y = normal(6, 4, seed=1)
EACH_LOSS_AND_NAMES = pytest.mark.parametrize(
    ("loss", "names"), [(symmetric, ("img", "txt")), (one_way, ("query", "key"))]
)


class Recorder(TorchDispatchMode):
    """Names of all ops that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def assert_refused(
    call: Callable[[], object], error: type[Exception], message: str, *, looks: bool = False
) -> None:
    """``call`` raises ``error`` with exactly ``message`` (a regex), and no op ran.

    ``looks``: the check itself reads values, so only the package's own ops are forbidden.
    """
    with Recorder() as recorder, pytest.raises(error, match=f"^{message}$"):
        call()
    ran = [name for name in recorder.names if not looks or name.startswith("infloss::")]
    assert not ran


BAD_FEATURES = [
    ("list", [[1.0]], TypeError, "expected a torch.Tensor, got list"),
    ("None", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("int", torch.ones(6, 4, dtype=torch.int32), TypeError, r"expected one of .*got torch.int32"),
    ("bool", torch.ones(6, 4, dtype=torch.bool), TypeError, r"expected one of .*got torch.bool"),
    (
        "complex",
        torch.ones(6, 4, dtype=torch.complex64),
        TypeError,
        r"expected one of torch.float16, torch.bfloat16, torch.float32, torch.float64, "
        r"got torch.complex64",
    ),
    ("sparse", X.to_sparse(), TypeError, r"expected a dense \(strided\) tensor, got a .*sparse.*"),
    ("1-d", X[0], ValueError, r"expected shape \[B, D\], got \[4\]"),
    ("3-d", X[None], ValueError, r"expected shape \[B, D\], got \[1, 6, 4\]"),
    ("no rows", X[:0], ValueError, r"expected at least one row, got shape \[0, 4\]"),
    ("no columns", X[:, :0], ValueError, r"expected at least one feature, got shape \[6, 0\]"),
]
if hasattr(torch, "float8_e4m3fn"):
    float8 = torch.zeros(6, 4, dtype=torch.float8_e4m3fn)
    BAD_FEATURES.append(("float8", float8, TypeError, "expected one of .*float8_e4m3fn"))


@pytest.mark.parametrize(
    ("bad", "error", "message"), [row[1:] for row in BAD_FEATURES], ids=[r[0] for r in BAD_FEATURES]
)
@pytest.mark.parametrize("side", [0, 1])
@EACH_LOSS_AND_NAMES
def test_features(
    loss: Loss, names: tuple[str, str], side: int, bad: Any, error: type[Exception], message: str
) -> None:
    arguments: list[Any] = [X, Y]
    arguments[side] = bad
    assert_refused(lambda: loss(*arguments, 1.0), error, f"{names[side]}: {message}")


def test_nested_features() -> None:
    nested = torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"^img: expected a dense \(strided\) tensor, got a nested"):
        infloss.contrastive_loss(nested, Y)


def test_meta_features_give_a_meta_loss() -> None:
    """A meta tensor is a shape to propagate, as in torch's own functions."""
    loss = infloss.contrastive_loss(X.to("meta"), Y.to("meta"))
    assert loss.device.type == "meta"
    assert loss.shape == ()
    assert loss.dtype == torch.float32


@EACH_LOSS_AND_NAMES
def test_sides_on_two_devices(loss: Loss, names: tuple[str, str]) -> None:
    y = Y.to("meta")
    message = f"{names[1]}: expected device cpu as {names[0]}, got meta"
    assert_refused(lambda: loss(X, y, 1.0), ValueError, message)


@EACH_LOSS_AND_NAMES
def test_sides_of_two_feature_sizes(loss: Loss, names: tuple[str, str]) -> None:
    y = Y[:, :3]
    message = f"{names[1]}: expected 4 features a row as {names[0]}, got 3"
    assert_refused(lambda: loss(X, y, 1.0), ValueError, message)


def test_unpaired_rows() -> None:
    y = Y[:5]
    message = "txt: expected 6 rows as img, got 5"
    assert_refused(lambda: infloss.contrastive_loss(X, y), ValueError, message)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ("14", TypeError, "expected a float or a floating tensor, got str"),
        (None, TypeError, "expected a float or a floating tensor, got NoneType"),
        (True, TypeError, "expected a float or a floating tensor, got bool"),
        (1j, TypeError, "expected a float or a floating tensor, got complex"),
        (torch.tensor(3), TypeError, "expected a floating dtype, got torch.int64"),
        (torch.tensor(True), TypeError, "expected a floating dtype, got torch.bool"),
        (torch.ones(2), ValueError, r"expected one value, shape \(\) or \(1,\), got \[2\]"),
        (torch.ones(1, 1), ValueError, r"expected one value, shape \(\) or \(1,\), got \[1, 1\]"),
        (torch.ones((), device="meta"), ValueError, "expected device cpu or cpu, got meta"),
    ],
)
@pytest.mark.parametrize("loss", LOSSES)
def test_logit_scale(loss: Loss, bad: Any, error: type[Exception], message: str) -> None:
    assert_refused(lambda: loss(X, Y, bad), error, f"logit_scale: {message}")


@pytest.mark.parametrize("scale", [3, 3.0, torch.tensor(3.0), torch.tensor([3.0])])
@pytest.mark.parametrize("loss", LOSSES)
def test_forms_of_logit_scale(loss: Loss, scale: Any, device: torch.device) -> None:
    """An int, a float, and tensors of shape () and (1,), also on the CPU, mean the same."""
    x, y = X.to(device), Y.to(device)
    assert torch.equal(loss(x, y, scale), loss(x, y, torch.tensor(3.0, device=device)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradient_of_logit_scale_has_its_shape_and_dtype(
    dtype: torch.dtype, device: torch.device
) -> None:
    scale = torch.full((1,), 3.0, dtype=dtype, requires_grad=True)  # on the CPU for every device
    infloss.contrastive_loss(X.to(device), Y.to(device), scale).backward()
    assert scale.grad.shape == (1,)
    assert scale.grad.dtype == dtype
    assert scale.grad.device.type == "cpu"
    assert scale.grad.abs() > 0


@pytest.mark.parametrize("option", ["normalize", "return_stats"])
@pytest.mark.parametrize("bad", [1, None, "yes", torch.tensor(True)])
@pytest.mark.parametrize("loss", LOSSES)
def test_flags(loss: Callable[..., Tensor], option: str, bad: Any) -> None:
    message = f"{option}: expected a bool, got {type(bad).__name__}"
    assert_refused(lambda: loss(X, Y, 1.0, **{option: bad}), TypeError, message)


@pytest.mark.parametrize("option", ["reduction", "strategy", "grad_reduction"])
@pytest.mark.parametrize("bad", ["average", "", "Mean", None, 0])
@pytest.mark.parametrize("loss", LOSSES)
def test_unknown_choices(loss: Callable[..., Tensor], option: str, bad: Any) -> None:
    message = rf"{option}: expected one of \('.*'\), got {re.escape(repr(bad))}"
    assert_refused(lambda: loss(X, Y, 1.0, **{option: bad}), ValueError, message)


@pytest.mark.parametrize("bad", [[], {}, torch.ones(2)], ids=["list", "dict", "tensor"])
@pytest.mark.parametrize("option", ["reduction", "strategy", "grad_reduction"])
def test_choices_of_another_type(option: str, bad: Any) -> None:
    """Also where comparing with a string is no plain bool."""
    with pytest.raises((TypeError, ValueError), match=f"^{option}: expected one of"):
        infloss.contrastive_loss(X, Y, **{option: bad})


@pytest.mark.parametrize("loss", LOSSES)
def test_group(loss: Callable[..., Tensor]) -> None:
    assert_refused(
        lambda: loss(X, Y, 1.0, group="world"),
        ValueError,
        "group: expected None where torch.distributed is not initialised, got 'world'",
    )


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([0] * 6, TypeError, "expected a torch.Tensor or None, got list"),
        (torch.zeros(6), TypeError, "expected torch.int64, got torch.float32"),
        (torch.zeros(6, dtype=torch.int32), TypeError, "expected torch.int64, got torch.int32"),
        (torch.arange(5), ValueError, r"expected shape \[6\], got \[5\]"),
        (torch.arange(6)[None], ValueError, r"expected shape \[6\], got \[1, 6\]"),
        (torch.arange(6, device="meta"), ValueError, "expected device cpu, got meta"),
    ],
)
def test_target(bad: Any, error: type[Exception], message: str) -> None:
    assert_refused(lambda: infloss.info_nce(X, Y, bad), error, f"target: {message}")


@pytest.mark.parametrize("bad", [-1, -100, 6, 2**40])
def test_target_out_of_range_on_a_cpu(bad: int) -> None:
    target = torch.arange(6)
    target[3] = bad
    message = rf"target: expected values in \[0, 6\), got {min(bad, 0)} .. {max(bad, 5)}"
    assert_refused(lambda: infloss.info_nce(X, Y, target), ValueError, message, looks=True)


@pytest.mark.parametrize("keys", [7, 5, 1])
def test_default_target_needs_a_multiple_of_the_queries(keys: int) -> None:
    y = normal(keys, 4)
    message = rf"target: expected an explicit target, .* got None with {keys} keys"
    assert_refused(lambda: infloss.info_nce(X, y), ValueError, message)


@pytest.mark.parametrize("bad", [-1, -100, 6, 2**40])
def test_target_out_of_range_on_a_gpu(bad: int, cuda: torch.device) -> None:
    """Looking at the values would stall the device: the loss and the gradients become NaN."""
    x, y = X.to(cuda).requires_grad_(), Y.to(cuda).requires_grad_()
    target = torch.arange(6)
    target[3] = bad
    losses = infloss.info_nce(x, y, target.to(cuda), reduction="none")
    assert losses.isnan().tolist() == [False, False, False, True, False, False]
    loss = infloss.info_nce(x, y, target.to(cuda))
    loss.backward()
    assert loss.isnan()
    assert x.grad[3].isnan().all()
    assert y.grad.isnan().any()


@pytest.fixture
def two_ranks() -> Iterator[Any]:
    """A device mesh over a pretended world of two, for DTensors in one process."""
    if not torch.distributed.is_available():
        pytest.skip("needs torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield torch.distributed.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_dtensor_features_are_refused_with_a_hint(two_ranks: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    sharded = DTensor.from_local(X, two_ranks, [Shard(0)])
    hint = r"got a DTensor; pass {0}.full_tensor\(\), or {0}.to_local\(\) for this rank's rows"
    for loss, names in ((symmetric, ("img", "txt")), (one_way, ("query", "key"))):
        message = f"{names[0]}: expected a plain torch.Tensor, {hint.format(names[0])}"
        assert_refused(lambda loss=loss: loss(sharded, Y, 1.0), TypeError, message)
        message = f"{names[1]}: expected a plain torch.Tensor, {hint.format(names[1])}"
        assert_refused(lambda loss=loss: loss(X, sharded, 1.0), TypeError, message)


def test_a_dtensor_logit_scale_is_refused_with_a_hint(two_ranks: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    scale = DTensor.from_local(torch.tensor(3.0), two_ranks, [Replicate()])
    message = r"logit_scale: .* got a DTensor; pass logit_scale.full_tensor\(\)"
    assert_refused(lambda: infloss.contrastive_loss(X, Y, scale), TypeError, message)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_features_that_are_not_finite_reach_the_loss(
    loss: Callable[..., Tensor], normalize: bool, side: int, value: float, device: torch.device
) -> None:
    sides = [X.to(device), Y.to(device)]
    sides[side] = sides[side].clone()
    sides[side][2, 1] = value
    result = loss(*sides, 1.0, normalize=normalize, reduction="none")
    assert not torch.isfinite(result[2])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_scale_that_is_not_finite_reaches_the_loss(
    loss: Loss, as_tensor: bool, value: float, device: torch.device
) -> None:
    scale = torch.tensor(value, device=device) if as_tensor else value
    assert not torch.isfinite(loss(X.to(device), Y.to(device), scale))


def test_a_nan_row_poisons_only_what_it_meets(device: torch.device) -> None:
    """One query's NaN stays out of the other queries' losses."""
    x = X.to(device).clone()
    x[2] = torch.nan
    losses = infloss.info_nce(x, Y.to(device), reduction="none")
    assert losses.isnan().tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (1.5e6, TypeError, r"limit: expected an int \(bytes\), got float"),
        (True, TypeError, r"limit: expected an int \(bytes\), got bool"),
        ("1MiB", TypeError, r"limit: expected an int \(bytes\), got str"),
        (0, ValueError, r"limit: expected at least 1048576 bytes \(1 MiB\), got 0"),
        ((1 << 20) - 1, ValueError, "limit: expected at least .*got 1048575"),
        (-1, ValueError, "limit: expected at least .*got -1"),
    ],
)
def test_workspace_limit_errors(bad: Any, error: type[Exception], message: str) -> None:
    before = config.get_workspace_limit()
    with pytest.raises(error, match=f"^{message}$"):
        infloss.set_workspace_limit(bad)
    with pytest.raises(error, match=f"^{message}$"), infloss.workspace_limit(bad):
        pass
    assert config.get_workspace_limit() == before


def test_workspace_limit_is_restored() -> None:
    before = config.get_workspace_limit()
    with infloss.workspace_limit(2 << 20):
        with suppress(ZeroDivisionError), infloss.workspace_limit(3 << 20):
            assert config.get_workspace_limit() == 3 << 20
            raise ZeroDivisionError
        assert config.get_workspace_limit() == 2 << 20
    assert config.get_workspace_limit() == before


def test_backward_uses_the_workspace_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit set between the two, or on another thread, changes nothing."""
    from infloss import portable

    seen: list[int] = []
    tile_shape = portable.tile_shape

    def spy(dim: int, itemsize: int, workspace: int, on_cpu: bool) -> tuple[int, int]:
        seen.append(workspace)
        return tile_shape(dim, itemsize, workspace, on_cpu)

    monkeypatch.setattr(portable, "tile_shape", spy)
    with infloss.use_path("portable"), infloss.workspace_limit(5 << 20):
        loss = infloss.contrastive_loss(X.clone().requires_grad_(), Y)
    loss.backward()
    assert seen == [5 << 20, 5 << 20]


@pytest.mark.parametrize("bad", ["sm70", "", None, "Portable"])
def test_unknown_path(bad: Any) -> None:
    before = config.requested_path()
    message = "^path: expected one of .*portable.*, got"
    with pytest.raises(ValueError, match=message), infloss.use_path(bad):
        pass
    assert config.requested_path() == before


def test_path_is_restored() -> None:
    before = config.requested_path()
    with suppress(ZeroDivisionError), infloss.use_path("portable"):
        assert config.requested_path() == "portable"
        raise ZeroDivisionError
    assert config.requested_path() == before
