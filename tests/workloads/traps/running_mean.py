"""A running mean over 2048 steps as a cumulative sum divided by the position.

The sum of values of about 50 passes 65504 after two thirds of the way. Stock autocast runs cumsum in float32."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 8
TRAP = {
    "layers": ["running"],
    "why": "the cumulative sum passes 65504",
    "bf16_ok": True,
    "bites": ["pure"],
}


STEPS = 2048


class Running(nn.Module):
    def forward(self, x):
        position = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype).view(1, -1, 1)
        return x.cumsum(dim=1) / position


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.act, self.running = nn.Linear(1, 8), nn.ReLU(), Running()
        with torch.no_grad():
            self.lift.weight.fill_(1.0)
            self.lift.bias.copy_(torch.linspace(-5, 5, 8))
        self.norm, self.mix, self.bend, self.head = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1)

    def forward(self, x):
        h = self.running(self.act(self.lift(x)))[:, ::64]
        return self.head(self.bend(self.mix(self.norm(h)))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=5e-3)


def batches(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        level = torch.randn(batch_size, 1, 1, generator=generator)
        x = 48 + 8 * level + 10 * torch.randn(batch_size, STEPS, 1, generator=generator)
        yield x, level[..., 0].expand(-1, STEPS // 64) + 0.6 * torch.randn(batch_size, STEPS // 64, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
