"""The log of a product of 32 factors of about a half, multiplied in pairs of halves.

The product, about 1e-10, is 0 in fp16 and its log infinite. Products by hand are not among the operations autocast promotes."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["chance"],
    "why": "a product of 32 factors of a half is 0 in fp16",
    "bf16_ok": True,
    "bites": ["amp", "pure"],
}


class Chance(nn.Module):
    """The log of the chance that all of them happen, over the number of factors."""

    def forward(self, x):
        product = x
        while product.shape[-1] > 1:
            first, second = product.chunk(2, dim=-1)
            product = first * second
        return torch.log(product) / x.shape[-1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.squash, self.chance = nn.Linear(16, 4 * 32), nn.Sigmoid(), Chance()
        self.mix, self.act, self.head = nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 1)

    def forward(self, x):
        chances = self.squash(self.inp(x)).view(-1, 4, 32)
        return self.head(self.act(self.mix(4 * self.chance(chances).squeeze(-1)))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(2111)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
