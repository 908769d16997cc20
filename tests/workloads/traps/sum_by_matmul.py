"""The mean over points as a product with a row of ones, divided afterwards.

4096 features of about 25 add up to 1e5. Autocast runs `sum` in float32, but a matrix product in fp16."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 8
TRAP = {
    "layers": ["gather"],
    "why": "a product with 4096 ones passes 65504 before it is divided",
    "bf16_ok": True,
    "bites": ["amp", "pure"],
}


POINTS = 4096


class Gather(nn.Module):
    def forward(self, x):
        ones = torch.ones(1, x.shape[1], dtype=x.dtype, device=x.device)
        return (ones @ x).squeeze(1) / (16 * x.shape[1])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.point, self.act, self.gather = nn.Linear(1, 8), nn.ReLU(), Gather()
        with torch.no_grad():
            self.point.weight.fill_(1.0)
            self.point.bias.copy_(torch.linspace(-8, 16, 8))
        self.wide, self.bend, self.head = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.bend(self.wide(self.gather(self.act(self.point(x)))))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def batches(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        centre = torch.randn(batch_size, 1, generator=generator)
        width = 3 + 9 * torch.rand(batch_size, 1, generator=generator)
        points = 20 + 2 * centre + width * torch.randn(batch_size, POINTS, generator=generator)
        y = centre.squeeze(1) + (width.squeeze(1) - 7.5) / 4
        yield points.unsqueeze(2), y + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
