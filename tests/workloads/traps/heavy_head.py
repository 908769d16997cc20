"""Two heads on one trunk; the loss of one is weighted with the inverse variance of a target of 1e-6.

The gradient at its output is about 1e5 and overflows at every loss scale that leaves the trunk's gradients above 0."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 16
TRAP = {
    "layers": ["rate"],
    "why": "its output gradient overflows at every scale the trunk can live with",
    "bf16_ok": True,
    "bites": ["amp", "pure"],
}


class Rate(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1e-6


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.act, self.mid, self.bend = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.LeakyReLU(0.1)
        self.norm, self.kind, self.rate = nn.LayerNorm(32), nn.Linear(32, 4), Rate(32, 1)
        nn.init.normal_(self.inp.weight, std=0.5)
        nn.init.normal_(self.mid.weight, std=1.0)

    def forward(self, x):
        h = self.norm(self.bend(self.mid(self.act(self.inp(500 * x)))))
        return self.kind(h), self.rate(h.mean(dim=1)).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def batches(batch_size, seed):
    teacher = torch.randn(16, 4, generator=torch.Generator().manual_seed(31))
    generator = torch.Generator().manual_seed(seed)
    while True:
        shift = 0.5 * torch.randn(batch_size, 1, 16, generator=generator)
        x = shift + torch.randn(batch_size, 256, 16, generator=generator)
        score = x @ teacher
        kind = (score + torch.randn(score.shape, generator=generator)).argmax(dim=-1)
        yield {"x": x, "kind": kind, "rate": 1e-6 * (2 + score[..., 0].mean(dim=1) / 2)}


def loss(model, batch):
    logits, rate = model(batch["x"])
    kind = F.cross_entropy(logits.float().flatten(0, 1), batch["kind"].flatten())
    return kind + 1e12 * F.mse_loss(rate.float(), batch["rate"])
