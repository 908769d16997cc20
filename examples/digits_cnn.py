"""A small BatchNorm ResNet on scikit-learn's handwritten digits: real data, no download, seconds on a CPU.

autoprec tune examples/digits_cnn.py --gpu 4090d
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH_SIZE = 64
CLASSES = 10


class Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut; (N, in, H, W) to (N, out, H / stride, W / stride)."""

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width_out)
        same = stride == 1 and width_in == width_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(width_in, width_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class DigitsNet(nn.Module):
    """Images (N, 1, 16, 16) to logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.stages = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 64, 2))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean(dim=(2, 3)))


@cache
def _digits() -> tuple[Tensor, Tensor]:
    """All 1,797 images as (N, 1, 16, 16), roughly zero mean and unit variance, and their labels (N,)."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(images, scale_factor=2.0, mode="bilinear", align_corners=False)
    return (images - images.mean()) / images.std(), torch.tensor(data.target, dtype=torch.long)


def build_model() -> nn.Module:
    return DigitsNet()


def batches(batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless shuffled batches; each pass over the data has an order of its own."""
    images, labels = _digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    while True:
        while len(order) < batch_size:
            order = torch.cat([order, torch.randperm(len(labels), generator=generator)])
        chosen, order = order[:batch_size], order[batch_size:]
        yield images[chosen], labels[chosen]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy with smoothed labels: it ends near 0.5 instead of near 0, where two runs cannot be told apart from noise."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
