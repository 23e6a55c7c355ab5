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
        self._called: dict[Turn, set[nn.Module]] = {}
        outer = _wrapper_around()
        self._names = {
            parameter: name
            # of a wrapper around, all: a tower may hide what it calls
            for one in [*found, *submodules([outer] if outer is not None else [])]
            for name, parameter in one.named_parameters(recurse=False)
            if parameter.requires_grad
        }
        self._quiet = False  # whether the turn's gradients are to pass no hook
        self._reducing: list[DistributedDataParallel] = []  # in this turn
        self._inside = outer is not None
        self._totals: dict[nn.Parameter, Tensor] = {}

    def broadcast_buffers(self) -> None:
        """Do it before the first pass, or its first chunk would see others than the second's."""
        for one in self._modules:
            if one.will_sync_module_buffers():
                one._sync_buffers()
                one.require_forward_param_sync = False

    @contextlib.contextmanager
    def watching(self, turn: Turn) -> Iterator[None]:
        """Note which modules a turn calls."""
        called = self._called[turn] = set()

        def note(module: nn.Module, _: object) -> None:
            called.add(module)
            self._last[module] = turn

        with contextlib.ExitStack() as stack:
            for one in self._modules:
                stack.callback(one.register_forward_pre_hook(note).remove)
            yield

    @contextlib.contextmanager
    def taking(self, turn: Turn) -> Iterator[None]:
        """Have each module reduce its gradients if this is its last turn, and only then."""
        with contextlib.ExitStack() as stack:
            self._quiet, self._reducing = False, []
            for one in self._modules:
                reduces = self._wanted[one] and self._last.get(one) == turn
                stack.enter_context(_set(one, "require_backward_grad_sync", reduces))
                stack.enter_context(live_graphs.uncounted(one))
                if reduces and (one.static_graph or not one.find_unused_parameters):
                    self._reducing.append(one)
                if one.static_graph and not reduces:
                    # its first step counts the gradients of each parameter; of all turns, too
                    stack.enter_context(_set(one, "_static_graph_delay_allreduce_enqueued", True))
                    self._quiet |= one in self._called.get(turn, ())
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
        if not (self._inside or self._quiet):
            others, zeros = self._reached_before()
            torch.autograd.backward([*outputs, *others], [*grads, *zeros])
            return
        parameters = list(self._names)
        found = torch.autograd.grad(outputs, [*parameters, *leaves], grads, allow_unused=True)
        for leaf, grad in zip(leaves, found[len(parameters) :], strict=True):
            leaf.grad = grad
        for parameter, grad in zip(parameters, found, strict=False):
            if grad is not None:
                self._add(parameter, grad)

    def _reached_before(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Parameters with a gradient from earlier turns, which this one may not reach, and zeros.

        A module that does not look for unused parameters waits for all of them in the turn that
        reduces. None of those that do: they take what this turn does not reach as it is.
        """
        parameters = [
            parameter
            for module in self._reducing
            for parameter in module.module.parameters()
            if parameter.requires_grad and parameter.grad is not None
        ]
        return parameters, [one.new_zeros(()).expand_as(one) for one in parameters]

    def _add(self, parameter: nn.Parameter, grad: Tensor) -> None:
        total = self._totals.get(parameter) if self._inside else parameter.grad
        total = grad.clone() if total is None else total + grad
        if self._inside:
            self._totals[parameter] = total
        else:
            parameter.grad = total

    def finish(self) -> None:
        """Give each parameter of a module around all this its one gradient."""
        totals, self._totals = self._totals, {}
        live_graphs.refuse_in_this_backward((self._names[one], one) for one in totals)
        if totals:
            torch.autograd.backward(list(totals), list(totals.values()))


def _wrapper_around() -> DistributedDataParallel | None:
    """The DDP module in whose forward pass this runs with gradients, if any.

    Its reducer takes the first gradient of a parameter for the only one.
    """
    outer = DistributedDataParallel._active_ddp_module
    if outer is None or not torch.is_grad_enabled():
        return None
    if outer.find_unused_parameters and not outer.static_graph:
        raise RuntimeError(
            "cached_loss: expected find_unused_parameters=False of a DistributedDataParallel "
            "module that calls it in its forward pass, got True, which would take the towers' "
            "parameters for unused ones; wrap the towers instead"
        )
    return outer


@contextlib.contextmanager
def _set(module: nn.Module, name: str, value: bool) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
