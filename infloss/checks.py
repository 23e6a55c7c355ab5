"""Argument checks of the public functions; each error names argument, got and expected."""

import sys
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_SCALE = torch.finfo(torch.float32).max
REDUCTIONS = ("mean", "sum", "none")
STRATEGIES = ("auto", "ring", "gather")
GRAD_REDUCTIONS = ("mean", "sum")


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of the ``allowed`` strings."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {allowed}, got {value!r}")


def flag(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


def _is_dtensor(value: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def dense(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a plain dense tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if _is_dtensor(value):
        raise TypeError(
            f"{name}: expected a plain torch.Tensor, got a DTensor; "
            f"pass {name}.full_tensor(), or {name}.to_local() for this rank's rows"
        )
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else value.layout
        raise TypeError(f"{name}: expected a dense (strided) tensor, got a {kind} one")


def features(name: str, value: Any, *, shard: bool = False) -> None:
    """Raise unless ``value`` is a dense floating [B, D] tensor with D >= 1, and B >= 1.

    A ``shard`` of a larger batch may be empty.
    """
    dense(name, value)
    if value.dtype not in DTYPES:
        expected = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"{name}: expected one of {expected}, got {value.dtype}")
    if value.dim() != 2:
        raise ValueError(f"{name}: expected shape [B, D], got {list(value.shape)}")
    if value.size(0) == 0 and not shard:
        raise ValueError(f"{name}: expected at least one row, got shape {list(value.shape)}")
    if value.size(1) == 0:
        raise ValueError(f"{name}: expected at least one feature, got shape {list(value.shape)}")


def matching(names: tuple[str, str], x: Tensor, y: Tensor, *, same_rows: bool) -> None:
    """Raise ValueError unless both sides agree in device, feature size and (asked) rows."""
    if x.device != y.device:
        raise ValueError(f"{names[1]}: expected device {x.device} as {names[0]}, got {y.device}")
    if x.size(1) != y.size(1):
        raise ValueError(
            f"{names[1]}: expected {x.size(1)} features a row as {names[0]}, got {y.size(1)}"
        )
    if same_rows and x.size(0) != y.size(0):
        raise ValueError(f"{names[1]}: expected {x.size(0)} rows as {names[0]}, got {y.size(0)}")


def _target(value: Any, query: Tensor) -> None:
    """Raise unless ``value`` is None or [M] int64 on the queries' device."""
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"target: expected a torch.Tensor or None, got {type(value).__name__}")
    dense("target", value)
    if value.dtype != torch.int64:
        raise TypeError(f"target: expected torch.int64, got {value.dtype}")
    if value.shape != query.shape[:1]:
        raise ValueError(f"target: expected shape [{query.size(0)}], got {list(value.shape)}")
    if value.device != query.device:
        raise ValueError(f"target: expected device {query.device}, got {value.device}")


def target_range(target: Tensor | None) -> tuple[int, int] | None:
    """Smallest and largest target, looked at only where that stalls nothing.

    That is on a CPU, outside a compiled graph. None elsewhere, and of no target at all.
    """
    if target is None or target.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    return (int(target.min()), int(target.max())) if target.numel() else None


def target_within(target: Tensor | None, queries: int, keys: int) -> None:
    """Raise ValueError unless every query has its key."""
    if target is None:
        implicit_target(queries, keys)
    else:
        check_range(target_range(target), keys)


def implicit_target(queries: int, keys: int) -> None:
    """Raise ValueError unless the keys can be dealt to the queries evenly."""
    if keys % queries != 0:
        raise ValueError(
            f"target: expected an explicit target, or a number of keys that is a multiple of "
            f"the {queries} queries; got None with {keys} keys"
        )


def check_range(seen: tuple[int, int] | None, keys: int) -> None:
    """Raise ValueError unless the targets that were looked at lie in [0, keys)."""
    if seen is not None and (seen[0] < 0 or seen[1] >= keys):
        raise ValueError(f"target: expected values in [0, {keys}), got {seen[0]} .. {seen[1]}")


def number(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a Python number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a float, got {type(value).__name__}")


def logit_scale(value: Any, device: torch.device) -> None:
    """Raise unless ``value`` is a real number or a floating tensor of shape () or (1,)."""
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)):
            raise TypeError(
                f"logit_scale: expected a float or a floating tensor, got {type(value).__name__}"
            )
        if isinstance(value, (int, float)) and LARGEST_SCALE < abs(value) < float("inf"):
            raise ValueError(f"logit_scale: expected a number of float32's range, got {value}")
        return
    if _is_dtensor(value):
        raise TypeError(
            "logit_scale: expected a float or a plain tensor, got a DTensor; "
            "pass logit_scale.full_tensor()"
        )
    if not value.is_floating_point():
        raise TypeError(f"logit_scale: expected a floating dtype, got {value.dtype}")
    if value.shape not in ((), (1,)):
        raise ValueError(
            f"logit_scale: expected one value, shape () or (1,), got {list(value.shape)}"
        )
    if value.device != device and value.device.type != "cpu":
        raise ValueError(f"logit_scale: expected device {device} or cpu, got {value.device}")


def pairs(img: Any, txt: Any, scale: Any, *, shard: bool = False) -> None:
    """Raise unless these are what ``contrastive_loss`` takes."""
    features("img", img, shard=shard)
    features("txt", txt, shard=shard)
    matching(("img", "txt"), img, txt, same_rows=True)
    logit_scale(scale, img.device)


def queries(query: Any, key: Any, target: Any, scale: Any, *, shard: bool = False) -> None:
    """Raise unless these are what ``info_nce`` takes; targets' values are not looked at."""
    features("query", query, shard=shard)
    features("key", key, shard=shard)
    matching(("query", "key"), query, key, same_rows=False)
    _target(target, query)
    logit_scale(scale, query.device)
