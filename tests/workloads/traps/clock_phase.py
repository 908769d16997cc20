"""A clock of period 8 from positions counted in floating point, from 4000 on.

fp16 numbers lie 2 apart there, bf16 numbers 16: neighbours share a phase, or all of them do."""

import math

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 32
TRAP = {
    "layers": ["clock"],
    "why": "whole numbers over 2048 are not all fp16 numbers",
    "bf16_ok": False,
    "bites": ["amp", "pure"],
}

FIRST, LAST, PERIOD = 4000, 4032, 8


class Clock(nn.Module):
    """Adds sine and cosine of the position's phase to the first two features."""

    def forward(self, x):
        position = torch.arange(FIRST, LAST, device=x.device).to(x.dtype)
        phase = position.remainder(PERIOD) * (2 * math.pi / PERIOD)
        code = torch.stack([phase.sin(), phase.cos()], dim=-1).to(x.dtype)
        return x + F.pad(code, (0, x.shape[-1] - 2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.clock = nn.Linear(8, 32), Clock()
        self.mix, self.act, self.more = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 1)

    def forward(self, x):
        h = self.clock(self.inp(x))
        return self.head(self.norm(h + self.more(self.act(self.mix(h))))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    wave = torch.randn(PERIOD, generator=torch.Generator().manual_seed(2309))
    generator = torch.Generator().manual_seed(seed)
    beat = wave[torch.arange(FIRST, LAST) % PERIOD]
    while True:
        x = torch.randn(batch_size, LAST - FIRST, 8, generator=generator)
        noise = 0.3 * torch.randn(batch_size, LAST - FIRST, generator=generator)
        yield x, beat + torch.sin(x[..., 0]) + noise


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
