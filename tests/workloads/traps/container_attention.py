"""A container that owns the projections and multiplies queries and keys itself, before it scales.

The products reach 2e5; the module divides afterwards. The projections inside it are harmless, so the container has to be lifted
and its children not."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["blocks.0.cross"],
    "why": "the container's own einsum of queries and keys passes 65504",
    "bf16_ok": True,
    "bites": ["amp", "pure"],
}


class Cross(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ask, self.tell, self.give = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        for layer in (self.ask, self.tell):
            nn.init.normal_(layer.weight, std=10.0)

    def forward(self, x, memory):
        score = torch.einsum("bqd,bkd->bqk", self.ask(x), self.tell(memory)) / 30000
        return torch.einsum("bqk,bkd->bqd", score.softmax(dim=-1), self.give(memory))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.cross, self.act, self.mix = nn.LayerNorm(dim), Cross(dim), nn.GELU(), nn.Linear(dim, dim)

    def forward(self, x, memory):
        return x + self.mix(self.act(self.cross(self.norm(x), memory)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.memory = nn.Linear(4, 48), nn.Linear(4, 48)
        self.calm = nn.LayerNorm(48)
        self.blocks = nn.ModuleList([Block(48)])
        self.head = nn.Linear(4 * 48, 1)

    def forward(self, x):
        points = x.view(-1, 4, 4)
        h, memory = self.embed(points), self.calm(self.memory(points))
        for block in self.blocks:
            h = block(h, memory)
        return self.head(h.flatten(1)).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(2040)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
