"""Small workloads and policies for the bench's tests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.bench.target import Target
from autoprec.bench.workload import Workload, load_workload
from autoprec.policy import PRECISIONS, Backend, Batch, Fingerprint, LayerSetting, LossScale, Policy, Precision
from autoprec.runtime import layer_signature, named_layers


class ConvNet(nn.Module):
    """Convolution, batch norm, dropout and two linear layers: what most nets have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.1)
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(torch.relu(self.hidden(self.drop(x))))  # type: ignore[no-any-return]


def image_batches(batch_size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    while True:
        labels = torch.randint(0, 3, (batch_size,), generator=generator)
        yield torch.randn(batch_size, 1, 6, 6, generator=generator) + labels.view(-1, 1, 1, 1), labels


@pytest.fixture
def make_workload() -> Callable[..., Workload]:
    def make(**changes: Any) -> Workload:
        base = {"build_model": ConvNet, "batches": image_batches, "BATCH_SIZE": 16}
        return load_workload(SimpleNamespace(**base | changes))

    return make


@pytest.fixture
def make_policy() -> Callable[..., Policy]:
    def make(
        workload: Workload,
        default: Precision = "fp32",
        layers: dict[str, Precision] | None = None,
        *,
        micro: int | None = None,
        scale: LossScale | None = None,
        backend: Backend | None = None,
        **more: Any,
    ) -> Policy:
        model = workload.build_model()
        known = {name: layer_signature(module) for name, module in named_layers(model).items() if name}
        micro = micro or workload.batch_size
        return Policy(
            default=default,
            layers={name: LayerSetting(precision=precision) for name, precision in (layers or {}).items()},
            loss_scale=scale or LossScale(),
            batch=Batch(effective=workload.batch_size, micro=micro, accumulation_steps=workload.batch_size // micro),
            backend=backend or Backend(),
            fingerprint=Fingerprint.of(
                known, device="cpu", capability=None, torch_version=torch.__version__, workload_sha256=workload.sha256
            ),
            **more,
        )

    return make


@pytest.fixture
def cpu() -> Target:
    """The processor itself, measured."""
    return Target("cpu", None, "cpu", "measured", False, None, PRECISIONS)


@pytest.fixture
def stand_in() -> Target:
    """The processor standing in for a GPU whose speed is predicted."""
    return Target("NVIDIA GeForce RTX 4090 D", None, "cpu", "predicted", True, None, PRECISIONS)
