"""A tune on a card that heat or other processes disturb: it goes on with what counts, or ends with a message that says what to do."""

from __future__ import annotations

import pytest
from timed_bench import Clock, TimedBench, tuned, usual

from autoprec.errors import DeviceError, WorkloadError
from autoprec.records import Candidate, Failure, Measurement
from autoprec.session.export import dropped_notes
from autoprec.session.opening import probed
from autoprec.tune.run_folder import RunFolder

DISTURBED = Failure(kind="disturbed", message="no step time counts: 60 of 60 steps dropped: another process used the card")
CRASHED = Failure(kind="crashed", message="the process was ended by SIGSEGV")
HELD_DOWN = "4 of 60 steps dropped: heat or power held the clocks down"


class Turns(TimedBench):
    """Every arm of a timing in turns ends as a test says."""

    ends_in = CRASHED

    def interleave(self, policies, window):
        super().interleave(policies, window)
        return [self.ends_in] * len(policies)


@pytest.mark.parametrize("failure", [CRASHED, DISTURBED], ids=lambda failure: failure.kind)
def test_a_timing_in_turns_that_gives_nothing_leaves_the_times_of_single_windows(folder, failure):
    clock = Clock()
    bench = Turns(clock, usual(0.05))
    bench.ends_in = failure
    result, said, _ = tuned(folder, bench, clock, budget_s=240.0, execution="eager")
    assert result.chosen != "FP32", "half precision is 2.5 times as fast in its own windows"
    assert all(arm.samples_per_s for arm in result.arms)
    assert any("FP32 could not be timed in turns" in line and failure.message in line for line in said.lines)
    assert "could not be timed in turns" in result.report_path.read_text()


def test_an_arm_that_alone_fails_in_turns_is_out_and_the_others_are_timed(folder):
    class OneFails(TimedBench):
        def interleave(self, policies, window):
            outcomes = super().interleave(policies, window)
            return [DISTURBED if p.default.startswith("bf16") else o for p, o in zip(policies, outcomes, strict=True)]

    clock = Clock()
    result, *_ = tuned(folder, OneFails(clock, usual(0.05)), clock, budget_s=240.0, execution="eager")
    speeds = {arm.name: arm.samples_per_s for arm in result.arms}
    assert speeds["stock AMP bf16"] is None
    assert speeds["FP32"] and speeds["stock AMP fp16"]


def test_what_was_dropped_is_said_and_stands_in_the_report(folder):
    class Warm(TimedBench):
        def interleave(self, policies, window):
            outcomes = super().interleave(policies, window)
            first = outcomes[0].model_copy(update={"throttled_steps": 4, "note": HELD_DOWN})
            return [first, *outcomes[1:]]

    clock = Clock()
    result, said, _ = tuned(folder, Warm(clock, usual(0.05)), clock, budget_s=240.0, execution="eager")
    assert f"timing: FP32: {HELD_DOWN}" in said.lines
    assert "samples were dropped" in result.report_path.read_text()


def test_blocks_reach_the_arms_that_are_compared(folder, monkeypatch):
    from autoprec.session import run

    class Blocked(TimedBench):
        def interleave(self, policies, window):
            outcomes = super().interleave(policies, window)
            return [o.model_copy(update={"block_steps": (len(o.step_times_s) - 3, 3)}) for o in outcomes]

    seen = []
    kept = run.export
    monkeypatch.setattr(
        run, "export", lambda context, found, verified, book: seen.append(verified) or kept(context, found, verified, book)
    )
    clock = Clock()
    tuned(folder, Blocked(clock, usual(0.05)), clock, budget_s=240.0, execution="auto")
    timed = [arm for arm in seen[0].arms if arm.step_times_s]
    assert any(arm.policy.execution != "eager" for arm in timed)
    assert all(arm.block_steps and sum(arm.block_steps) == len(arm.step_times_s) for arm in timed)


def test_a_reference_on_a_card_that_is_never_quiet_ends_the_tune_and_blames_the_card_not_the_model(folder):
    class Shared(TimedBench):
        quiet = False

        def window(self, policy, window):
            outcome = super().window(policy, window)
            return outcome if self.quiet or window.purpose != "FP32 twin" else DISTURBED

    clock = Clock()
    bench = Shared(clock, usual(0.05))
    with pytest.raises(DeviceError, match="another process used the card") as raised:
        tuned(folder, bench, clock, budget_s=240.0, execution="eager")
    assert not isinstance(raised.value, WorkloadError)
    assert "same command" in raised.value.hint
    bench.quiet = True
    result, *_ = tuned(folder, bench, clock, budget_s=240.0, execution="eager")
    assert result.chosen != "FP32", "what the card's neighbour ended is run again"


def test_a_probe_on_a_card_that_is_never_quiet_blames_the_card(folder):
    clock = Clock()
    bench = TimedBench(clock, usual(0.05))
    bench.window = lambda policy, window: DISTURBED
    with pytest.raises(DeviceError, match="cannot be timed"):
        probed(bench, None, clock)
    bench.window = lambda policy, window: CRASHED
    with pytest.raises(WorkloadError, match="FP32 probe failed"):
        probed(bench, None, clock)


def candidates_of(folder):
    clock = Clock()
    tuned(folder, TimedBench(clock, usual(0.05)), clock, budget_s=60.0, execution="eager")
    return RunFolder.read(folder).candidates


def test_the_notes_count_what_was_dropped_over_all_windows(folder):
    known = candidates_of(folder)
    assert dropped_notes(known) == []
    one = next(candidate for candidate in known if isinstance(candidate.outcome, Measurement))

    def with_outcome(outcome) -> Candidate:
        return one.model_copy(update={"outcome": outcome})

    loud = one.outcome.model_copy(update={"step_times_s": (0.1,) * 30, "shared_steps": 12})
    quiet = one.outcome.model_copy(update={"step_times_s": (0.1,) * 18})
    dropped, never = dropped_notes([with_outcome(outcome) for outcome in (loud, quiet, DISTURBED)])
    assert dropped.startswith("In 1 of 2 timed windows") and "12 of 60 steps dropped: another process used the card" in dropped
    assert never == "1 window has no result, because the card was never quiet."
