"""A planted overflow: one layer's output passes 65504, fp16's largest number, and its reader scales it down again."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 32
GUILTY = "wide"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 32)
        self.wide = nn.Linear(32, 32)
        self.calm = nn.LayerNorm(32)
        self.body = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 1)
        with torch.no_grad():
            self.wide.weight.mul_(3e5)

    def forward(self, x):
        return self.head(self.body(self.calm(self.wide(F.gelu(self.stem(x)))))).squeeze(-1)


def build_model():
    return Net()


def batches(batch_size, seed):
    teacher = torch.randn(8, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 8, generator=generator)
        yield x, torch.sin(x @ teacher) + 0.1 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)
