"""Policies for models built in tests, without a tune."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoprec.policy import Batch, Fingerprint, LayerSetting, Padding, Policy, Precision
from autoprec.runtime import layer_signature, named_layers

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp16_pure": torch.float16, "bf16_pure": torch.bfloat16}


def fingerprint_of(model: nn.Module, idle: tuple[str, ...] = (), device: str = "cpu") -> Fingerprint:
    layers = {name: layer_signature(module) for name, module in named_layers(model).items() if name not in idle}
    return Fingerprint.of(
        layers, idle=idle, device=device, capability=None, torch_version=torch.__version__, workload_sha256="0" * 64
    )


def policy_for(
    model: nn.Module,
    default: Precision = "bf16",
    layers: dict[str, Precision] | None = None,
    *,
    pad: dict[str, int] | None = None,
    idle: tuple[str, ...] = (),
    **settings: Any,
) -> Policy:
    return Policy(
        default=default,
        layers={name: LayerSetting(precision=precision) for name, precision in (layers or {}).items()},
        padding=Padding(layers=pad or {}),
        batch=settings.pop("batch", Batch(effective=4, micro=4)),
        fingerprint=settings.pop("fingerprint", None) or fingerprint_of(model, idle),
        **settings,
    )


class Block(nn.Module):
    """A norm, a Linear and a scale of its own, with a skip connection."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(x)) * self.scale + x


class Net(nn.Module):
    """Seven features in, two blocks, five out: sizes that padding has something to do with."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 8)
        self.first = Block()
        self.second = Block()
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.stem(x))))


class Spy(nn.Module):
    """Passes everything on and remembers the dtypes it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found: list[torch.dtype] = []
        note(args, found)
        note(kwargs, found)
        self.seen[:] = found
        return args[0]


def note(value: Any, found: list[torch.dtype]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value.dtype)
    elif isinstance(value, dict):
        for item in value.values():
            note(item, found)
    elif isinstance(value, tuple | list):
        for item in value:
            note(item, found)
