"""Modules whose parameters are spread over ranks: sharded by FSDP2, or by DeepSpeed."""

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule

from infloss.distributed import header
from infloss.distributed.ranks import of_group
from infloss.grad_cache.modules import submodules


def refuse_deepspeed(name: str, modules: Iterable[nn.Module]) -> None:
    """Raise NotImplementedError for ZeRO stages 2 and 3.

    They reduce and free gradients during a backward pass, of which the replay makes many.
    """
    for module in submodules(modules):
        stage = 0
        if type(module).__module__.split(".")[0] == "deepspeed":
            stage = int(getattr(module, "zero_optimization_stage", int)())
        if any(hasattr(one, "ds_id") for one in module.parameters(recurse=False)):
            stage = 3
        if stage >= 2:
            raise NotImplementedError(
                f"{name}: model: expected no DeepSpeed ZeRO stage above 1, got stage {stage}, "
                "which takes gradients away during each backward pass; use FSDP2 (fully_shard)"
            )


def reshard(modules: Iterable[nn.Module]) -> None:
    """Let go of whole parameters that a forward pass has left, so that all are seen as sharded."""
    for module in submodules(modules):
        if isinstance(module, FSDPModule):
            module.reshard()


def most_chunks(modules: Iterable[nn.Module], count: int) -> int:
    """The chunks that the ranks of sharded modules have at most, since each is a collective."""
    meshes = {
        one.device_mesh: None
        for module in submodules(modules)
        for one in module.parameters(recurse=False)
        if hasattr(one, "device_mesh")
    }
    for mesh in meshes:
        channel = header.channel(of_group(mesh))
        channel.calls += 1
        headers = channel.agree({"call": channel.calls, "loss": "cached_loss"}, {"chunks": count})
        count = max(one["chunks"] for one in headers)
    return count
