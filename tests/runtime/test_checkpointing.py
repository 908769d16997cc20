"""Activation checkpointing recomputes in the precision of the forward pass, wherever the recompute happens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from runtime_policies import Block, policy_for
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoprec.policy import PRECISIONS, Precision
from autoprec.runtime import apply_policy


def keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(8, 8), Block(), Block()
        self.mode = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in (self.first, self.second):
            if self.mode == "none":
                x = block(x)
            elif self.mode == "selective":
                contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            else:
                x = checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        return x


def gradients(model: Checkpointed, mode: str, applied: Any, cache: bool | None) -> list[torch.Tensor]:
    model.mode = mode
    model.zero_grad()
    with applied.autocast(cache_enabled=cache):
        loss = model(torch.linspace(-1, 1, 32).reshape(4, 8)).square().mean()
    loss.backward()  # outside the autocast block, where the recompute happens
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant", "selective"])
@pytest.mark.parametrize("default", PRECISIONS)
@pytest.mark.parametrize("island", [{"first": "fp32"}, {"first.fc": "fp32", "second.norm": "bf16_pure"}, {"second": "bf16_pure"}])
def test_gradients_equal_those_without_checkpointing(mode: str, default: Precision, island: dict[str, Precision]) -> None:
    torch.manual_seed(0)
    model = Checkpointed()
    applied = apply_policy(model, policy_for(model, default, island))
    cache = False if mode == "selective" else None
    plain = gradients(model, "none", applied, cache)
    recomputed = gradients(model, mode, applied, cache)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    applied.remove()
