"""What a forward pass depends on besides its arguments: random numbers and autocast."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Autocast:
    """The autocast state of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> "Autocast":
        enabled = torch.is_autocast_enabled(device_type)
        return cls(device_type, enabled, torch.get_autocast_dtype(device_type))

    def again(self, cache: bool) -> Any:
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache)


@dataclass(frozen=True)
class Moment:
    """Generator states of some devices and the autocast state, at one point of a step."""

    states: dict[torch.device, Tensor]
    autocasts: tuple[Autocast, ...]
    autocast_cache: bool

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> "Moment":
        types = sorted({device.type for device in devices} | {CPU.type})
        autocasts = tuple(Autocast.now(one) for one in types)
        return cls(random_states(devices), autocasts, torch.is_autocast_cache_enabled())

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Go back to it for a while; the random numbers then go on where they were."""
        before = random_states(self.states)
        set_random_states(self.states)
        try:
            with contextlib.ExitStack() as stack:
                for one in self.autocasts:
                    stack.enter_context(one.again(self.autocast_cache))
                yield
        finally:
            set_random_states(before)


def random_states(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    """The states of the default generators of the CPU and of each device that has one."""
    states = {CPU: torch.get_rng_state()}
    for device in devices:
        module = _generators(device)
        if module is not None:
            states[device] = module.get_rng_state(device)
    return states


def set_random_states(states: dict[torch.device, Tensor]) -> None:
    """Put them back."""
    torch.set_rng_state(states[CPU])
    for device, state in states.items():
        if device != CPU:
            _generators(device).set_rng_state(state, device)


def _generators(device: torch.device) -> Any:
    """The module with a device's generator; None of the CPU, or of one without ("meta")."""
    if device.type in ("cpu", "meta"):
        return None
    return torch.get_device_module(device)
