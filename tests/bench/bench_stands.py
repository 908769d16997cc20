"""A small net and its data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ConvNet(nn.Module):
    """Convolution, batch norm, dropout and two linear layers: what most nets have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.1)
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(torch.relu(self.hidden(self.drop(x))))  # type: ignore[no-any-return]


def image_batches(batch_size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    while True:
        labels = torch.randint(0, 3, (batch_size,), generator=generator)
        yield torch.randn(batch_size, 1, 6, 6, generator=generator) + labels.view(-1, 1, 1, 1), labels
