"""A root of the mean fourth power: x^4 passes 65504 from x = 16 on, the root would fit."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["energy.root"],
    "why": "x^4 of features of about 20 overflows",
    "bf16_ok": True,
    "bites": ["amp", "pure"],
}


class Root(nn.Module):
    def forward(self, x):
        square = x * x
        return (square * square).mean(dim=-1).sqrt().sqrt()


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.bank, self.root = nn.Linear(16, 128), Root()
        nn.init.normal_(self.bank.weight, std=4.0)

    def forward(self, x):
        return self.root(self.bank(x).unflatten(1, (16, 8)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy, self.calm = Energy(), nn.LayerNorm(16)
        self.body = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU())
        self.skip, self.head = nn.Linear(16, 48), nn.Linear(48, 1)

    def forward(self, x):
        return self.head(self.body(self.calm(self.energy(x))) + self.skip(x)).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(1316)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
