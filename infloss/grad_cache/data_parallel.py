"""DistributedDataParallel under a replay: one all-reduce, in the last turn of each module."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from infloss.grad_cache import live_graphs
from infloss.grad_cache.modules import submodules

Turn = tuple[int, int]  # a tower, and a call of its model


class DataParallel:
    """The DDP modules of a step: those in its towers, and one that it may run inside of."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = submodules(modules)
        self._modules = [one for one in found if isinstance(one, DistributedDataParallel)]
        # a graph is reduced, or not, by what its forward pass was under
        self._wanted = {one: one.require_backward_grad_sync for one in self._modules}
        self._last: dict[nn.Module, Turn] = {}
        self._around = _Around(found) if DistributedDataParallel._active_ddp_module else None

    @contextlib.contextmanager
    def watching(self, turn: Turn) -> Iterator[None]:
        """Note which modules a turn calls."""

        def note(module: nn.Module, _: object) -> None:
            self._last[module] = turn

        with contextlib.ExitStack() as stack:
            for one in self._modules:
                stack.callback(one.register_forward_pre_hook(note).remove)
            yield

    @contextlib.contextmanager
    def taking(self, turn: Turn) -> Iterator[None]:
        """Have each module reduce its gradients if this is its last turn, and only then."""
        with contextlib.ExitStack() as stack:
            for one in self._modules:
                before = one.require_backward_grad_sync
                stack.callback(setattr, one, "require_backward_grad_sync", before)
                one.require_backward_grad_sync = self._wanted[one] and self._last.get(one) == turn
                stack.enter_context(live_graphs.uncounted(one))
            yield

    def watch_graphs(self) -> None:
        """See to it that :meth:`refuse_other_graphs` knows of those made from now on."""
        for one in self._modules:
            live_graphs.watch(one)

    def refuse_other_graphs(self) -> None:
        """Raise RuntimeError where a module would miss gradients."""
        for one in self._modules:
            if self._wanted[one] and one in self._last:
                live_graphs.refuse_in_this_backward(one.module.named_parameters())
                live_graphs.refuse_any(one)

    def backward(self, outputs: list[Tensor], grads: list[Tensor], leaves: list[Tensor]) -> None:
        """Back-propagate one turn, into the ``.grad`` of ``leaves``, too."""
        if self._around is None:
            torch.autograd.backward(outputs, grads)
        else:
            self._around.backward(outputs, grads, leaves)

    def finish(self) -> None:
        """Hand over what no turn has."""
        if self._around is not None:
            self._around.finish()


class _Around:
    """Towers called inside the forward pass of a DDP module that holds them.

    Its reducer takes the first gradient of a parameter for the only one. So the turns' gradients
    are added up here, and each parameter gets their sum at the end.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        outer = DistributedDataParallel._active_ddp_module
        assert outer is not None
        if outer.find_unused_parameters and not outer.static_graph:
            raise RuntimeError(
                "cached_loss: expected find_unused_parameters=False of a DistributedDataParallel "
                "module that calls it in its forward pass, got True, which would take the towers' "
                "parameters for unused ones; wrap the towers instead"
            )
        parameters = [
            (name, parameter)
            for one in modules
            for name, parameter in one.named_parameters(recurse=False)
            if parameter.requires_grad
        ]
        self._names = {parameter: name for name, parameter in parameters}
        self._totals: dict[nn.Parameter, Tensor] = {}

    def backward(self, outputs: list[Tensor], grads: list[Tensor], leaves: list[Tensor]) -> None:
        parameters = list(self._names)
        found = torch.autograd.grad(outputs, [*parameters, *leaves], grads, allow_unused=True)
        for parameter, grad in zip(parameters, found, strict=False):
            if grad is not None:
                total = self._totals.get(parameter)
                self._totals[parameter] = grad if total is None else total + grad
        for leaf, grad in zip(leaves, found[len(parameters) :], strict=True):
            leaf.grad = grad

    def finish(self) -> None:
        live_graphs.refuse_in_this_backward(
            (self._names[parameter], parameter) for parameter in self._totals
        )
        torch.autograd.backward(list(self._totals), list(self._totals.values()))
