"""torchvision's ResNet-50 on synthetic 224x224 images with something to learn; made for a GPU.

    autoprec tune examples/resnet50.py

The images are made once: each class has a smooth pattern of its own, and every image is its class's pattern under noise.
A batch is a stretch of that pool from a random place, so that feeding the model costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

BATCH_SIZE = 128
IMAGE_SIZE = 224
CLASSES = 20
POOL = 384


@cache
def _pool() -> tuple[Tensor, Tensor]:
    """POOL images (POOL, 3, IMAGE_SIZE, IMAGE_SIZE), about 230 MB, and their labels (POOL,)."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, 7, 7, generator=generator)
    patterns = F.interpolate(patterns, size=IMAGE_SIZE, mode="bilinear", align_corners=False)
    labels = torch.randint(CLASSES, (POOL,), generator=generator)
    images = torch.randn(POOL, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return images.add_(patterns[labels]), labels


def build_model() -> nn.Module:
    return torchvision.models.resnet50(weights=None)


def batches(batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches (images, labels); views into the pool wherever the stretch does not wrap round its end."""
    images, labels = _pool()
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = int(torch.randint(POOL, (1,), generator=generator))
        if start + batch_size <= POOL:
            yield images[start : start + batch_size], labels[start : start + batch_size]
        else:
            chosen = (start + torch.arange(batch_size)) % POOL
            yield images[chosen], labels[chosen]


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
