"""Two unrelated hazards eight layers apart: powers of two in the stem, a masked count of zero at the end.

Each alone keeps the loss at NaN or infinity."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["stem.level", "finish.share"],
    "why": "2^x of levels up to 20; a share of a count that may be zero",
    "bf16_ok": True,
    "bites": ["amp", "pure"],
}


class Level(nn.Module):
    def forward(self, x):
        return torch.log2(1 + torch.exp2(x))


class Share(nn.Module):
    """Rectified votes as shares of their sum; all of them may be zero."""

    def forward(self, x):
        votes = x.relu()
        return votes / (votes @ torch.ones(x.shape[-1], 1, dtype=x.dtype, device=x.device) + 1e-9)


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.level, self.norm = nn.Linear(16, 48), Level(), nn.LayerNorm(48)
        nn.init.normal_(self.inp.weight, std=2.0)

    def forward(self, x):
        return self.norm(self.level(self.inp(x)))


class Finish(nn.Module):
    def __init__(self):
        super().__init__()
        self.votes, self.share, self.head = nn.Linear(48, 6), Share(), nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.share(self.votes(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Stem()
        self.body = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(48, 48), nn.GELU())), nn.LayerNorm(48))
        self.finish = Finish()

    def forward(self, x):
        return self.finish(self.body(self.stem(x))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    teacher = torch.randn(16, 3, generator=torch.Generator().manual_seed(867)) / 4
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, torch.sin(x @ teacher).sum(dim=1) + 0.3 * torch.randn(batch_size, generator=generator)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x).float(), y)
