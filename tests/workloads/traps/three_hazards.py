"""Three hazards of three kinds in a row of blocks: a square, a difference of squares, and a sum by a matrix product."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["first.power", "second.spread", "third.total"],
    "why": "squares over 65504; E[x^2] - E[x]^2 at an offset; a sum over 512 values of 200",
    "bf16_ok": False,
    "bites": ["amp", "pure"],
}


class Power(nn.Module):
    def forward(self, x):
        return torch.sign(x) * torch.log1p(x * x)


class Spread(nn.Module):
    """Rows to zero mean and unit variance, in one pass."""

    def forward(self, x):
        mean = x.mean(dim=1, keepdim=True)
        var = (x * x).mean(dim=1, keepdim=True) - mean * mean
        return (x - mean) * (var.clamp_min(0) + 1e-2).rsqrt()


class Total(nn.Module):
    def forward(self, x):
        return x @ torch.ones(x.shape[-1], 1, dtype=x.dtype, device=x.device) / x.shape[-1]


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.power, self.norm = nn.Linear(16, 64), Power(), nn.LayerNorm(64)
        nn.init.normal_(self.inp.weight, std=60.0)

    def forward(self, x):
        return self.norm(self.power(self.inp(x)))


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.spread, self.mix, self.act = nn.Linear(64, 64), Spread(), nn.Linear(64, 32), nn.GELU()
        nn.init.normal_(self.lift.weight, std=0.1)
        nn.init.constant_(self.lift.bias, 80.0)

    def forward(self, x):
        return self.act(self.mix(self.spread(self.lift(x))))


class Third(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.total = nn.Linear(32, 512), Total()
        nn.init.normal_(self.wide.weight, std=2.0)
        nn.init.constant_(self.wide.bias, 200.0)

    def forward(self, x):
        return self.total(self.wide(x)) - 200


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = First(), Second(), Third()

    def forward(self, x):
        return self.third(self.second(self.first(x))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(1380)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
