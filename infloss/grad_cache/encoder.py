"""A tower over one step: chunk by chunk without a graph, and each chunk again with one."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from infloss.grad_cache import buffers
from infloss.grad_cache.data_parallel import DataParallel
from infloss.grad_cache.inputs import Chunk
from infloss.grad_cache.modules import device_of, modules_of
from infloss.grad_cache.moment import Moment
from infloss.grad_cache.representations import Layout, Outputs, join
from infloss.grad_cache.sharded import most_chunks, refuse_deepspeed, reshard
from infloss.grad_cache.tower import Tower

# of outputs, their gradients and the inputs that want one
Backward = Callable[[list[Tensor], list[Tensor], list[Tensor]], None]


class Encoder:
    """A tower and what its first pass leaves behind for the replay.

    Where ranks share its parameters, all take as many turns as the one with most chunks: in those
    beyond its own, a rank runs its last chunk once more, for nothing.
    """

    def __init__(self, name: str, tower: Tower, dtype: torch.dtype | None) -> None:
        self.name, self.model, self.dtype = name, tower.model, dtype
        self.modules = list(tower.modules or modules_of(tower.model))
        refuse_deepspeed(name, self.modules)
        reshard(self.modules)
        self.chunks = tower.chunks(name)
        self.turns = most_chunks(self.modules, len(self.chunks))
        self.is_trainable = _is_trainable(tower.model, self.inputs())
        self._device = device_of(self.modules)
        self._versions = _versions(tower.model)
        self._modes = _modes(tower.model)
        self._moments: list[Moment] = []  # at the start of each chunk
        self._changed: list[buffers.Values] = []  # buffers as they were then
        self._layout: Layout | None = None

    @property
    def layout(self) -> Layout:
        assert self._layout is not None
        return self._layout

    def inputs(self) -> list[Tensor]:
        """Tensors of the chunks that want a gradient, in order."""
        return [one for chunk in self.chunks for one in chunk.tensors() if one.requires_grad]

    @torch.no_grad()
    def encode(self, index: int, parallel: DataParallel) -> list[Tensor]:
        """The representations of the whole batch; the tower is the ``index``-th of the step."""
        outputs = []
        devices = _devices(self.modules, self.chunks)
        tracked = buffers.Buffers(self.modules)
        for turn, chunk in enumerate(self.chunks):
            self._moments.append(Moment.now(devices))
            watching = parallel.watching((index, turn)) if self.is_trainable else nullcontext()
            with watching:
                outputs.append(self._call(chunk.copy(self._device)))
            self._changed.append(tracked.changes())
        for turn in range(len(self.chunks), self.turns):
            with buffers.kept(self._changed[-1]):
                self._call_again(turn, self.chunks[-1].copy(self._device))
        self._layout, tensors = join(outputs)
        return tensors

    def keys(self) -> list[buffers.Key]:
        """The buffers that the replay is going to change."""
        return [key for values in self._changed for key in values]

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the replay would not see what the first pass saw."""
        if not all(chunk.is_unchanged() for chunk in self.chunks):
            raise RuntimeError(
                f"{self.name}: inputs: expected as they were until backward has run, "
                "got tensors edited in place since"
            )
        if any(one._version != version for one, version in self._versions.items()):
            raise RuntimeError(
                f"{self.name}: model: expected its parameters as they were until backward has run, "
                "got ones changed since, as by an optimizer's step"
            )

        if _modes(self.model) != self._modes:
            raise RuntimeError(
                f"{self.name}: model: expected train() or eval() as it was until backward has run, "
                "got modules in the other mode since"
            )

    def replay(
        self, turn: int, grads: Sequence[Tensor | None], backward: Backward
    ) -> list[Tensor | None]:
        """Run one turn with a graph and through it; the gradients of the chunk's inputs."""
        chunk = self.chunks[min(turn, len(self.chunks) - 1)].copy(self._device)
        leaves = [one for one in chunk.tensors() if one.requires_grad]
        with torch.enable_grad():
            outputs = self._call_again(turn, chunk)
        wanted = [
            (tensor, self._grad_of(turn, path, tensor, grad))
            for path, tensor, grad in zip(outputs.paths, outputs.tensors, grads, strict=True)
            if tensor.requires_grad
        ]
        known = [(tensor, grad) for tensor, grad in wanted if grad is not None]
        if known:
            backward([one for one, _ in known], [one for _, one in known], leaves)
        return [one.grad for one in leaves]

    def _grad_of(self, turn: int, path: str, tensor: Tensor, grad: Tensor | None) -> Tensor | None:
        if turn >= len(self.chunks):
            return torch.zeros_like(tensor)
        if grad is None and (turn == len(self.chunks) - 1 or tensor.dim() > 0):
            raise ValueError(
                f"{path}: expected a representation that the loss depends on, got one that it "
                "does not; return from the tower only what the loss uses"
            )
        return grad

    def _call(self, chunk: Chunk) -> Outputs:
        return Outputs.of(self.name, self.model(*chunk.args, **chunk.kwargs), self.dtype)

    def _call_again(self, turn: int, chunk: Chunk) -> Outputs:
        index = min(turn, len(self.chunks) - 1)
        buffers.load(self._changed[index])
        with self._moments[index].again():
            return self._call(chunk)


def _is_trainable(model: object, inputs: list[Tensor]) -> bool:
    """Whether a gradient may be wanted of a tower: of a function, only its outputs tell."""
    if not isinstance(model, nn.Module):
        return True
    return len(inputs) > 0 or any(one.requires_grad for one in model.parameters())


def _devices(modules: list[nn.Module], chunks: list[Chunk]) -> set[torch.device]:
    """Where random numbers may come from: a tower's devices, and the current GPU."""
    tensors = [one for chunk in chunks for one in chunk.tensors()]
    for module in modules:
        tensors += [*module.parameters(), *module.buffers()]
    devices = {one.device for one in tensors}
    if torch.cuda.is_initialized():
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    return devices


def _versions(model: object) -> dict[nn.Parameter, int]:
    """Of the parameters that are surely the tower's, and whole."""
    if not isinstance(model, nn.Module):
        return {}
    return {
        one: one._version
        for one in model.parameters()
        if not (hasattr(one, "device_mesh") or one.is_inference())
    }


def _modes(model: object) -> list[bool]:
    """Which of its modules are in train mode."""
    return [one.training for one in model.modules()] if isinstance(model, nn.Module) else []
