"""Interleaved arms: same training as alone, fair turns, and one arm's failure leaves the others running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.bench import arms
from autoprec.bench.arms import BLOCK_STEPS, interleave
from autoprec.bench.provisions import DataCache, ModelCache
from autoprec.bench.target import Target
from autoprec.bench.training import TrainingRun
from autoprec.bench.window import run_window
from autoprec.bench.workload import Workload
from autoprec.policy import Backend, Policy
from autoprec.records import Failure, Measurement, Window

MakeWorkload = Callable[..., Workload]
MakePolicy = Callable[..., Policy]


def _interleave(workload: Workload, target: Target, policies: list[Policy], window: Window) -> list[Any]:
    return interleave(workload, target, policies, window, data=DataCache(workload), models=ModelCache(workload))


def test_each_arm_trains_as_it_would_alone(make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target) -> None:
    workload = make_workload()
    plain, half = make_policy(workload), make_policy(workload, "bf16", {"head": "fp32"}, backend=Backend(tf32=True))
    window = Window(steps=2 * BLOCK_STEPS, warmup_steps=1, seed=4)
    outcomes = _interleave(workload, cpu, [plain, half, plain], window)
    total = len(outcomes[0].losses)
    longer = Window(steps=total, seed=4)
    for policy, outcome in zip((plain, half, plain), outcomes, strict=True):
        alone = run_window(workload, cpu, policy, longer, data=DataCache(workload), models=ModelCache(workload))
        assert isinstance(alone, Measurement)
        assert outcome.losses == alone.losses
        assert len(outcome.step_times_s) == window.steps


def test_arms_take_turns_in_blocks_of_changing_order(
    make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = make_workload()
    policies = [make_policy(workload), make_policy(workload, "bf16")]
    turns: list[str] = []
    step = TrainingRun.step

    def noted(self: TrainingRun, *, timed: bool) -> None:
        if timed:
            turns.append(self.policy.default)
        step(self, timed=timed)

    monkeypatch.setattr(TrainingRun, "step", noted)
    _interleave(workload, cpu, policies, Window(steps=8 * BLOCK_STEPS))
    blocks = [turns[start] for start in range(0, len(turns), BLOCK_STEPS)]
    assert all(len(set(turns[i : i + BLOCK_STEPS])) == 1 for i in range(0, len(turns), BLOCK_STEPS))
    rounds = [tuple(blocks[i : i + 2]) for i in range(0, len(blocks), 2)]
    assert all(set(turn) == {"fp32", "bf16"} for turn in rounds)
    assert len(set(rounds)) == 2, "the order is random, not fixed"


def test_a_failing_arm_does_not_stop_the_others(make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target) -> None:
    class Fussy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(36, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.head(x.flatten(1))
            if y.dtype != torch.float32:
                raise TypeError("only float32 here")
            return y  # type: ignore[no-any-return]

    workload = make_workload(build_model=Fussy)
    fine, broken = make_policy(workload), make_policy(workload, "bf16")
    first, second, third = _interleave(workload, cpu, [fine, broken, fine], Window(steps=4))
    assert isinstance(first, Measurement)
    assert isinstance(second, Failure)
    assert (second.kind, second.layer) == ("unsupported", "")
    assert "only float32 here" in second.message
    assert isinstance(third, Measurement)


def test_an_arm_without_room_beside_the_others_is_measured_alone(
    make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target
) -> None:
    calls = iter(range(100))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if next(calls) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return F.cross_entropy(model(batch[0]), batch[1])

    workload = make_workload(loss=loss)
    first, second = _interleave(workload, cpu, [make_policy(workload)] * 2, Window(steps=4, warmup_steps=1))
    assert isinstance(first, Measurement)
    assert "Measured alone" in first.note
    assert isinstance(second, Measurement)
    assert "Measured alone" not in second.note


def test_samples_under_throttled_clocks_are_dropped_and_counted(
    make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([True, False])
    monkeypatch.setattr(arms, "Card", lambda: type("Hot", (), {"throttled": lambda self: next(answers)})())
    workload = make_workload()
    (outcome,) = _interleave(workload, cpu, [make_policy(workload)], Window(steps=2 * BLOCK_STEPS))
    assert len(outcome.step_times_s) == BLOCK_STEPS
    assert f"{BLOCK_STEPS} samples were dropped" in outcome.note
    monkeypatch.setattr(arms, "Card", lambda: type("Hot", (), {"throttled": lambda self: True})())
    (outcome,) = _interleave(workload, cpu, [make_policy(workload)], Window(steps=2 * BLOCK_STEPS))
    assert len(outcome.step_times_s) == 2 * BLOCK_STEPS
    assert "during every sample" in outcome.note
