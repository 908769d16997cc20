"""A square of what a norm with a large gain gives, up to 1e6.

Under stock autocast the norm answers in float32 and the square is taken there; where the norm itself runs in half, it is not."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["square"],
    "why": "the square of a norm's output overflows where the norm answers in fp16",
    "bf16_ok": True,
    "bites": ["pure"],
}


class Square(nn.Module):
    def forward(self, x):
        return x * x.abs() / 2**16


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.square = nn.Linear(16, 48), nn.LayerNorm(48), Square()
        nn.init.constant_(self.norm.weight, 400.0)
        self.mix, self.act, self.head = nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1)

    def forward(self, x):
        return self.head(self.act(self.mix(self.square(self.norm(self.inp(x)))))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(1722)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
