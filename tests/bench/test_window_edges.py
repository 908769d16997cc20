"""Windows of unusual workloads: infinite masks, closures, settings that a policy cannot have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autoprec.bench.data import Start
from autoprec.bench.target import Target
from autoprec.bench.window import run_window
from autoprec.bench.workload import Workload, load_workload
from autoprec.policy import PRECISIONS, Batch, Fingerprint, Policy, Precision
from autoprec.records import Failure, Measurement, Outcome, Window
from autoprec.runtime import layer_signature, named_layers

CPU = Target("cpu", None, "cpu", "measured", False, None, PRECISIONS)
STAND_IN = Target("cpu", None, "cpu", "measured", True, None, PRECISIONS)


def _batches(batch_size: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(batch_size, 4, generator=generator), torch.randint(0, 3, (batch_size,), generator=generator)


def _workload(**changes: Any) -> Workload:
    return load_workload(
        SimpleNamespace(**{"build_model": lambda: nn.Linear(4, 3), "batches": _batches, "BATCH_SIZE": 8} | changes)
    )


def _run(workload: Workload, target: Target, default: Precision, steps: int = 6) -> Outcome:
    known = {name: layer_signature(module) for name, module in named_layers(workload.build_model()).items()}
    made_for = {"device": "cpu", "capability": None, "torch_version": torch.__version__, "workload_sha256": workload.sha256}
    policy = Policy(default=default, batch=Batch(effective=8, micro=8), fingerprint=Fingerprint.of(known, **made_for))
    return run_window(workload, target, policy, Window(steps=steps), Start(workload, 0, pinned=False), None)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, float("-inf")]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + self.mask.clamp(min=-10)  # type: ignore[no-any-return, operator]


def test_a_mask_of_minus_infinity_is_no_broken_buffer() -> None:
    assert isinstance(_run(_workload(build_model=Masked), CPU, "fp32"), Measurement)


def test_an_optimizer_with_a_closure_trains_in_bf16_and_is_a_failure_in_fp16() -> None:
    workload = _workload(build_optimizer=lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4))
    assert isinstance(_run(workload, STAND_IN, "bf16"), Measurement)
    failure = _run(workload, STAND_IN, "fp16")
    assert isinstance(failure, Failure)
    assert failure.kind == "unsupported"
    assert "LBFGS" in failure.message


class OneClosure(torch.optim.SGD):
    """SGD that evaluates its loss itself, once."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        return super().step()


def test_a_closure_clips_its_gradients_like_any_other_step() -> None:
    plain, closed = (
        _run(_workload(build_optimizer=lambda model, kind=kind: kind(model.parameters(), lr=1.0), GRAD_CLIP=1e-2), CPU, "fp32")
        for kind in (torch.optim.SGD, OneClosure)
    )
    assert isinstance(plain, Measurement)
    assert isinstance(closed, Measurement)
    assert closed.losses == plain.losses
    free = _run(_workload(build_optimizer=lambda model: OneClosure(model.parameters(), lr=1.0)), CPU, "fp32")
    assert isinstance(free, Measurement)
    assert free.losses[0] == closed.losses[0]
    assert free.losses[1] != closed.losses[1]


def test_a_batch_without_any_gradient_trains_on_in_every_precision() -> None:
    """A constant loss for an empty batch: torch's scaler raises on it, plain FP32 does not (huggingface/accelerate#328)."""
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) % 3 == 0:
            return torch.zeros((), requires_grad=True) * 1.0
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    for default in ("fp32", "bf16", "fp16"):
        calls.clear()
        outcome = _run(_workload(loss=loss, GRAD_CLIP=1.0), STAND_IN, default)  # type: ignore[arg-type]
        assert isinstance(outcome, Measurement), default
        assert [value == 0.0 for value in outcome.losses] == [False, False, True] * 2
        assert outcome.skipped_steps == 0


def test_parameters_that_cannot_be_scaled_are_a_failure_of_the_policy() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.cfloat))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x) * self.scale.abs()  # type: ignore[no-any-return]

    workload = _workload(build_model=Half)
    assert isinstance(_run(workload, STAND_IN, "bf16"), Measurement)
    failure = _run(workload, STAND_IN, "fp16")
    assert isinstance(failure, Failure)
    assert failure.kind == "unsupported"
    assert "'scale' is complex64" in failure.message
