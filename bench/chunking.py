"""Ways to take a contrastive step through an encoder whose activations are many.

Each is a function of an encoder, a batch of token ids for each side and a chunk size that leaves
the step's gradients in the encoder's parameters and returns the loss.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import infloss

SCALE = 20.0
VOCABULARY = 1024
Way = Callable[[nn.Module, Tensor, Tensor, int], Tensor]


class TextEncoder(nn.Module):
    """[B, L] token ids -> [B, dim]: a transformer and the mean over its tokens."""

    def __init__(self, dim: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.embedding(ids)).mean(1)


def dense_loss(x: Tensor, y: Tensor) -> Tensor:
    """The symmetric loss with its B x B logits."""
    logits = SCALE * F.normalize(x) @ F.normalize(y).T
    target = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def tiled_loss(x: Tensor, y: Tensor) -> Tensor:
    """The same without them."""
    return infloss.contrastive_loss(x, y, SCALE)


def one_piece(encoder: nn.Module, x: Tensor, y: Tensor, chunk: int) -> Tensor:
    """The whole batch in one graph."""
    loss = dense_loss(encoder(x), encoder(y))
    loss.backward()
    return loss.detach()


def checkpointed(encoder: nn.Module, x: Tensor, y: Tensor, chunk: int) -> Tensor:
    """Gradient checkpointing of the encoder, chunk by chunk, in one graph."""

    def encode(ids: Tensor) -> Tensor:
        parts = [checkpoint(encoder, part, use_reentrant=False) for part in ids.split(chunk)]
        return torch.cat(parts)

    loss = dense_loss(encode(x), encode(y))
    loss.backward()
    return loss.detach()


def grad_cache(encoder: nn.Module, x: Tensor, y: Tensor, chunk: int) -> Tensor:
    """The gradient cache as its authors' class computes it, with its dense loss."""
    with torch.no_grad():
        sides = [torch.cat([encoder(part) for part in ids.split(chunk)]) for ids in (x, y)]
    leaves = [side.requires_grad_() for side in sides]
    loss = dense_loss(*leaves)
    loss.backward()
    for ids, leaf in zip((x, y), leaves, strict=True):
        assert leaf.grad is not None
        for part, grad in zip(ids.split(chunk), leaf.grad.split(chunk), strict=True):
            torch.dot(encoder(part).flatten(), grad.flatten()).backward()
    return loss.detach()


def cached(encoder: nn.Module, x: Tensor, y: Tensor, chunk: int) -> Tensor:
    """infloss: the cached loss over the tiled one."""
    loss: Tensor = infloss.cached_loss(tiled_loss, [(encoder, x, chunk), (encoder, y, chunk)])
    loss.backward()
    return loss.detach()


class _Pooled(nn.Module):
    """An encoder as a part of a sentence-transformers model."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: dict[str, Tensor], **_: object) -> dict[str, Tensor]:
        return {**features, "sentence_embedding": self.encoder(features["input_ids"])}


def _sentences(encoder: nn.Module) -> nn.Module:
    package = importlib.import_module("sentence_transformers")
    device = next(encoder.parameters()).device
    model: nn.Module = package.SentenceTransformer(modules=[_Pooled(encoder)], device=str(device))
    return model


def sentence_transformers(encoder: nn.Module, x: Tensor, y: Tensor, chunk: int) -> Tensor:
    """Its CachedMultipleNegativesSymmetricRankingLoss."""
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    loss_fn = losses.CachedMultipleNegativesSymmetricRankingLoss(
        _sentences(encoder), scale=SCALE, mini_batch_size=chunk
    )
    features = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in (x, y)]
    loss: Tensor = loss_fn(features, torch.empty(0))
    loss.backward()
    return loss.detach()


WAYS: dict[str, Way] = {
    "infloss.cached_loss": cached,
    "GradCache": grad_cache,
    "sentence-transformers": sentence_transformers,
    "checkpointing": checkpointed,
    "one piece": one_piece,
}


def available() -> Iterator[str]:
    """The ways whose packages are here."""
    for name in WAYS:
        if name == "sentence-transformers":
            try:
                importlib.import_module("sentence_transformers")
            except ImportError:
                continue
        yield name
