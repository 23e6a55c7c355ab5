"""The emoji data set: loading, an honest split, captions, hashed n-grams, augmentation."""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ranks import Rows

FIELDS = ("images", "emoji", "concept", "languages", "names", "keywords")
# The six languages of the data that share an alphabet, hence n-grams. English leads.
LANGUAGES = ("en", "es", "fr", "de", "pt", "it")

BUCKETS = 1 << 14
NGRAM_SIZES = (2, 3, 4, 5)

HELD_OUT_SHARE = 0.2
ENGLISH_SHARE = 0.5
KEYWORD_SHARE = 0.5

SHIFT = 3  # pixels
CONTRAST, BRIGHTNESS = 0.2, 0.1


@dataclass(frozen=True)
class EmojiData:
    """N emoji; columns of ``names`` and ``keywords`` follow ``LANGUAGES``."""

    images: Tensor  # [N, 3, 32, 32] uint8
    emoji: np.ndarray  # [N] str
    concept: np.ndarray  # [N] int32; skin tones, genders and look-alikes share a number
    names: np.ndarray  # [N, L] str
    keywords: np.ndarray  # [N, L] str, separated by "|"

    def to(self, device: torch.device) -> "EmojiData":
        """The same with the pictures on ``device``."""
        return replace(self, images=self.images.to(device))


@dataclass(frozen=True)
class Split:
    """Emoji indices. No concept is on both sides."""

    train: np.ndarray  # every variant of four concepts in five
    held_out: np.ndarray  # one emoji of each remaining concept


def load(path: Path) -> EmojiData:
    """Read the file that ``make_data.py`` writes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a field or a language is missing.
    """
    if not path.is_file():
        raise FileNotFoundError(f"data: expected the file written by make_data.py, got {path}")
    with np.load(path) as archive:
        fields = dict(archive)
    if missing := sorted(set(FIELDS) - set(fields)):
        raise ValueError(f"{path}: expected fields {FIELDS}, {missing} missing")
    stored = fields["languages"].tolist()
    if missing := sorted(set(LANGUAGES) - set(stored)):
        raise ValueError(f"{path}: expected languages {LANGUAGES}, {missing} missing")
    columns = [stored.index(language) for language in LANGUAGES]
    return EmojiData(
        images=torch.from_numpy(fields["images"]).permute(0, 3, 1, 2).contiguous(),
        emoji=fields["emoji"],
        concept=fields["concept"],
        names=fields["names"][:, columns],
        keywords=fields["keywords"][:, columns],
    )


def split(data: EmojiData, rng: np.random.Generator) -> Split:
    """Hold out whole concepts, so that no variant of a held-out emoji was ever trained on.

    A held-out concept is represented once, by its shortest code-point sequence (the plain emoji
    rather than a skin-tone variant): a gallery with six near-copies would measure something else.
    """
    concepts = rng.permutation(np.unique(data.concept))
    unseen = concepts[: max(1, round(HELD_OUT_SHARE * len(concepts)))]
    lengths = np.char.str_len(data.emoji)
    members = (np.flatnonzero(data.concept == c) for c in np.sort(unseen))
    held_out = np.array([variants[np.argmin(lengths[variants])] for variants in members])
    return Split(train=np.flatnonzero(~np.isin(data.concept, unseen)), held_out=held_out)


def variants_by_concept(data: EmojiData, indices: np.ndarray) -> list[np.ndarray]:
    """The given emoji indices, one array a concept."""
    order = indices[np.argsort(data.concept[indices], kind="stable")]
    starts = np.flatnonzero(np.diff(data.concept[order])) + 1
    return np.split(order, starts)


def keywords_of(data: EmojiData, index: int, language: int) -> list[str]:
    """Search keywords of one emoji in one language, a column of the data."""
    return [word for word in str(data.keywords[index, language]).split("|") if word]


def full_caption(data: EmojiData, index: int) -> list[str]:
    """The English name, then every English keyword: what a held-out emoji is queried by."""
    return [str(data.names[index, 0]), *keywords_of(data, index, 0)]


def sample_caption(
    data: EmojiData, index: int, rng: np.random.Generator, language: int | None = None
) -> list[str]:
    """A name and a random half of its keywords, in a random language unless one is given."""
    if language is None:
        english = rng.random() < ENGLISH_SHARE
        language = 0 if english else int(rng.integers(1, len(LANGUAGES)))
    words = keywords_of(data, index, language)
    kept = rng.random(len(words)) < KEYWORD_SHARE
    name = str(data.names[index, language])
    return [name, *(word for word, keep in zip(words, kept, strict=True) if keep)]


@cache
def ngrams(phrase: str) -> tuple[int, ...]:
    """Buckets of a phrase's words and of their character n-grams, ``<`` and ``>`` at the ends."""
    buckets: list[int] = []
    for word in re.findall(r"\w+", phrase.casefold()):
        marked = f"<{word}>"
        grams = {marked[i : i + n] for n in NGRAM_SIZES for i in range(len(marked) - n + 1)}
        buckets += (zlib.crc32(gram.encode()) % BUCKETS for gram in sorted(grams | {marked}))
    return tuple(buckets)


def hash_captions(captions: Sequence[Sequence[str]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Captions as an EmbeddingBag wants them: buckets [total] and offsets [B], both int64."""
    bags = [[bucket for phrase in caption for bucket in ngrams(phrase)] for caption in captions]
    offsets = np.cumsum([0, *(len(bag) for bag in bags)])[:-1]
    flat = np.fromiter((bucket for bag in bags for bucket in bag), dtype=np.int64)
    return torch.from_numpy(flat).to(device), torch.from_numpy(offsets).to(device)


def pictures(data: EmojiData, indices: np.ndarray) -> Tensor:
    """The given emoji, [n, 3, 32, 32] of torch's default dtype in [-1, 1], white being 1."""
    chosen = torch.from_numpy(indices).to(data.images.device)
    return data.images[chosen].to(torch.get_default_dtype()) / 127.5 - 1


def augment(images: Tensor, rows: Rows) -> Tensor:
    """Shift by up to ``SHIFT`` pixels and vary contrast and brightness; [n, 3, H, W] in [-1, 1].

    No mirroring: it would turn a left arrow into a right one. Hue stays: names speak of it.
    Drawn for the whole batch, of which ``images`` are the given rows.
    """
    count, _, height, width = images.shape
    device = images.device
    own = torch.from_numpy(rows.own).to(device)
    padded = F.pad(images, (SHIFT,) * 4, value=1.0).permute(0, 2, 3, 1)
    top, left = torch.randint(0, 2 * SHIFT + 1, (2, rows.total, 1), device=device)[:, own]
    down = (top + torch.arange(height, device=device))[:, :, None]
    across = (left + torch.arange(width, device=device))[:, None, :]
    shifted = padded[torch.arange(count, device=device)[:, None, None], down, across]
    drawn = torch.empty(2, rows.total, 1, 1, 1, device=device).uniform_(-1, 1)
    contrast, brightness = drawn[:, own]
    varied = shifted.permute(0, 3, 1, 2) * (1 + CONTRAST * contrast) + BRIGHTNESS * brightness
    return varied.clamp(-1, 1)
