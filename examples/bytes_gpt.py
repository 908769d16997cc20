"""A byte-level GPT that learns the source text of Python's own standard library: real data, no download.

autoprec tune examples/bytes_gpt.py --gpu 4090d
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_SIZE = 16
GRAD_CLIP = 1.0
CONTEXT = 128
WIDTH = 128
HEADS = 4
DEPTH = 4
VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention over (N, T, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = (part.view(n, t, HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(n, t, WIDTH))


class Block(nn.Module):
    """Pre-norm transformer block over (N, T, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class BytesGPT(nn.Module):
    """Bytes (N, T) to logits (N, T, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@cache
def _text() -> Tensor:
    """The standard library's top-level modules as one run of bytes (N,), in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    raw = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(raw) < 100_000:
        raise RuntimeError(
            f"only {len(raw)} bytes of Python sources in {folder}; this example needs the standard library's .py files"
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def build_model() -> nn.Module:
    return BytesGPT()


def batches(batch_size: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of CONTEXT + 1 bytes from random places, (batch_size, CONTEXT + 1) of int64."""
    text = _text()
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(CONTEXT + 1)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (batch_size, 1), generator=generator)
        yield text[starts + window].long()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
