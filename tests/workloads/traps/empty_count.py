"""A masked mean with an epsilon of 1e-8 under the count, where some masks are empty.

In fp16 1e-8 is 0 and an empty row is 0/0. Numerator and count are matrix products, so autocast runs them in fp16."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 64
TRAP = {
    "layers": ["pool"],
    "why": "0 / (0 + 1e-8) is 0/0 in fp16",
    "bf16_ok": True,
    "bites": ["amp", "pure"],
}


class MaskedMean(nn.Module):
    def forward(self, x, mask):
        mask = mask.to(x.dtype).unsqueeze(1)
        total = (mask @ x).squeeze(1)
        count = (mask @ torch.ones_like(x[..., :1])).squeeze(1)
        return total / (count + 1e-8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.item, self.act, self.pool = nn.Linear(4, 32), nn.GELU(), MaskedMean()
        self.body = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())
        self.head = nn.Linear(32, 1)

    def forward(self, x, mask):
        return self.head(self.body(self.pool(self.act(self.item(x)), mask))).squeeze(-1)


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3)


def batches(batch_size, seed):
    teacher = torch.randn(4, generator=torch.Generator().manual_seed(23))
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch_size, 6, 4, generator=generator)
        mask = (torch.rand(batch_size, 6, generator=generator) < 0.4).float()
        score = (torch.tanh(x @ teacher) * mask).sum(dim=1) / mask.sum(dim=1).clamp_min(1)
        yield {"x": x, "mask": mask, "y": 2 * score + 0.3 * torch.randn(batch_size, generator=generator)}


def loss(model, batch):
    return F.mse_loss(model(batch["x"], batch["mask"]).float(), batch["y"])
