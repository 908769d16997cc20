"""The angle between two directions that differ by about 0.05, as the arc cosine of their product.

The cosine, 0.999, is rounded by 1/2000 in fp16: to 1, where the angle has no slope, or above, where it is no number."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["angle"],
    "why": "the arc cosine of a rounded number near 1",
    "bf16_ok": False,
    "bites": ["amp", "pure"],
}


class Angle(nn.Module):
    """20 times the angle between directions given as angles on a torus of four circles."""

    def forward(self, x, y):
        cosine = x.cos() * y.cos() + x.sin() * y.sin()
        return 20 * torch.acos(cosine)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.calm = nn.Linear(16, 24), nn.Tanh()
        self.offset, self.angle = nn.Linear(16, 24), Angle()
        self.mix, self.act, self.head = nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 1)

    def forward(self, x):
        where = self.calm(self.inp(x))
        away = 0.03 + 0.05 * torch.sigmoid(self.offset(x))
        return self.head(self.act(self.mix(self.angle(where, where + away)))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(2411)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
