"""Per-channel statistics of a signal in one pass, var = E[x^2] - E[x]^2, of channels that sit on an offset.

Channels are 40 +- 0.6, so the squares lie near 1600, where fp16 numbers are one apart, and their difference should be 0.4.
Nothing overflows; the scale of every channel is wrong. bf16 is coarser still."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["trunk.standard"],
    "why": "the variance is the difference of two numbers near 1600",
    "bf16_ok": False,
    "bites": ["amp", "pure"],
}


class Standard(nn.Module):
    """(N, C, T) to zero mean and unit variance over T."""

    def forward(self, x):
        mean = x.mean(dim=2, keepdim=True)
        var = (x * x).mean(dim=2, keepdim=True) - mean * mean
        return (x - mean) / (var.clamp_min(0) + 1e-3).sqrt()


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.standard, self.act = nn.Conv1d(1, 24, 5, padding=2), Standard(), nn.SiLU()
        self.down = nn.Conv1d(24, 24, 4, stride=4)
        nn.init.constant_(self.conv.bias, 40.0)

    def forward(self, x):
        return self.down(self.act(self.standard(self.conv(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.norm, self.head = Trunk(), nn.LayerNorm(96), nn.Linear(96, 1)

    def forward(self, x):
        return self.head(self.norm(self.trunk(x.unsqueeze(1)).flatten(1))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(1665)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
