"""The public losses: the user's tensors, checked, promoted and reduced."""

from typing import Any, Literal, overload

from torch import Tensor

from infloss import checks, config, kernels
from infloss.distributed import losses as distributed
from infloss.inputs import poison, scale_tensor, to_common_dtype
from infloss.ops import PairLosses, pair_losses
from infloss.options import Options
from infloss.outputs import ContrastiveOutput, InfoNCEOutput
from infloss.world import warn_if_world_is_ignored

DEFAULT_LOGIT_SCALE = 1 / 0.07


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def _accuracy(positive: Tensor, hardest: Tensor) -> Tensor:
    return (positive > hardest).to(positive.dtype).mean()


@overload
def contrastive_loss(
    img: Tensor,
    txt: Tensor,
    logit_scale: float | Tensor = ...,
    *,
    normalize: bool = ...,
    reduction: str = ...,
    group: Any = ...,
    strategy: str = ...,
    grad_reduction: str = ...,
    assume_even: bool = ...,
    return_stats: Literal[False] = ...,
) -> Tensor: ...
@overload
def contrastive_loss(
    img: Tensor,
    txt: Tensor,
    logit_scale: float | Tensor = ...,
    *,
    normalize: bool = ...,
    reduction: str = ...,
    group: Any = ...,
    strategy: str = ...,
    grad_reduction: str = ...,
    assume_even: bool = ...,
    return_stats: Literal[True],
) -> ContrastiveOutput: ...
@overload
def contrastive_loss(
    img: Tensor,
    txt: Tensor,
    logit_scale: float | Tensor = ...,
    *,
    normalize: bool = ...,
    reduction: str = ...,
    group: Any = ...,
    strategy: str = ...,
    grad_reduction: str = ...,
    assume_even: bool = ...,
    return_stats: bool,
) -> Tensor | ContrastiveOutput: ...
def contrastive_loss(
    img: Tensor,
    txt: Tensor,
    logit_scale: float | Tensor = DEFAULT_LOGIT_SCALE,
    *,
    normalize: bool = True,
    reduction: str = "mean",
    group: Any = None,
    strategy: str = "auto",
    grad_reduction: str = "mean",
    assume_even: bool = False,
    return_stats: bool = False,
) -> Tensor | ContrastiveOutput:
    """Symmetric contrastive (CLIP) loss over all pairs of a batch, without the B x B matrix.

    ``s_ij = logit_scale * <img_i, txt_j>``; pair i loses
    ``(logsumexp_j s_ij + logsumexp_j s_ji) / 2 - s_ii`` (Radford et al. 2021, arXiv 2103.00020).
    Loss and gradients are exact. Memory beyond inputs and gradients is O(B) plus a workspace
    bounded by :func:`infloss.set_workspace_limit`; half-precision features, and float32 ones whose
    D is no multiple of 4, add one float32 [B, D] accumulator in backward; a side whose dtype is
    promoted, or whose rows do not start on 16-byte boundaries on a GPU, one copy. The loss is
    float32 (float64 for float64 features) whatever the features' dtype.

    Args:
        img: [B, D] float16, bfloat16, float32 or float64; any strides.
        txt: [B, D] on the same device. Dtypes may differ; the pair is promoted, and each
            gradient comes in its input's dtype. Under autocast both are cast as for torch.mm.
        logit_scale: inverse temperature, already exponentiated: a float, or a tensor of shape
            () or (1,), which gets its gradient. Nothing is clamped. A CPU tensor with GPU features
            is copied over, which waits for the device and cannot be captured in a CUDA graph.
        normalize: L2-normalise the rows inside, in float32 (float64 for float64 features). A row
            with norm <= 1e-12 has similarity 0 to all and zero gradient; norms stay below 1e19
            (1e154 for float64), beyond which their squares overflow.
        reduction: "mean", "sum", or "none" (one value a pair).
        group: None: the loss of this process's own batch. A ProcessGroup, or a DeviceMesh
            with its outermost dimension first (nodes by ranks): each rank passes its shard of the
            batch, any number of pairs, and gets the loss of the whole batch; with reduction "none"
            that of its own pairs against the whole batch. All ranks call, forward and backward.
        strategy: how a group's batch is spread. "ring": one side's features travel in sub-blocks,
            memory O(b D) for a shard of b pairs. "gather": one all-gather and one reduce-scatter,
            memory O(B D) for the whole batch. "auto": "gather" where what it gathers fits the
            workspace limit, else "ring". docs/scaling.md has the costs.
        grad_reduction: what the trainer does with gradients over the ranks: "mean" (DDP, FSDP) or
            "sum". After that every gradient, logit_scale's included, is that of one process with
            the whole batch. With reduction "none", rank r's gradient is that of the sum over ranks
            q of what q makes of its own losses, times the number of ranks under "mean".
        assume_even: the ranks promise that they agree in everything, the shards' sizes included.
            Then no headers are exchanged, and a broken promise may hang or go unnoticed.
        return_stats: return a :class:`ContrastiveOutput`, from the same pass over the tiles.

    Returns:
        The loss, [] or [B] with reduction "none"; or a :class:`ContrastiveOutput`.

    Raises:
        TypeError, ValueError: before anything runs, naming argument, got and expected. In a group
            all ranks raise the same ValueError if one is wrong or they disagree; a ``group`` that
            cannot be used, and anything under ``assume_even``, is an error of that rank alone. The
            value of a tensor ``logit_scale`` is not compared.
        NotImplementedError: in backward, for a second derivative.
        RuntimeError: a rank of the group has stopped; within the group's timeout.

    Warns:
        UserWarning: once, if torch.distributed runs several ranks and ``group`` is None.
    """
    options = Options(normalize, reduction, strategy, grad_reduction, assume_even, return_stats)
    if group is not None:
        return distributed.contrastive_loss(img, txt, logit_scale, group, options)
    checks.pairs(img, txt, logit_scale)
    options.check()
    warn_if_world_is_ignored()

    x, y = to_common_dtype(img, txt)
    out = pair_losses(
        x,
        y,
        scale_tensor(logit_scale, x),
        normalize=normalize,
        cols=True,
        hardest=return_stats,
        workspace=config.get_workspace_limit(),
        path=config.requested_path(),
        precision=kernels.float32_precision(),
    )
    loss = _reduce((out.row_nll + out.col_nll) * 0.5, reduction)
    return _contrastive_output(loss, out) if return_stats else loss


def _contrastive_output(loss: Tensor, out: PairLosses) -> ContrastiveOutput:
    return ContrastiveOutput(
        loss=loss,
        lse_img=out.row_lse,
        lse_txt=out.col_lse,
        positive=out.positive,
        accuracy_img=_accuracy(out.positive, out.row_hardest),
        accuracy_txt=_accuracy(out.positive, out.col_hardest),
        strategy="local",
    )


@overload
def info_nce(
    query: Tensor,
    key: Tensor,
    target: Tensor | None = ...,
    logit_scale: float | Tensor = ...,
    *,
    normalize: bool = ...,
    reduction: str = ...,
    group: Any = ...,
    strategy: str = ...,
    grad_reduction: str = ...,
    assume_even: bool = ...,
    return_stats: Literal[False] = ...,
) -> Tensor: ...
@overload
def info_nce(
    query: Tensor,
    key: Tensor,
    target: Tensor | None = ...,
    logit_scale: float | Tensor = ...,
    *,
    normalize: bool = ...,
    reduction: str = ...,
    group: Any = ...,
    strategy: str = ...,
    grad_reduction: str = ...,
    assume_even: bool = ...,
    return_stats: Literal[True],
) -> InfoNCEOutput: ...
@overload
def info_nce(
    query: Tensor,
    key: Tensor,
    target: Tensor | None = ...,
    logit_scale: float | Tensor = ...,
    *,
    normalize: bool = ...,
    reduction: str = ...,
    group: Any = ...,
    strategy: str = ...,
    grad_reduction: str = ...,
    assume_even: bool = ...,
    return_stats: bool,
) -> Tensor | InfoNCEOutput: ...
def info_nce(
    query: Tensor,
    key: Tensor,
    target: Tensor | None = None,
    logit_scale: float | Tensor = DEFAULT_LOGIT_SCALE,
    *,
    normalize: bool = True,
    reduction: str = "mean",
    group: Any = None,
    strategy: str = "auto",
    grad_reduction: str = "mean",
    assume_even: bool = False,
    return_stats: bool = False,
) -> Tensor | InfoNCEOutput:
    """One-directional InfoNCE loss of queries against keys, without the M x N matrix.

    Query i loses ``logsumexp_j s_ij - s_i,target[i]`` with
    ``s_ij = logit_scale * <query_i, key_j>`` (van den Oord et al. 2018, arXiv 1807.03748).

    Args:
        query: [M, D] float16, bfloat16, float32 or float64; any strides.
        key: [N, D] on the same device; dtypes are promoted as in :func:`contrastive_loss`, and so
            is the dtype of the loss.
        target: [M] int64, each query's key, on the queries' device. None stands for
            ``i * (N // M)``: N is a multiple of M and the positive comes first in each group.
            A target outside [0, N) is a ValueError on a CPU; on a GPU, and inside a compiled
            graph, where looking at it would stall the device, it makes that query's loss and
            the gradients NaN.
        logit_scale, normalize, reduction, strategy, grad_reduction, assume_even: as in
            :func:`contrastive_loss`.
        group: as there; M and N may differ from rank to rank, and ``target`` counts the keys of
            all ranks in their order. Without one, the M and N of all ranks together count.
        return_stats: return an :class:`InfoNCEOutput`, from the same pass over the tiles.

    Returns:
        The loss, [] or [M] with reduction "none"; or an :class:`InfoNCEOutput`.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as there.
    """
    options = Options(normalize, reduction, strategy, grad_reduction, assume_even, return_stats)
    if group is not None:
        return distributed.info_nce(query, key, target, logit_scale, group, options)
    checks.queries(query, key, target, logit_scale)
    checks.target_within(target, query.size(0), key.size(0))
    options.check()
    warn_if_world_is_ignored()

    x, y = to_common_dtype(query, key)
    out = pair_losses(
        x,
        y,
        scale_tensor(logit_scale, x),
        target=target,
        target_stride=key.size(0) // query.size(0),
        normalize=normalize,
        hardest=return_stats,
        workspace=config.get_workspace_limit(),
        path=config.requested_path(),
        precision=kernels.float32_precision(),
    )
    loss = _reduce(poison(out.row_nll, target, key.size(0)), reduction)
    if not return_stats:
        return loss
    accuracy = _accuracy(out.positive, out.row_hardest)
    return InfoNCEOutput(loss, out.row_lse, out.positive, accuracy, strategy="local")
