"""A deep, narrow encoder: 48 blocks, about 350 layers. For what profiling and solving cost in a model of many layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

BATCH_SIZE = 16
LENGTH, WIDTH, CLASSES = 256, 512, 10


class Deep(nn.Module):
    """Vectors (batch, length, width) to class logits."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 48, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)).mean(1))


def build_model() -> nn.Module:
    return Deep()


def batches(batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (vectors, classes); each class shifts the mean."""
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(CLASSES, 1, WIDTH, generator=torch.Generator().manual_seed(0))
    while True:
        y = torch.randint(CLASSES, (batch_size,), generator=generator)
        yield torch.randn(batch_size, LENGTH, WIDTH, generator=generator) + means[y], y


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=torch.cuda.is_available())
