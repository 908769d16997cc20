"""Control: layers that look dangerous and are not.

Exponentials of what is never positive, values up to 3000, and a sharp softmax."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": [],
    "why": "no trap",
    "bf16_ok": True,
    "bites": [],
}


class Bump(nn.Module):
    def forward(self, x):
        return torch.exp(-x * x)


class Attention(nn.Module):
    def forward(self, q, k, v):
        return torch.softmax(q @ k.transpose(1, 2) / 6, dim=-1) @ v


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.bump = nn.Linear(4, 32), Bump()
        self.wide, self.calm = nn.Linear(32, 32), nn.LayerNorm(32)
        nn.init.normal_(self.wide.weight, std=200.0)
        self.q, self.k, self.v, self.attend = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), Attention()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(4 * 32, 1)

    def forward(self, x):
        h = self.calm(self.wide(self.bump(self.inp(x.view(-1, 4, 4)))))
        h = self.norm(h + self.attend(self.q(h), self.k(h), self.v(h)))
        return self.head(h.flatten(1)).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(1511)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
