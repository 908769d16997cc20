"""Which timed steps count, on a card that is throttled and shared by a script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from nvml_fakes import FakeCard

sys.path.insert(0, str(Path(__file__).parent.parent / "tune"))
from decision_fakes import ENVIRONMENT

from autoprec.bench.disturbance import UNTOLD, Disturbance, TimedBlocks, card_of
from autoprec.bench.nvml import SAMPLE_S
from autoprec.bench.target import Target
from autoprec.bench.timing import StepClock
from autoprec.policy import PRECISIONS
from autoprec.records import Failure, Measurement

LOSSES = tuple(2.0 - step / 100 for step in range(40))


def watched(card: FakeCard) -> Disturbance:
    return Disturbance(card, now_s=card.clock, pause=card.pause)  # type: ignore[arg-type]


def bare() -> Measurement:
    fields = {"losses": LOSSES, "step_times_s": (), "speed_origin": "measured", "batch_samples": 8, "peak_bytes": 0}
    return Measurement.model_validate({**fields, "final_scale": 512.0, "environment": ENVIRONMENT})


class Run:
    """Blocks of ten steps of 0.1 s on a fake card."""

    def __init__(self, card: FakeCard) -> None:
        self.card, self.disturbance = card, watched(card)
        self.clock = StepClock("cpu")
        self.blocks = TimedBlocks(self.clock, self.disturbance)
        self.step = 0

    def block(self, steps: int = 10) -> None:
        self.disturbance.start()
        first = self.step
        for _ in range(steps):
            self.clock.time(lambda: None, self.step)
            self.card.now_s += 0.1
            self.step += 1
        self.blocks.end(range(first, self.step))

    def counted(self, skipped: tuple[int, ...] = (), *, in_turns: bool = True) -> Measurement | Failure:
        return self.blocks.counted(bare(), skipped, in_turns=in_turns)


def test_on_a_quiet_card_every_sample_counts() -> None:
    run = Run(FakeCard())
    for steps in (10, 4):
        run.block(steps)
    outcome = run.counted()
    assert isinstance(outcome, Measurement)
    assert (len(outcome.step_times_s), outcome.block_steps) == (14, (10, 4))
    assert (outcome.throttled_steps, outcome.shared_steps, outcome.disturbed, outcome.note) == (0, 0, False, "")


def test_a_throttled_block_is_dropped_and_counted_and_the_others_stay() -> None:
    run = Run(FakeCard(hot_s=[(101.5, 102.5)]))
    for _ in range(3):
        run.block()
    assert run.blocks.lost() == [10]
    outcome = run.counted()
    assert isinstance(outcome, Measurement)
    assert (outcome.block_steps, outcome.throttled_steps, outcome.shared_steps) == ((10, 10), 10, 0)
    assert outcome.disturbed
    assert outcome.note == "10 of 30 steps dropped: heat or power held the clocks down"


def test_blocks_that_another_process_shared_are_dropped_and_counted() -> None:
    run = Run(FakeCard(shared_s=[(104.3, 104.7)]))
    for _ in range(9):
        run.block()
    outcome = run.counted()
    assert isinstance(outcome, Measurement)
    # Seen at 104.4 and 104.6: a second around them lies in the blocks that begin at 103, 104 and 105.
    assert (outcome.shared_steps, outcome.block_steps) == (30, (10,) * 6)
    assert outcome.note == "30 of 90 steps dropped: another process used the card"


def test_what_is_seen_after_a_short_block_may_speak_of_it() -> None:
    run = Run(FakeCard(shared_s=[(100.4, 100.8)]))
    run.block(2)
    assert run.blocks.lost() == [], "nothing is known by then"
    run.block(3)
    assert run.blocks.lost() == [2, 3]


def test_work_seen_just_before_the_first_block_is_taken_to_go_on() -> None:
    run = Run(FakeCard(shared_s=[(99.0, 99.9)]))
    run.block(2)
    assert run.blocks.lost() == [2]


def test_a_settled_card_has_forgotten_what_came_before() -> None:
    card = FakeCard(shared_s=[(100.0, 100.5)])
    run = Run(card)
    run.block()
    assert run.blocks.lost() == [10]
    tries = [run.disturbance.settle() for _ in range(2)]
    assert tries[-1] and card.now_s == pytest.approx(101.0 + 2 * SAMPLE_S)
    run.block()
    assert run.blocks.lost() == [10]


def test_a_card_that_stays_shared_or_hot_does_not_settle() -> None:
    assert not watched(FakeCard(shared_s=[(0, 1e9)])).settle()
    assert not watched(FakeCard(hot_s=[(0, 1e9)])).settle()


def test_where_no_sample_is_left_the_failure_says_what_was_seen_and_what_to_do() -> None:
    run = Run(FakeCard(shared_s=[(0, 1e9)]))
    run.block()
    outcome = run.counted()
    assert isinstance(outcome, Failure)
    assert outcome.kind == "disturbed"
    assert "10 of 10 steps dropped: another process used the card" in outcome.message
    assert "stop the other process" in outcome.message
    assert outcome.losses == LOSSES


def test_a_failure_by_heat_gives_the_advice_for_heat() -> None:
    run = Run(FakeCard(hot_s=[(0, 1e9)]))
    run.block()
    outcome = run.counted()
    assert isinstance(outcome, Failure)
    assert "cool down" in outcome.message and "other process" not in outcome.message


def test_skipped_steps_give_no_sample_and_are_no_disturbance() -> None:
    run = Run(FakeCard())
    run.block()
    run.block()
    outcome = run.counted(skipped=(0, 1, 13))
    assert isinstance(outcome, Measurement)
    assert (len(outcome.step_times_s), outcome.block_steps, outcome.disturbed) == (17, (8, 9), False)


def test_a_block_of_skipped_steps_only_is_no_block() -> None:
    run = Run(FakeCard())
    run.block(3)
    run.block()
    outcome = run.counted(skipped=(0, 1, 2))
    assert isinstance(outcome, Measurement)
    assert outcome.block_steps == (10,)


def test_a_step_that_was_skipped_in_a_shared_block_is_not_counted_as_shared() -> None:
    run = Run(FakeCard(shared_s=[(100.2, 100.4)]))
    run.block()
    run.card.now_s += 5
    run.block()
    outcome = run.counted(skipped=(0, 1))
    assert isinstance(outcome, Measurement)
    assert (outcome.shared_steps, outcome.block_steps) == (8, (10,))


def test_where_every_step_was_skipped_the_scale_is_at_fault() -> None:
    run = Run(FakeCard())
    run.block(3)
    outcome = run.counted(skipped=(0, 1, 2))
    assert isinstance(outcome, Failure)
    assert (outcome.kind, "the loss scale is 512" in outcome.message) == ("scale_collapsed", True)


def test_a_single_window_has_no_blocks() -> None:
    run = Run(FakeCard())
    run.block()
    outcome = run.counted(in_turns=False)
    assert isinstance(outcome, Measurement)
    assert outcome.block_steps == ()


def test_a_driver_that_does_not_say_who_computes_is_named_where_somebody_is_there() -> None:
    card = FakeCard()
    card.told = False
    run = Run(card)
    run.block()
    assert run.counted().note == ""  # type: ignore[union-attr]
    card.present = True
    run = Run(card)
    run.block()
    assert run.counted().note == UNTOLD  # type: ignore[union-attr]


def test_only_a_card_whose_speed_is_measured_is_watched() -> None:
    for device, timing in (("cpu", "measured"), ("cpu", "predicted"), ("cuda", "predicted")):
        assert card_of(Target("x", None, device, timing, False, None, PRECISIONS)) is None  # type: ignore[arg-type]
