"""Small workloads and policies for the bench's tests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_stands import ConvNet, image_batches

from autoprec.bench.target import Target
from autoprec.bench.workload import Workload, load_workload
from autoprec.policy import PRECISIONS, Backend, Batch, Fingerprint, LayerSetting, LossScale, Policy, Precision
from autoprec.runtime import layer_signature, named_layers


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
