"""A slope taken as a finite difference, (f(x + h) - f(x)) / h with h = 1/1024.

Both values are about 1, where fp16 numbers lie 1/1024 apart: the slope comes out as whole numbers. bf16 gives 0 or 8."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["slope"],
    "why": "f(x + h) - f(x) is as small as fp16's rounding of f",
    "bf16_ok": False,
    "bites": ["amp", "pure"],
}


class Slope(nn.Module):
    def forward(self, x):
        step = 1 / 1024
        return (torch.sin(x + step) - torch.sin(x)) / step


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.slope = nn.Linear(16, 48), Slope()
        nn.init.normal_(self.inp.weight, std=0.3)
        self.mix, self.act, self.head = nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1)

    def forward(self, x):
        h = self.slope(self.inp(x))
        return self.head(h + self.act(self.mix(h))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(1769)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
