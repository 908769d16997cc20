"""A decoder of GPT-2's layout at its full 124M size, on synthetic text with something to learn; made for a GPU.

    autoprec tune benchmarks/workloads/gpt2.py

Vocabulary 50257, 12 layers of width 768, batches of 8 x 1024 tokens, the head tied to the embedding, fused AdamW. The text counts in
steps: each row starts somewhere and goes on by a stride of its own among 512 common tokens, so that what comes next can be learnt.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_SIZE = 8
LENGTH, VOCABULARY, WIDTH, HEADS, DEPTH = 1024, 50257, 768, 12, 12
COMMON = 512


class Attention(nn.Module):
    """Causal self-attention over (batch, length, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt2(nn.Module):
    """Token ids (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_start)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build_model() -> nn.Module:
    return Gpt2()


def batches(batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, next ids), both (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(COMMON, (batch_size, 1), generator=generator)
        stride = torch.randint(1, 8, (batch_size, 1), generator=generator)
        ids = (start + stride * torch.arange(LENGTH + 1)) % COMMON
        yield ids[:, :-1], ids[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    ids, target = batch
    return F.cross_entropy(model(ids).flatten(0, 1), target.flatten())


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=torch.cuda.is_available())
