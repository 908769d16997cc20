"""A workload with a planted overflow, large enough for a GPU: one layer's output passes 65504, fp16's largest number.

    autoprec tune benchmarks/planted_overflow.py --search-space benchmarks/fp16_only.toml

Stock AMP in fp16 gives NaN in the first step. The layer after it normalises, so in FP32 the model trains as any other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_SIZE = 4096
WIDTH = 4096
FEATURES = 64


class Net(nn.Module):
    """Inputs (N, FEATURES) to one value each, (N,)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH)
        self.calm = nn.LayerNorm(WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, 1)
        with torch.no_grad():
            self.wide.weight.mul_(1e6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.calm(self.wide(F.gelu(self.stem(x)))))).squeeze(-1)


def build_model() -> nn.Module:
    return Net()


def batches(batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    teacher = torch.randn(FEATURES, generator=torch.Generator().manual_seed(7)) / 8
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, FEATURES, generator=generator)
        yield x, torch.sin(2 * x @ teacher) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
