"""Cosine similarity by hand between vectors with entries of about 1e-4.

Their squares, 1e-8, are 0 in fp16, so the norms are 0 and the similarity infinite."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["match"],
    "why": "squares of entries of 1e-4 are 0 in fp16",
    "bf16_ok": True,
    "bites": ["amp", "pure"],
}


class Match(nn.Module):
    def forward(self, x, y):
        product = (x * y).sum(dim=-1)
        return product / ((x * x).sum(dim=-1).sqrt() * (y * y).sum(dim=-1).sqrt() + 1e-12)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 32))
        self.codes = nn.Linear(16, 32)
        with torch.no_grad():
            for layer in (self.left[2], self.codes):
                layer.weight.mul_(6e-4)
                layer.bias.zero_()
        self.match, self.head = Match(), nn.Linear(16, 1)
        self.register_buffer("anchors", torch.randn(16, 16, generator=torch.Generator().manual_seed(5)))

    def forward(self, x):
        return self.head(self.match(self.left(x).unsqueeze(1), self.codes(self.anchors))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    small = [*model.left[2].parameters(), *model.codes.parameters()]
    rest = [*model.left[0].parameters(), *model.head.parameters()]
    return torch.optim.Adam([{"params": small, "lr": 1e-6}, {"params": rest, "lr": 5e-3}], eps=1e-20)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(29)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
