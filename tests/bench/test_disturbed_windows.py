"""Windows and interleaved arms on a card that is throttled or shared: what is dropped, tried again, and given up."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvml_fakes import FakeCard
from torch import nn

from autoprec.bench import arms, training, window
from autoprec.bench.arms import BLOCKS, interleave
from autoprec.bench.data import Start
from autoprec.bench.disturbance import MOST_REPEATS, Disturbance
from autoprec.bench.target import Target
from autoprec.bench.window import run_window
from autoprec.bench.workload import Workload, load_workload
from autoprec.policy import PRECISIONS, Batch, Fingerprint, LossScale, Policy
from autoprec.records import Failure, Measurement, Outcome, Window
from autoprec.runtime import layer_signature, named_layers

TARGET = Target("cpu", None, "cpu", "measured", True, None, PRECISIONS)
STEP_S = 0.05


def _batches(batch_size: int, seed: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(46):  # no more than the longest test's window: repeats take none beyond it
        yield torch.randn(batch_size, 4, generator=generator), torch.randint(0, 3, (batch_size,), generator=generator)


@pytest.fixture
def workload() -> Workload:
    return load_workload(SimpleNamespace(build_model=lambda: nn.Linear(4, 3), batches=_batches, BATCH_SIZE=8))


def policy_of(workload: Workload, **changes: Any) -> Policy:
    known = {name: layer_signature(module) for name, module in named_layers(workload.build_model()).items()}
    made_for = {"device": "cpu", "capability": None, "torch_version": torch.__version__, "workload_sha256": workload.sha256}
    fields = {"default": "fp32", "batch": Batch(effective=8, micro=8), "fingerprint": Fingerprint.of(known, **made_for)}
    return Policy.model_validate({**fields, **changes})


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    """A card on a clock that every training step moves on."""
    card = FakeCard()

    class Step(training.Training):
        def step(self, parts: list[Any]) -> None:
            super().step(parts)
            card.now_s += STEP_S

    def watched(_card: object) -> Disturbance:
        return Disturbance(card, now_s=card.clock, pause=card.pause)  # type: ignore[arg-type]

    for module in (window, arms):
        monkeypatch.setattr(module, "Training", Step)
        monkeypatch.setattr(module, "Disturbance", watched)
    return card


def run(workload: Workload, steps: int = 46, warmup_steps: int = 6, **changes: Any) -> Outcome:
    policy = policy_of(workload, **changes)
    recipe = Window(steps=steps, warmup_steps=warmup_steps)
    return run_window(workload, TARGET, policy, recipe, Start(workload, 0, pinned=False), None)


def test_a_quiet_window_is_timed_once_and_has_no_blocks(workload: Workload, card: FakeCard) -> None:
    outcome = run(workload)
    assert isinstance(outcome, Measurement)
    assert (len(outcome.step_times_s), outcome.block_steps, card.pauses) == (40, (), 0)


def test_a_window_keeps_its_clean_samples_and_counts_the_others(workload: Workload, card: FakeCard) -> None:
    card.hot_s = [(100.9, 101.05)]  # at the look after step 19, and over before the next
    outcome = run(workload)
    assert isinstance(outcome, Measurement)
    assert (len(outcome.step_times_s), outcome.throttled_steps, card.pauses) == (30, 10, 0), "three quarters are enough"
    assert outcome.note == "10 of 40 steps dropped: heat or power held the clocks down"


def test_a_window_without_clean_samples_trains_on_for_its_times_and_keeps_its_losses(workload: Workload, card: FakeCard) -> None:
    quiet = run(workload)
    card.now_s, card.shared_s = 100.0, [(0.0, 102.5)]  # a second after the last step
    outcome = run(workload)
    assert isinstance(outcome, Measurement)
    assert isinstance(quiet, Measurement)
    assert outcome.losses == quiet.losses
    assert outcome.shared_steps == 40
    assert len(outcome.step_times_s) > 0
    assert "40 of" in outcome.note


def test_a_window_on_a_card_that_is_never_quiet_is_a_failure_and_ends(workload: Workload, card: FakeCard) -> None:
    card.shared_s = [(0.0, 1e9)]
    outcome = run(workload)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "disturbed"
    assert len(outcome.losses) == 46
    assert card.pauses == MOST_REPEATS


def test_a_window_that_only_wants_losses_is_not_watched(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(window, "card_of", lambda target: given.append(target))
    outcome = run_window(
        workload, TARGET, policy_of(workload), Window(steps=4), Start(workload, 0, pinned=False), None, watched=False
    )
    assert isinstance(outcome, Measurement)
    assert given == []


TIMED = 4 * BLOCKS


def in_turns(workload: Workload, policies: list[Policy], warmup_steps: int = 6) -> list[Outcome]:
    recipe = Window(steps=warmup_steps + TIMED, warmup_steps=warmup_steps)
    return interleave(workload, TARGET, policies, recipe, Start(workload, 0, pinned=False))


def test_quiet_arms_have_a_block_for_every_round(workload: Workload, card: FakeCard) -> None:
    for outcome in in_turns(workload, [policy_of(workload), policy_of(workload, default="bf16")]):
        assert isinstance(outcome, Measurement)
        assert outcome.block_steps == (4,) * BLOCKS
        assert sum(outcome.block_steps) == len(outcome.step_times_s)


def test_disturbed_blocks_of_arms_are_tried_again_until_each_has_as_many_as_planned(workload: Workload, card: FakeCard) -> None:
    card.hot_s = [(101.0, 101.5)]
    outcomes = in_turns(workload, [policy_of(workload), policy_of(workload, default="bf16")])
    assert all(isinstance(outcome, Measurement) for outcome in outcomes)
    assert sum(outcome.throttled_steps for outcome in outcomes) > 0  # type: ignore[union-attr]
    for outcome in outcomes:
        assert outcome.block_steps == (4,) * BLOCKS  # type: ignore[union-attr]
        assert len(outcome.step_times_s) == TIMED  # type: ignore[union-attr]
    assert 1 <= card.pauses <= MOST_REPEATS


def test_only_the_arm_that_lost_blocks_trains_again(workload: Workload, card: FakeCard) -> None:
    card.hot_s = [(100.79, 100.81)]  # just the end of the first block of one arm
    outcomes = in_turns(workload, [policy_of(workload), policy_of(workload, default="bf16")])
    assert sorted(outcome.throttled_steps for outcome in outcomes) == [0, 4]  # type: ignore[union-attr]
    assert sorted(len(outcome.losses) for outcome in outcomes) == [6 + TIMED, 6 + TIMED + 4]


def test_arms_on_a_card_that_is_never_quiet_all_fail_and_end(workload: Workload, card: FakeCard) -> None:
    card.shared_s = [(0.0, 1e9)]
    outcomes = in_turns(workload, [policy_of(workload), policy_of(workload, default="bf16")])
    assert [outcome.kind for outcome in outcomes] == ["disturbed", "disturbed"]  # type: ignore[union-attr]
    assert "stop the other process" in outcomes[0].message  # type: ignore[union-attr]
    assert card.pauses == MOST_REPEATS


def test_skipped_steps_are_no_samples_of_an_arm_and_are_counted_as_no_work_once(workload: Workload, card: FakeCard) -> None:
    policy = policy_of(workload, default="fp16", loss_scale=LossScale(init=2.0**22))
    (outcome,) = in_turns(workload, [policy], warmup_steps=2)
    assert isinstance(outcome, Measurement)
    assert outcome.skipped_steps > 2, "the test needs skipped steps after the warm-up"
    assert len(outcome.step_times_s) == TIMED - (outcome.skipped_steps - 2) == sum(outcome.block_steps)
    done = 1 - outcome.skipped_steps / len(outcome.losses)
    assert outcome.samples_per_s == pytest.approx(8 * done / outcome.step_s)
    assert not outcome.disturbed
