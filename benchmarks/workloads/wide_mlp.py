"""An MLP that is nothing but matrix products, on synthetic data with something to learn: the device is the limit, on any machine.

    python benchmarks/repeatability.py aa benchmarks/workloads/wide_mlp.py --out reports/repeatability

On a CUDA device batches of 8192 and layers 4096 wide; on a CPU 256 and 512.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

BATCH_SIZE, WIDTH = (8192, 4096) if torch.cuda.is_available() else (256, 512)
FEATURES, CLASSES = 256, 16


def build_model() -> nn.Module:
    """Features (batch, FEATURES) to logits (batch, CLASSES)."""
    wide = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), *wide, nn.Linear(WIDTH, CLASSES))


def batches(batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (features, labels); a label is the largest of the first CLASSES features."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        features = torch.randn(batch_size, FEATURES, generator=generator)
        yield features, features[:, :CLASSES].argmax(dim=1)
