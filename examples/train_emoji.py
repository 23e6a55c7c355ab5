"""Train a small CLIP on emoji with infloss and draw what it learned.

    python train_emoji.py                # two to three minutes on two CPU cores
    python train_emoji.py --full-batch   # every (emoji, language) pair in one batch
    python train_emoji.py --chunk-size 128  # that through a larger tower, in bounded memory
    torchrun --nproc-per-node 2 train_emoji.py    # each batch shared by two processes or GPUs

prints held-out recall before and after and writes a picture with the numbers as JSON beside it.
"""

import argparse
import json
import math
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

import emoji_data
import evaluation
import infloss
import plot
import ranks
from emoji_data import LANGUAGES, EmojiData, Split
from evaluation import History
from model import LARGE_WIDTH, ImageTower, TwoTower, group_norm
from ranks import Rows, World

HERE = Path(__file__).resolve().parent
EPOCHS, FULL_BATCH_EPOCHS = 100, 24
LEARNING_RATE, FULL_BATCH_LEARNING_RATE = 2e-3, 4e-3
WEIGHT_DECAY = 0.1
WARMUP_SHARE = 0.1
MAX_LOGIT_SCALE = 100.0
EVALUATIONS = 20
MIB = 2**20


@dataclass(frozen=True)
class Batch:
    """Pictures and their captions, ``copies`` consecutive captions a picture."""

    emoji: np.ndarray  # [n] indices
    captions: list[list[str]]  # [n * copies]
    copies: int


def sampled_epoch(
    data: EmojiData, variants: list[np.ndarray], size: int, rng: np.random.Generator
) -> Iterator[Batch]:
    """One random variant and caption of each concept, in batches of at most ``size`` pairs.

    So the negatives are other concepts, not the same hand in another skin tone.
    """
    order = rng.permutation([rng.choice(members) for members in variants])
    for part in np.array_split(order, math.ceil(len(order) / size)):
        yield Batch(part, [emoji_data.sample_caption(data, i, rng) for i in part], copies=1)


def whole_epoch(data: EmojiData, train: np.ndarray, rng: np.random.Generator) -> Iterator[Batch]:
    """Every training emoji with a caption in every language, as one batch.

    The copies of a picture share one feature vector. So no caption is pushed away from its own
    picture: image to text, the pairs of a picture add up to cross-entropy with equal targets over
    its captions; text to image, each is the loss over distinct pictures plus log(copies).
    """
    columns = range(len(LANGUAGES))
    captions = [
        emoji_data.sample_caption(data, i, rng, column) for i in train for column in columns
    ]
    yield Batch(train, captions, copies=len(LANGUAGES))


def epochs(
    data: EmojiData, train: np.ndarray, args: argparse.Namespace
) -> Iterator[Iterator[Batch]]:
    """The batches of each epoch of a run."""
    rng = np.random.default_rng(args.seed)
    variants = emoji_data.variants_by_concept(data, train)
    for _ in range(args.epochs):
        if args.full_batch:
            yield whole_epoch(data, train, rng)
        else:
            yield sampled_epoch(data, variants, args.batch_size, rng)


class Objective(nn.Module):
    """The towers and the loss with its scale: every parameter, and one forward that uses them."""

    def __init__(self, model: TwoTower, loss: infloss.ContrastiveLoss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(
        self, pictures: Tensor, captions: tuple[Tensor, Tensor], chunks: Sequence[Rows], copies: int
    ) -> infloss.ContrastiveOutput:
        """Loss of the whole batch, of which ``pictures`` and ``captions`` are this rank's share.

        The image tower takes a chunk at a time, if there are several.
        """
        rows = ranks.join(chunks)
        txt = self.model.text(*captions, rows.repeat_interleave(copies))

        def loss_of(img: Tensor) -> infloss.ContrastiveOutput:
            return self.loss(img.repeat_interleave(copies, dim=0), txt, return_stats=True)

        def split(pictures: Tensor, _: int) -> list[list[Tensor | Rows]]:
            parts = pictures.split([len(chunk.own) for chunk in chunks])
            return [[part, chunk] for part, chunk in zip(parts, chunks, strict=True)]

        if len(chunks) == 1:
            return loss_of(self.model.image(pictures, rows))
        tower = infloss.Tower(self.model.image, pictures, chunks[0].total, split=split)
        return infloss.cached_loss(loss_of, [tower])


def in_batch_match(stats: infloss.ContrastiveOutput, copies: int, world: World) -> dict[str, str]:
    """How well the pairs of a batch find each other, for the progress bar.

    Accuracy asks that a pair beat every other; copies of one picture tie, so there it is replaced
    by the probability that a caption gives to its picture.
    """
    if copies == 1:
        return {"accuracy": f"{(stats.accuracy_img + stats.accuracy_txt).item() / 2:.1%}"}
    probability = copies * world.mean((stats.positive - stats.lse_txt).exp())
    return {"probability": f"{probability:.2%}"}


class Trainer:
    """A model, its loss with a learnable scale, and AdamW on a one-cycle schedule.

    ``chunk_size`` pictures of a batch run through their tower at once; None: all of it.
    """

    def __init__(
        self,
        model: TwoTower,
        data: EmojiData,
        steps: int,
        lr: float,
        chunk_size: int | None,
        world: World,
    ) -> None:
        self.data, self.chunk_size, self.world = data, chunk_size, world
        loss = infloss.ContrastiveLoss(max_logit_scale=MAX_LOGIT_SCALE, group=world.group)
        self.loss = loss.to(world.device)
        self.objective = world.data_parallel(Objective(model, self.loss))
        parameters = [*model.parameters(), *self.loss.parameters()]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, fused=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, lr, total_steps=steps + 1, pct_start=WARMUP_SHARE, cycle_momentum=False
        )

    def forward(self, batch: Batch, chunk_size: int | None) -> infloss.ContrastiveOutput:
        """Loss of this rank's share of the batch."""
        count, copies = len(batch.emoji), batch.copies
        chunks = self.world.shares(count, chunk_size or count)
        rows = ranks.join(chunks)
        pictures = emoji_data.augment(emoji_data.pictures(self.data, batch.emoji[rows.own]), rows)
        own = [batch.captions[i] for i in rows.repeat_interleave(copies).own]
        captions = emoji_data.hash_captions(own, pictures.device)
        return self.objective(pictures, captions, chunks, copies)

    def step(self, batch: Batch) -> infloss.ContrastiveOutput:
        """One update of both towers and the scale."""
        stats = self.forward(batch, self.chunk_size)
        self.optimizer.zero_grad()
        stats.loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return stats

    def gradient(self, batch: Batch, chunk_size: int | None) -> Tensor:
        """Of every parameter, in one vector, without dropout."""
        self.objective.eval()
        self.optimizer.zero_grad()
        torch.manual_seed(0)  # the pictures' shifts
        self.forward(batch, chunk_size).loss.backward()
        gradients = [one.grad for one in self.objective.parameters() if one.grad is not None]
        return torch.cat([one.flatten() for one in gradients])


def steps_of(data: EmojiData, train: np.ndarray, args: argparse.Namespace) -> int:
    """Updates in a run."""
    if args.full_batch:
        return args.epochs
    return args.epochs * math.ceil(len(np.unique(data.concept[train])) / args.batch_size)


def train(
    model: TwoTower, data: EmojiData, halves: Split, args: argparse.Namespace, world: World
) -> History:
    """Train in place with a progress bar, looking at held-out recall now and then."""
    steps = steps_of(data, halves.train, args)
    lr = FULL_BATCH_LEARNING_RATE if args.full_batch else LEARNING_RATE
    trainer, history = Trainer(model, data, steps, lr, args.chunk_size, world), History()
    every = max(1, args.epochs // EVALUATIONS)
    quiet = not world.is_main
    with tqdm(total=steps, unit="step", dynamic_ncols=True, disable=quiet) as bar:
        for epoch, batches in enumerate(epochs(data, halves.train, args), start=1):
            for batch in batches:
                stats = trainer.step(batch)
                history.loss.append(stats.loss.item() - math.log(batch.copies))
                bar.set_postfix(
                    loss=f"{history.loss[-1]:.3f}",
                    scale=f"{trainer.loss.logit_scale.item():.1f}",
                    **in_batch_match(stats, batch.copies, world),
                )
                bar.update()
            if world.is_main and (epoch % every == 0 or epoch == args.epochs):
                similarities = evaluation.similarity(model, data, halves.held_out)
                history.evaluated_at.append(len(history.loss))
                history.recall.append(evaluation.recall(similarities))
    return history


def chunking_report(
    model: TwoTower, data: EmojiData, halves: Split, args: argparse.Namespace, world: World
) -> str:
    """The gradient of the whole batch in chunks beside that of one piece, and what either holds."""
    trainer = Trainer(model, data, 1, FULL_BATCH_LEARNING_RATE, None, world)
    batch = next(whole_epoch(data, halves.train, np.random.default_rng(args.seed)))
    chunked = trainer.gradient(batch, args.chunk_size)
    peak = peak_memory(world.device)
    whole = trainer.gradient(batch, None)
    difference = ((chunked - whole).norm() / whole.norm()).item()
    return (
        f"gradient in chunks of {args.chunk_size} beside that in one piece: relative difference "
        f"{difference:.1e}; peak memory {peak / MIB:,.0f} MiB and "
        f"{peak_memory(world.device) / MIB:,.0f} MiB"
    )


def peak_memory(device: torch.device) -> int:
    """Bytes at the worst moment so far: of the allocator on a GPU, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_report(pairs: int, before: int, peak: int, world: World) -> str:
    """Peak memory beside what the similarities of the whole batch would have taken."""
    where = "" if world.size == 1 else f" over {world.size} ranks, the first of them"
    return (
        f"batch of {pairs:,} pairs{where}: peak memory {peak / MIB:,.0f} MiB in all, "
        f"{before / MIB:,.0f} MiB before the first step\n"
        f"{pairs:,} x {pairs:,} float32 logits would take {4 * pairs**2 / MIB:,.0f} MiB more, "
        "and their gradient as much again"
    )


def positive(text: str) -> int:
    """Parse a command-line count."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--epochs",
        type=positive,
        help=f"default: {EPOCHS}, or {FULL_BATCH_EPOCHS} (of one step) under --full-batch",
    )
    parser.add_argument("--batch-size", type=positive, default=256, help="pairs a step, at most")
    parser.add_argument("--full-batch", action="store_true", help="all training pairs in one batch")
    parser.add_argument(
        "--chunk-size",
        type=positive,
        metavar="N",
        help="--full-batch through a larger image tower, N pictures at a time",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("demo.png"))
    parser.add_argument("--data", type=Path, default=HERE / "data" / "emoji.npz")
    args = parser.parse_args()
    args.full_batch |= args.chunk_size is not None
    args.epochs = args.epochs or (FULL_BATCH_EPOCHS if args.full_batch else EPOCHS)
    return args


def run(args: argparse.Namespace, world: World) -> None:
    """Train; the main rank also evaluates, prints and writes."""
    torch.manual_seed(args.seed)
    device = world.device
    data = emoji_data.load(args.data).to(device)
    halves = emoji_data.split(data, np.random.default_rng(args.seed))
    image = ImageTower(LARGE_WIDTH, group_norm) if args.chunk_size else ImageTower()
    model = TwoTower(image).to(device)
    if not world.is_main:
        train(model, data, halves, args, world)
        return

    count = len(halves.held_out)
    print(f"{len(halves.train)} emoji to train on, {count} concepts held out")
    before = evaluation.recall(evaluation.similarity(model, data, halves.held_out))
    memory_before, started = peak_memory(device), time.perf_counter()
    history = train(model, data, halves, args, world)
    seconds, memory_peak = time.perf_counter() - started, peak_memory(device)

    similarities = evaluation.similarity(model, data, halves.held_out).cpu()
    after = evaluation.recall(similarities)
    print(f"\n{evaluation.table(before, after, count)}\n")
    result = {
        "before": before,
        "after": after,
        "chance": evaluation.chance(count),
        "cutoffs": evaluation.CUTOFFS,
        "held_out": count,
        "steps": len(history.loss),
        "losses": history.loss,
        "final_loss": history.loss[-1],
        "train_seconds": seconds,
        "device": args.device,
        "ranks": world.size,
        "seed": args.seed,
    }
    if args.full_batch:
        pairs = len(halves.train) * len(LANGUAGES)
        print(f"{memory_report(pairs, memory_before, memory_peak, world)}\n")
        result |= {"pairs": pairs, "peak_bytes": memory_peak, "logits_bytes": 4 * pairs**2}
    if args.chunk_size and world.size == 1:
        print(f"{chunking_report(model, data, halves, args, world)}\n")
    plot.draw(args.output, history, data, halves.held_out, similarities)
    numbers = args.output.with_suffix(".json")
    numbers.write_text(json.dumps(result, indent=2) + "\n")
    print(f"trained in {seconds:.0f} s; wrote {args.output} and {numbers}")


def main() -> None:
    args = parse_args()
    with ranks.start(args.device) as world:
        run(args, world)


if __name__ == "__main__":
    main()
