"""A UNet with GroupNorm and attention, as image diffusion uses it, predicting the noise in synthetic images; made for a GPU.

    autoprec tune benchmarks/workloads/unet.py

Images 3 x 64 x 64, batches of 64, three levels of 128, 256 and 256 channels, 32 groups, self-attention at the lowest level.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_SIZE = 64
SIZE, CHANNELS, GROUPS = 64, (128, 256, 256), 32


class Residual(nn.Module):
    """GroupNorm, SiLU, convolution, twice, with a skip connection."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.time = nn.Linear(CHANNELS[0], outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    """Self-attention over the pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.flatten(2).transpose(1, 2)[:, None] for part in self.qkv(self.norm(x)).chunk(3, 1))
        y = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class UNet(nn.Module):
    """Noisy images (batch, 3, size, size) and times (batch, channels) to the noise."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = CHANNELS
        self.stem = nn.Conv2d(3, first, 3, padding=1)
        self.down1, self.down2 = Residual(first, first), Residual(first, second)
        self.low1, self.attention, self.low2 = Residual(second, third), Attention(third), Residual(third, third)
        self.up2, self.up1 = Residual(third + second, second), Residual(second + first, first)
        self.norm, self.head = nn.GroupNorm(GROUPS, first), nn.Conv2d(first, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        a = self.down1(self.stem(x), time)
        b = self.down2(F.avg_pool2d(a, 2), time)
        c = self.low2(self.attention(self.low1(F.avg_pool2d(b, 2), time)), time)
        d = self.up2(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1), time)
        e = self.up1(torch.cat([F.interpolate(d, scale_factor=2.0), a], 1), time)
        return self.head(F.silu(self.norm(e)))


def build_model() -> nn.Module:
    return UNet()


def batches(batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless (noisy images, times, noise)."""
    generator = torch.Generator().manual_seed(seed)
    frequencies = torch.arange(CHANNELS[0] // 2) / 8
    while True:
        smooth = F.interpolate(torch.randn(batch_size, 3, 8, 8, generator=generator), size=SIZE, mode="bilinear")
        noise = torch.randn(batch_size, 3, SIZE, SIZE, generator=generator)
        level = torch.rand(batch_size, 1, generator=generator)
        time = torch.cat([(8 * level * frequencies).sin(), (8 * level * frequencies).cos()], 1)
        share = level[:, :, None, None]
        yield (1 - share).sqrt() * smooth + share.sqrt() * noise, time, noise


def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    noisy, time, noise = batch
    return F.mse_loss(model(noisy, time), noise)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-4, fused=torch.cuda.is_available())
