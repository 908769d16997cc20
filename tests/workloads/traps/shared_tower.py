"""One tower read by two inputs; the energy inside it overflows for one of them only.

The second input is ten times as large. The tower's module is one layer that runs twice, so it is lifted once for both."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["tower.energy"],
    "why": "the second input's squares overflow, the first one's do not",
    "bf16_ok": True,
    "bites": ["amp", "pure"],
}


class Energy(nn.Module):
    def forward(self, x):
        return torch.sign(x) * torch.log(1 + x * x / 4)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.energy, self.norm, self.out = nn.Linear(8, 48), Energy(), nn.LayerNorm(48), nn.Linear(48, 32)
        nn.init.normal_(self.inp.weight, std=1.0)

    def forward(self, x):
        return self.out(self.norm(self.energy(self.inp(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.act, self.head = Tower(), nn.GELU(), nn.Linear(64, 1)

    def forward(self, x):
        left, right = self.tower(x[:, :8]), self.tower(120 * x[:, 8:])
        return self.head(self.act(torch.cat([left, right], dim=1))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(1287)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
