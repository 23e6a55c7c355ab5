"""What the losses return beside a plain loss."""

from typing import NamedTuple

from torch import Tensor


class ContrastiveOutput(NamedTuple):
    """Loss and statistics of one ``contrastive_loss`` call; all but ``loss`` are detached.

    Under a group, [B] is this rank's pairs, each against the whole batch.
    """

    loss: Tensor  # [] or, with reduction="none", [B]
    lse_img: Tensor  # [B]  log-sum-exp over texts of each image's similarities
    lse_txt: Tensor  # [B]  log-sum-exp over images of each text's similarities
    positive: Tensor  # [B]  similarity of each pair
    accuracy_img: Tensor  # []  share of images whose own text beats every other strictly
    accuracy_txt: Tensor  # []  share of texts whose own image beats every other strictly
    strategy: str  # how the batch was spread: "local", "ring" or "gather"


class InfoNCEOutput(NamedTuple):
    """Loss and statistics of one ``info_nce`` call; all but ``loss`` are detached.

    Under a group, [M] is this rank's queries, each against the keys of all ranks.
    """

    loss: Tensor  # [] or, with reduction="none", [M]
    lse: Tensor  # [M]  log-sum-exp over keys of each query's similarities
    positive: Tensor  # [M]  similarity of each query and its target
    accuracy: Tensor  # []  share of queries whose target beats every other key strictly
    strategy: str  # how the batch was spread: "local", "ring" or "gather"
