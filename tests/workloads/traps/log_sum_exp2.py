"""A smooth maximum over time, written as log2 of a sum of powers of two.

Scores spread to 20 and more, and 2^16 is over 65504. CUDA's autocast has exp and log on its float32 list, but not exp2."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["pool"],
    "why": "exp2 of scores above 16 overflows",
    "bf16_ok": True,
    "bites": ["amp", "pure"],
}


class SmoothMax(nn.Module):
    def forward(self, x):
        return torch.log2(torch.exp2(x).sum(dim=1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.act, self.score = nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32)
        nn.init.normal_(self.score.weight, std=2.0)
        self.pool, self.norm, self.head = SmoothMax(), nn.LayerNorm(32), nn.Linear(32, 1)

    def forward(self, x):
        h = self.score(self.act(self.embed(x.view(-1, 4, 4))))
        return self.head(self.norm(self.pool(h))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(1236)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
