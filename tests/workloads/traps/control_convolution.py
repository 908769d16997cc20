"""Control: a small convolution net with batch norm, pooling and a residual; nothing is planted."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE = 32
TRAP = {
    "layers": [],
    "why": "no trap",
    "bf16_ok": True,
    "bites": [],
}


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(x + self.bn2(self.conv2(self.act(self.bn1(self.conv1(x))))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn, self.act = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.block, self.pool, self.head = Residual(16), nn.AdaptiveAvgPool2d(2), nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.pool(self.block(self.act(self.bn(self.stem(x))))).flatten(1))


def build_model():
    return Model()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def batches(batch_size, seed):
    shapes = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(37))
    generator = torch.Generator().manual_seed(seed)
    while True:
        y = torch.randint(4, (batch_size,), generator=generator)
        yield shapes[y] + 2.5 * torch.randn(batch_size, 1, 8, 8, generator=generator), y


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).float(), y)
