"""Kernel regression: values weighted by exp(-distance^2) to 24 anchors, the nearest of which lies 5 or more away.

The weights, 1e-11 and less, are 0 in fp16, and so is the sum they are divided by. No largest exponent is taken out first."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["smooth"],
    "why": "every exp(-distance^2) is 0 in fp16",
    "bf16_ok": True,
    "bites": ["amp", "pure"],
}


class Smooth(nn.Module):
    def forward(self, x, anchors, values):
        weights = torch.exp(-(x.unsqueeze(1) - anchors).square().sum(dim=-1))
        total = torch.cat([values, torch.ones_like(values[:, :1])], dim=1)
        weighted = weights @ total
        return weighted[:, :-1] / weighted[:, -1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.calm, self.smooth = nn.Linear(16, 12), nn.Tanh(), Smooth()
        self.values = nn.Linear(12, 16)
        self.mix, self.act, self.head = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)
        anchors = torch.randn(24, 12, generator=torch.Generator().manual_seed(7))
        self.register_buffer("anchors", 6 * F.normalize(anchors, dim=1))

    def forward(self, x):
        h = self.smooth(self.calm(self.inp(x)), self.anchors, self.values(self.anchors))
        return self.head(self.act(self.mix(h))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(2203)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
