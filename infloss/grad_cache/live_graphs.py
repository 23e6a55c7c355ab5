"""Graphs through DistributedDataParallel modules that are still to be run backward.

A module's reducer follows the last graph through it. Where a replay runs while another graph is
waiting, the gradients of one of them would stay on their rank.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from infloss.grad_cache import nest


class _Graph:
    """A forward pass whose backward pass has not run."""


_graphs: WeakKeyDictionary[nn.Module, WeakSet[_Graph]] = WeakKeyDictionary()
_replaying: WeakSet[nn.Module] = WeakSet()


def watch(module: nn.Module) -> None:
    """From now on, keep count of the graphs through the module."""
    if module not in _graphs:
        _graphs[module] = WeakSet()
        module.register_forward_hook(_note)


def _note(module: nn.Module, _: Any, output: Any) -> None:
    graphs = _graphs.get(module)  # None of a copy of a module, which has the hook as well
    if graphs is None or module in _replaying or not torch.is_grad_enabled():
        return
    graph = _Graph()
    for _, leaf in nest.walk(output):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            graphs.add(graph)
            # the hook, and with it the graph's mark, lives as long as the graph
            leaf.grad_fn.register_prehook(lambda _, graph=graph: graphs.discard(graph))


@contextlib.contextmanager
def uncounted(module: nn.Module) -> Iterator[None]:
    """Calls of the module are a replay's own."""
    _replaying.add(module)
    try:
        yield
    finally:
        _replaying.discard(module)


def refuse_any(module: nn.Module) -> None:
    """Raise RuntimeError if there is such a graph."""
    if _graphs.get(module):
        raise RuntimeError(
            "cached_loss: expected no other graph through a DistributedDataParallel tower, got "
            "one whose backward pass has not run; run it first, or make its inputs a tower's"
        )


def refuse_in_this_backward(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise RuntimeError if the backward pass under way reaches one of these by itself."""
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        if torch._C._will_engine_execute_node(node):
            raise RuntimeError(
                "cached_loss: expected DistributedDataParallel towers to be used by cached_loss "
                f"alone, got a loss that uses their parameter {name} besides, which the wrapper "
                "would miss; let a tower return what the loss needs of it"
            )
