"""A level of about 16 to which 48 small steps are added one by one.

Half of fp16's spacing at 16 is 1/128, and the steps are smaller: they vanish one by one, though their sum would count. bf16 is worse."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["level"],
    "why": "steps under half of fp16's spacing are lost when they are added to 16",
    "bf16_ok": False,
    "bites": ["amp", "pure"],
}

STEPS = 48


class Level(nn.Module):
    """How far a level has moved from its start after all steps."""

    def forward(self, x):
        start = x.new_full((x.shape[0], x.shape[2]), 16.0)
        level = start
        for step in x.unbind(dim=1):
            level = level + 0.003 * step
        return 8 * (level - start)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.calm, self.level = nn.Linear(4, 8), nn.Tanh(), Level()
        self.mix, self.act, self.head = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.act(self.mix(self.level(self.calm(self.inp(x)))))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        drift = torch.randn(batch_size, 1, 4, generator=generator)
        x = drift + 0.5 * torch.randn(batch_size, STEPS, 4, generator=generator)
        yield x, drift[:, 0, 0] - drift[:, 0, 1] + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
