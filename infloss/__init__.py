"""infloss: the exact contrastive (CLIP / InfoNCE) loss in tiles; no B x B matrix."""

from infloss.build import build_info
from infloss.config import set_workspace_limit, use_path, workspace_limit
from infloss.distributed.all_gather import all_gather
from infloss.functional import contrastive_loss, info_nce
from infloss.grad_cache import GradCache, Tower, cached_loss
from infloss.modules import ContrastiveLoss
from infloss.outputs import ContrastiveOutput, InfoNCEOutput
from infloss.version import __version__

__all__ = [
    "ContrastiveLoss",
    "ContrastiveOutput",
    "GradCache",
    "InfoNCEOutput",
    "Tower",
    "__version__",
    "all_gather",
    "build_info",
    "cached_loss",
    "contrastive_loss",
    "info_nce",
    "set_workspace_limit",
    "use_path",
    "workspace_limit",
]
