"""The public losses: the user's tensors, checked, promoted and reduced."""

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from infloss import checks, config, kernels
from infloss.ops import PairLosses, pair_losses
from infloss.portable import stats_dtype
from infloss.world import warn_if_world_is_ignored

DEFAULT_LOGIT_SCALE = 1 / 0.07
# asked once: torch.compile cannot trace the question on every torch
AUTOCAST_DEVICES = frozenset(
    kind
    for kind in ("cpu", "cuda", "hpu", "mps", "mtia", "xpu")
    if torch.amp.is_autocast_available(kind)
)


class ContrastiveOutput(NamedTuple):
    """Loss and statistics of one :func:`contrastive_loss` call; all but ``loss`` are detached."""

    loss: Tensor  # [] or, with reduction="none", [B]
    lse_img: Tensor  # [B]  log-sum-exp over texts of each image's similarities
    lse_txt: Tensor  # [B]  log-sum-exp over images of each text's similarities
    positive: Tensor  # [B]  similarity of each pair, logit_scale included
    accuracy_img: Tensor  # []  share of images whose own text beats every other strictly
    accuracy_txt: Tensor  # []  share of texts whose own image beats every other strictly
    strategy: str  # how the batch was spread: "local"


class InfoNCEOutput(NamedTuple):
    """Loss and statistics of one :func:`info_nce` call; all but ``loss`` are detached."""

    loss: Tensor  # [] or, with reduction="none", [M]
    lse: Tensor  # [M]  log-sum-exp over keys of each query's similarities
    positive: Tensor  # [M]  similarity of each query and its target
    accuracy: Tensor  # []  share of queries whose target beats every other key strictly
    strategy: str  # how the batch was spread: "local"


def _check_options(
    normalize: bool,
    reduction: str,
    group: Any,
    strategy: str,
    grad_reduction: str,
    return_stats: bool,
) -> None:
    checks.flag("normalize", normalize)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    checks.one_of("strategy", strategy, checks.STRATEGIES)
    checks.one_of("grad_reduction", grad_reduction, checks.GRAD_REDUCTIONS)
    checks.flag("return_stats", return_stats)
    if group is not None:
        raise NotImplementedError(
            f"group: expected None (the loss of this process's own batch), got {group!r}; "
            "this version does not spread a batch over ranks"
        )
    warn_if_world_is_ignored()


def _to_common_dtype(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Promote both sides; under autocast to its dtype, as torch.mm would (float64 stays)."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    kind = x.device.type
    if dtype != torch.float64 and kind in AUTOCAST_DEVICES and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), y.to(dtype)


def _scale_tensor(logit_scale: float | Tensor, x: Tensor) -> Tensor:
    """logit_scale as a [] tensor in the statistics' dtype on the features' device."""
    dtype = stats_dtype(x.dtype)
    if isinstance(logit_scale, Tensor):
        return logit_scale.reshape(()).to(device=x.device, dtype=dtype)
    return torch.full((), logit_scale, dtype=dtype, device=x.device)


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
        group: None; the loss of this process's own batch.
        strategy: "auto", "ring" or "gather": how a group's batch is spread.
        grad_reduction: "mean" or "sum": what the trainer does with gradients over ranks.
        return_stats: return a :class:`ContrastiveOutput`, from the same pass over the tiles.

    Returns:
        The loss, [] or [B] with reduction "none"; or a :class:`ContrastiveOutput`.

    Raises:
        TypeError, ValueError: before anything runs, naming argument, got and expected.
        NotImplementedError: ``group`` is not None; in backward, for a second derivative.

    Warns:
        UserWarning: once, if torch.distributed runs several ranks and ``group`` is None.
    """
    checks.features("img", img)
    checks.features("txt", txt)
    checks.matching(("img", "txt"), img, txt, same_rows=True)
    checks.logit_scale(logit_scale, img.device)
    _check_options(normalize, reduction, group, strategy, grad_reduction, return_stats)

    x, y = _to_common_dtype(img, txt)
    out = pair_losses(
        x,
        y,
        _scale_tensor(logit_scale, x),
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
        logit_scale, normalize, reduction, group, strategy, grad_reduction: as in
            :func:`contrastive_loss`.
        return_stats: return an :class:`InfoNCEOutput`, from the same pass over the tiles.

    Returns:
        The loss, [] or [M] with reduction "none"; or an :class:`InfoNCEOutput`.

    Raises:
        TypeError, ValueError: before anything runs, naming argument, got and expected.
        NotImplementedError: ``group`` is not None; in backward, for a second derivative.
    """
    checks.features("query", query)
    checks.features("key", key)
    checks.matching(("query", "key"), query, key, same_rows=False)
    checks.target(target, query, key)
    checks.logit_scale(logit_scale, query.device)
    _check_options(normalize, reduction, group, strategy, grad_reduction, return_stats)

    x, y = _to_common_dtype(query, key)
    out = pair_losses(
        x,
        y,
        _scale_tensor(logit_scale, x),
        target=target,
        target_stride=key.size(0) // query.size(0),
        normalize=normalize,
        hardest=return_stats,
        workspace=config.get_workspace_limit(),
        path=config.requested_path(),
        precision=kernels.float32_precision(),
    )
    losses = out.row_nll if target is None else _poison(out.row_nll, target, key.size(0))
    loss = _reduce(losses, reduction)
    if not return_stats:
        return loss
    accuracy = _accuracy(out.positive, out.row_hardest)
    return InfoNCEOutput(loss, out.row_lse, out.positive, accuracy, strategy="local")


def _poison(losses: Tensor, target: Tensor, keys: int) -> Tensor:
    """Make value and gradient of a row NaN whose target is no key."""
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        return losses
    valid = (target >= 0) & (target < keys)
    # a factor, not a choice: it must reach the gradient too
    return losses * torch.where(valid, 1.0, torch.nan).to(losses.dtype)
