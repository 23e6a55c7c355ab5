"""What the losses need to know of torch.distributed."""

import warnings

import torch

_warned = False


@torch.compiler.assume_constant_result
def warn_if_world_is_ignored() -> None:
    """Warn once where a loss without a group runs in a world of several ranks.

    Marked as constant so that a compiled graph warns while it is traced.
    """
    global _warned
    distributed = torch.distributed
    if _warned or not (distributed.is_available() and distributed.is_initialized()):
        return
    world = distributed.get_world_size()
    if world > 1:
        _warned = True
        warnings.warn(
            f"infloss: group is None in a world of {world} ranks, so every rank uses only its own "
            "batch as negatives",
            UserWarning,
            stacklevel=3,
        )
