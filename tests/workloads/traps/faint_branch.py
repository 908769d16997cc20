"""A second branch behind a gain of 2^-30 that has to grow.

Adam grows it whatever the size of its gradient. In pure fp16 the gain and its gradient are 0, and the branch stays off; under
stock autocast the float32 parameter keeps the product in float32."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["branch.gain"],
    "why": "a gain of 2^-30 and its gradient are 0 in fp16",
    "bf16_ok": True,
    "bites": ["pure"],
}


class Gain(nn.Module):
    """Scales by 2^power."""

    def __init__(self):
        super().__init__()
        self.power = nn.Parameter(torch.full((1,), -30.0))

    def forward(self, x):
        return x * torch.exp2(self.power)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.act, self.out, self.gain = nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1), Gain()

    def forward(self, z):
        return self.gain(z.sum(dim=1, keepdim=True) + self.out(self.act(self.inp(z))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(8, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
        self.branch = Branch()

    def forward(self, x):
        return (self.base(x[:, :8]) + self.branch(x[:, 8:])).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    power = model.branch.gain.power
    rest = [parameter for parameter in model.parameters() if parameter is not power]
    return torch.optim.Adam([{"params": [power], "lr": 1.0}, {"params": rest, "lr": 2e-3}], eps=1e-20)


def batches(batch_size, seed):
    teacher = torch.randn(8, generator=torch.Generator().manual_seed(17)) / 3
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        y = torch.sin(2 * x[:, :8] @ teacher) + 0.6 * x[:, 8:].sum(dim=1)
        yield x, y + 0.4 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
