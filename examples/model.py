"""Two small towers: a residual CNN for pictures and a bag of hashed n-grams for texts."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from emoji_data import BUCKETS
from ranks import BatchNorm2d, Dropout, Rows

DIM = 128
WIDTH = 32
LARGE_WIDTH = 64
GROUPS = 8
TEXT_WIDTH = 192
DROPOUT = 0.1
TEXT_DROPOUT = 0.2
EMBEDDING_STD = 0.3


Norm = Callable[[int], nn.Module]  # of so many channels


def group_norm(channels: int) -> nn.GroupNorm:
    """What to take where a batch runs in chunks: a picture's output depends on no other."""
    return nn.GroupNorm(GROUPS, channels)


class Residual(nn.Module):
    """[B, C, H, W] -> [B, C, H, W]: two 3x3 convolutions beside an identity."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            norm(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            norm(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def downsample(inputs: int, outputs: int, kernel: int, norm: Norm) -> nn.Sequential:
    """[B, inputs, H, W] -> [B, outputs, H/2, W/2]."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2 - 1, bias=False),
        norm(outputs),
        nn.ReLU(),
    )


class ImageTower(nn.Module):
    """[B, 3, 32, 32] -> [B, DIM]; one head sees where things are, one only what there is."""

    def __init__(self, width: int = WIDTH, norm: Norm = BatchNorm2d) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            downsample(3, width, kernel=4, norm=norm),
            Residual(width, norm),
            downsample(width, 2 * width, kernel=2, norm=norm),
            Residual(2 * width, norm),
            downsample(2 * width, 4 * width, kernel=2, norm=norm),
            Residual(4 * width, norm),
        )
        cells = (32 // 8) ** 2
        self.dropout = Dropout(DROPOUT)
        self.placed = nn.Linear(4 * width * cells, DIM)
        self.pooled = nn.Linear(4 * width, DIM)

    def forward(self, images: Tensor, rows: Rows | None = None) -> Tensor:
        features = self.trunk(images)
        placed = self.placed(self.dropout(features.flatten(1), rows))
        return placed + self.pooled(features.mean((2, 3)))


class TextTower(nn.Module):
    """Buckets [total] and offsets [B] of hashed captions -> [B, DIM]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(BUCKETS, TEXT_WIDTH, mode="mean")
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        self.norm = nn.LayerNorm(TEXT_WIDTH)
        self.dropout = Dropout(TEXT_DROPOUT)
        self.hidden = nn.Linear(TEXT_WIDTH, 2 * TEXT_WIDTH)
        self.output = nn.Linear(2 * TEXT_WIDTH, DIM)

    def forward(self, buckets: Tensor, offsets: Tensor, rows: Rows | None = None) -> Tensor:
        words = self.dropout(self.norm(self.embedding(buckets, offsets)), rows)
        return self.output(self.dropout(F.gelu(self.hidden(words)), rows))


class TwoTower(nn.Module):
    """Both towers; features are left as they are, since the loss normalises them."""

    def __init__(self, image: ImageTower) -> None:
        super().__init__()
        self.image = image
        self.text = TextTower()
