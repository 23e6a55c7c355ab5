"""Two small towers: a residual CNN for pictures and a bag of hashed n-grams for texts."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from emoji_data import BUCKETS

DIM = 128
WIDTH = 32
TEXT_WIDTH = 192
DROPOUT = 0.1
TEXT_DROPOUT = 0.2
EMBEDDING_STD = 0.3


class Residual(nn.Module):
    """[B, C, H, W] -> [B, C, H, W]: two 3x3 convolutions beside an identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def downsample(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """[B, inputs, H, W] -> [B, outputs, H/2, W/2]."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2 - 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class ImageTower(nn.Module):
    """[B, 3, 32, 32] -> [B, DIM]; one head sees where things are, one only what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            downsample(3, WIDTH, kernel=4),
            Residual(WIDTH),
            downsample(WIDTH, 2 * WIDTH, kernel=2),
            Residual(2 * WIDTH),
            downsample(2 * WIDTH, 4 * WIDTH, kernel=2),
            Residual(4 * WIDTH),
        )
        cells = (32 // 8) ** 2
        self.placed = nn.Sequential(
            nn.Flatten(), nn.Dropout(DROPOUT), nn.Linear(4 * WIDTH * cells, DIM)
        )
        self.pooled = nn.Linear(4 * WIDTH, DIM)

    def forward(self, images: Tensor) -> Tensor:
        features = self.trunk(images)
        return self.placed(features) + self.pooled(features.mean((2, 3)))

    def forward_in_chunks(self, images: Tensor, size: int) -> Tensor:
        """The same in chunks of ``size`` whose activations backward computes again.

        Memory is that of one chunk. Batch norm sees each chunk by itself.
        """
        chunks = [checkpoint(self, chunk, use_reentrant=False) for chunk in images.split(size)]
        return torch.cat(chunks)


class TextTower(nn.Module):
    """Buckets [total] and offsets [B] of hashed captions -> [B, DIM]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(BUCKETS, TEXT_WIDTH, mode="mean")
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        self.head = nn.Sequential(
            nn.LayerNorm(TEXT_WIDTH),
            nn.Dropout(TEXT_DROPOUT),
            nn.Linear(TEXT_WIDTH, 2 * TEXT_WIDTH),
            nn.GELU(),
            nn.Dropout(TEXT_DROPOUT),
            nn.Linear(2 * TEXT_WIDTH, DIM),
        )

    def forward(self, buckets: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.embedding(buckets, offsets))


class TwoTower(nn.Module):
    """Both towers; features are left as they are, since the loss normalises them."""

    def __init__(self) -> None:
        super().__init__()
        self.image = ImageTower()
        self.text = TextTower()
