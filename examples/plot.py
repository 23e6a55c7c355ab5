"""The picture of a run: loss and recall on the left, retrieval a person can judge on the right."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from torch import Tensor

from emoji_data import EmojiData, full_caption
from evaluation import CUTOFFS, History, chance, ranks_of_match

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure

TOP = 5
FOUND, MISSED = 5, 2  # queries to show in each direction
NOTE = f"the first {FOUND} found and {MISSED} missed of a fixed shuffle; green: the match"
TEXT_COLUMNS = [3.1] + [1.0] * TOP
IMAGE_COLUMNS = [1.0, 1.9]
RIGHT, QUIET, INK = "#1a9850", "#8a8a8a", "#222222"
CURVES = ("#9ecae1", "#4292c6", "#08519c")


def pick_queries(ranks: Tensor) -> list[int]:
    """The first ``FOUND`` queries answered in the top five and the first ``MISSED`` others.

    ``ranks`` [n] comes shuffled, so nothing is hand-picked. One kind makes up for too few of the
    other; fewer than ``FOUND + MISSED`` queries are all taken.
    """
    hit = ranks < TOP
    hits, misses = hit.nonzero()[:, 0].tolist(), (~hit).nonzero()[:, 0].tolist()
    found = hits[: max(FOUND, FOUND + MISSED - len(misses))]
    return [*found, *misses[: FOUND + MISSED - len(found)]]


def draw_loss(axes: Axes, history: History) -> None:
    """Loss of each step, and its running mean."""
    steps = np.arange(1, len(history.loss) + 1)
    window = max(1, len(steps) // 50)
    mean = np.convolve(history.loss, np.ones(window) / window, mode="valid")
    axes.plot(steps, history.loss, color=CURVES[0], linewidth=0.8)
    axes.plot(steps[window - 1 :], mean, color=CURVES[2], linewidth=1.8)
    axes.set(title="training loss", xlabel="step", ylabel="contrastive loss")


def draw_recall(axes: Axes, history: History, count: int) -> None:
    """Held-out recall over training, mean of both directions; chance dashed."""
    curves = np.mean([list(r.values()) for r in history.recall], axis=1).T
    for k, color, curve, guess in zip(CUTOFFS, CURVES, curves, chance(count), strict=True):
        axes.plot(history.evaluated_at, 100 * curve, color=color, marker=".", label=f"recall@{k}")
        axes.axhline(100 * guess, color=color, linestyle="--", linewidth=0.9)
    axes.set(title=f"recall, {count} unseen concepts (chance dashed)")
    axes.set(xlabel="step", ylabel="%", ylim=(0, 115 * max(curves.max(), chance(count)[-1])))
    axes.legend(loc="upper center", ncols=len(CUTOFFS), frameon=False)


def show_picture(axes: Axes, picture: np.ndarray, framed: bool) -> None:
    """One emoji, [32, 32, 3], with a green frame where it is the right answer."""
    axes.imshow(picture, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=framed, color=RIGHT, linewidth=3.5)


def write_query(axes: Axes, caption: list[str], rank: int) -> None:
    """A held-out caption: its name large, its keywords small, and where the match came."""
    axes.axis("off")
    name = textwrap.shorten(caption[0], 27, placeholder=" …")
    keywords = textwrap.shorten(", ".join(caption[1:]), 64, placeholder=" …")
    axes.text(0, 0.80, name, fontsize=13, fontweight="bold", color=INK, va="center")
    axes.text(0, 0.46, textwrap.fill(keywords, 34), fontsize=9.5, color=QUIET, va="center")
    verdict = f"found at place {rank + 1}" if rank < TOP else f"missed: place {rank + 1}"
    axes.text(0, 0.10, verdict, fontsize=9.5, color=RIGHT if rank < TOP else INK, va="center")


def query_grid(figure: SubFigure, title: str, width_ratios: Sequence[float]) -> np.ndarray:
    """A titled grid of axes, one row a query."""
    figure.text(0.02, 0.975, title, fontsize=14, va="center")
    figure.text(0.02, 0.945, NOTE, fontsize=9.5, color=QUIET, va="center")
    rows = FOUND + MISSED
    grid = figure.add_gridspec(
        rows, len(width_ratios), width_ratios=width_ratios,
        left=0.02, right=0.99, top=0.92, bottom=0.01, wspace=0.08, hspace=0.16,
    )  # fmt: skip
    return grid.subplots(squeeze=False)


def draw_text_queries(
    figure: SubFigure, scores: Tensor, pictures: np.ndarray, captions: list[list[str]]
) -> None:
    """Rows of a caption and the five pictures that fit it best; a row of ``scores`` a caption."""
    grid = query_grid(figure, "unseen text → the five nearest of the unseen pictures", TEXT_COLUMNS)
    ranks, order = ranks_of_match(scores), scores.argsort(dim=1, descending=True, stable=True)
    for row, query in zip(grid, pick_queries(ranks), strict=False):
        write_query(row[0], captions[query], int(ranks[query]))
        for axes, answer in zip(row[1:], order[query, :TOP].tolist(), strict=True):
            show_picture(axes, pictures[answer], framed=answer == query)


def write_answers(axes: Axes, answers: Iterable[tuple[str, bool]]) -> None:
    """The names nearest to a picture, best first, the right one green."""
    axes.axis("off")
    for line, (name, right) in enumerate(answers):
        label = f"{line + 1}  {textwrap.shorten(name, 30, placeholder=' …')}"
        weight, color = ("bold", RIGHT) if right else ("normal", INK)
        height = 0.9 - 0.2 * line
        axes.text(0, height, label, fontsize=10.5, fontweight=weight, color=color, va="center")


def draw_image_queries(
    figure: SubFigure, scores: Tensor, pictures: np.ndarray, captions: list[list[str]]
) -> None:
    """Rows of a picture and the five names that fit it best; a row of ``scores`` a picture."""
    grid = query_grid(figure, "unseen picture → the five nearest names", IMAGE_COLUMNS)
    ranks, order = ranks_of_match(scores), scores.argsort(dim=1, descending=True, stable=True)
    for (picture, names), query in zip(grid, pick_queries(ranks), strict=False):
        show_picture(picture, pictures[query], framed=False)
        answers = order[query, :TOP].tolist()
        write_answers(names, [(captions[answer][0], answer == query) for answer in answers])


def draw(
    path: Path, history: History, data: EmojiData, held_out: np.ndarray, similarities: Tensor
) -> None:
    """Write the picture; ``similarities`` [n, n] has held-out pictures as rows, texts as columns.

    Queries are the first ones of a fixed shuffle: five with the match in the top five, two without.
    """
    order = np.random.default_rng(0).permutation(len(held_out))
    scores = similarities[order][:, order]
    pictures = data.images[held_out[order]].permute(0, 2, 3, 1).cpu().numpy()
    captions = [full_caption(data, index) for index in held_out[order]]

    figure = plt.figure(figsize=(20, 9.2))
    curves, texts, images = figure.subfigures(1, 3, squeeze=False, width_ratios=[5, 9, 5.2])[0]
    loss_axes, recall_axes = curves.subplots(
        2, 1, gridspec_kw={"left": 0.18, "right": 0.95, "top": 0.94, "bottom": 0.07, "hspace": 0.3}
    )
    draw_loss(loss_axes, history)
    draw_recall(recall_axes, history, len(held_out))
    draw_text_queries(texts, scores.T, pictures, captions)
    draw_image_queries(images, scores, pictures, captions)
    figure.savefig(path, dpi=100)
    plt.close(figure)
