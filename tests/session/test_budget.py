"""A tune keeps to its budget: no window starts that does not fit, and what is left out is said."""

from __future__ import annotations

import pytest
from timed_bench import Clock, TimedBench, is_low, tuned, usual

from autoprec.session.budget import (
    LEAST_TRIAL_STEPS,
    SHORTEST_TRIAL_STEPS,
    Costs,
    least_needs,
    plan_windows,
    plan_words,
    whole_needs,
)
from autoprec.session.settings import Settings
from autoprec.tune.quantities import duration
from autoprec.tune.run_folder import RunFolder

STEPS_S = (0.002, 0.05, 0.16, 0.4)


@pytest.mark.parametrize("execution", ["eager", "auto"])
@pytest.mark.parametrize("budget_s", [20.0, 60.0, 240.0])
@pytest.mark.parametrize("step_s", STEPS_S)
def test_the_budget_is_overrun_by_no_more_than_one_window(folder, step_s, budget_s, execution):
    clock = Clock()
    bench = TimedBench(clock, usual(step_s), profile_s=1 + 130 * step_s)
    result, said, used_s = tuned(folder, bench, clock, budget_s=budget_s, execution=execution)
    assert used_s <= budget_s + bench.longest_s
    assert result.policy.evidence.verdict == "passed"
    assert any(line.startswith("budget: ") and "after the first look" in line for line in said.lines)
    if result.chosen != "FP32":
        assert result.verdict.status == "passed"


@pytest.mark.parametrize("times", [3.0, 10.0])
@pytest.mark.parametrize("budget_s", [20.0, 60.0, 240.0])
def test_candidates_that_take_far_longer_than_foreseen_cost_one_window_at_most(folder, budget_s, times):
    """The probe knows FP32 alone: half precision may be slow on this device, or another process may take most of it."""
    clock = Clock()

    def wall_s(policy):
        return 0.05 * (times if is_low(policy) else 1.0)

    bench = TimedBench(clock, usual(0.05), wall_s=wall_s, profile_s=8.0)
    _, _, used_s = tuned(folder, bench, clock, budget_s=budget_s, execution="eager")
    assert used_s <= budget_s + bench.longest_s


def test_a_device_that_slows_down_halfway_is_planned_for_anew(folder):
    clock = Clock()

    def wall_s(policy):
        return 0.02 * (0.4 if is_low(policy) else 1.0) * (4.0 if clock() > 1030 else 1.0)

    bench = TimedBench(clock, usual(0.02), wall_s=wall_s)
    result, _, used_s = tuned(folder, bench, clock, budget_s=60.0, execution="eager")
    assert used_s <= 60.0 + bench.longest_s
    assert result.chosen != "FP32" and result.verdict.status == "passed"


def test_gpt2_in_200_seconds_tries_more_than_a_quarter_of_its_trials(folder):
    """6 of 28 is what shares of the budget, fixed beforehand, had left of it."""
    clock = Clock()
    bench = TimedBench(clock, usual(0.16), overhead_s=1.3, profile_s=20.5)
    result, said, used_s = tuned(folder, bench, clock, look_s=16.0, budget_s=200.0, trials=24, execution="auto")
    trials = next(line for line in said.lines if line.startswith("study: ") and "within the limits" in line)
    assert int(trials.split()[1]) >= 9
    assert used_s <= 200.0
    assert result.policy.execution != "eager"


def test_a_budget_without_time_for_a_profile_still_verifies_stock_amp_and_pure_half(folder):
    clock = Clock()
    bench = TimedBench(clock, usual(0.16), profile_s=22.0)
    result, said, used_s = tuned(folder, bench, clock, budget_s=45.0, execution="eager")
    assert "profile" not in said.stages and "study" not in said.stages
    assert any("profile, search and repair left out" in line for line in said.lines)
    assert is_low(result.policy) and result.verdict.status == "passed"
    assert used_s <= 45.0 + bench.longest_s
    assert "profile, search and repair" in result.left_out


def test_a_budget_shorter_than_the_shortest_tune_is_said_before_any_reference_and_answers_fp32(folder):
    clock = Clock()
    bench = TimedBench(clock, usual(0.4), overhead_s=2.0)
    result, said, used_s = tuned(folder, bench, clock, budget_s=20.0, look_s=8.0)
    plan = said.lines[0]
    assert "shorter than the shortest tune of this model" in plan
    assert "profile, search, repair and further seeds are left out" in plan
    assert used_s <= 20.0 + bench.longest_s
    assert result.chosen == "FP32" and not result.worth_it
    assert "says nothing about what low precision would give" in result.message
    assert "Not worth it" not in result.message
    report = (result.folder / "report.md").read_text()
    assert "FP32 for now" in report and "does not pay" not in report
    assert "says nothing" in result.policy.evidence.note


def test_what_is_not_verified_is_not_exported(folder):
    """Low precision is twice as fast and its trials run, but there is no time to verify: the answer stays FP32."""
    clock = Clock()

    def wall_s(policy):
        return 0.02 if not is_low(policy) else 2.0

    bench = TimedBench(clock, usual(0.02), wall_s=wall_s)
    result, _, _ = tuned(folder, bench, clock, budget_s=30.0, execution="eager")
    assert result.chosen in ("FP32", "FP32 + TF32")
    assert not is_low(result.policy)


def test_a_longer_budget_goes_on_from_the_windows_of_a_short_one(folder):
    clock = Clock()
    bench = TimedBench(clock, usual(0.02))
    tuned(folder, bench, clock, budget_s=60.0, execution="eager", trials=4)
    first = len(bench.calls)
    _, _, used_s = tuned(folder, bench, clock, budget_s=240.0, execution="eager", trials=8)
    again = [what for what, _ in bench.calls[first:]]
    assert again.count("trial") >= 1 and not {"probe", "reference", "FP32 twin", "profile"} & set(again)
    assert used_s <= 240.0


def test_every_stage_is_told_the_best_so_far_with_its_ratio_to_stock_amp(folder):
    clock = Clock()
    bench = TimedBench(clock, usual(0.02))
    _, said, _ = tuned(folder, bench, clock, budget_s=120.0, execution="eager")
    best = [text for text in said.bests if text][-1]
    assert "samples/s" in best and "x stock AMP" in best


def test_the_result_says_what_the_time_went_into(folder):
    clock = Clock()
    bench = TimedBench(clock, usual(0.02))
    _, said, used_s = tuned(folder, bench, clock, budget_s=60.0, execution="eager")
    assert said.lines[-1].startswith(f"budget: {duration(used_s)} used of 60 s")


def plan(step_s, overhead_s=0.0, time_left_s=None, **settings):
    asked = Settings(workload="model.py", **settings)
    return plan_windows(step_s, overhead_s, asked, num_baselines=8, on_cuda=True, time_left_s=time_left_s)


def test_slow_steps_are_verified_on_fewer_seeds_and_then_in_shorter_windows():
    seeds = [plan(step_s, budget_s=60.0).verify_seeds for step_s in (0.002, 0.1, 0.2, 0.4)]
    assert seeds[0] == 3 and seeds[-1] == 1 and seeds == sorted(seeds, reverse=True)
    assert plan(0.1, budget_s=60.0).trial_steps == SHORTEST_TRIAL_STEPS
    assert plan(2.0, budget_s=60.0).trial_steps == LEAST_TRIAL_STEPS


def test_windows_are_sized_by_the_time_that_is_left_and_not_by_what_was_asked_for():
    assert plan(0.01, budget_s=240.0, time_left_s=60.0) == plan(0.01, budget_s=60.0)


def words(step_s, budget_s, compiles=False):
    made = plan(step_s, 0.3, budget_s=budget_s)
    whole = whole_needs(made, num_layers=50, trials=24, num_baselines=8, low=0.4, timed=True, compiles=compiles)
    return plan_words(made, whole, least_needs(made, low=0.4, timed=True), budget_s - 10, budget_s)


def test_the_plan_names_what_a_short_budget_leaves_out():
    assert "cut or left out" not in words(0.002, 600.0)
    assert "the profile (about" in words(0.16, 40.0)
    assert "2 instead of 3 seeds, some of the trials" in words(0.1, 90.0)
    assert "execution modes" in words(0.05, 100.0, compiles=True)
    assert "shorter than the shortest tune" in words(0.4, 15.0)


def test_costs_start_from_the_probe_and_follow_the_windows_that_ran(folder):
    from decision_fakes import bound, small_model

    space = bound(*small_model())
    low = space.to_policy(space.starts()[0])
    fp32 = low.model_copy(update={"default": "fp32", "layers": {}, "backend": low.backend.model_copy(update={"tf32": False})})
    costs = Costs(0.1, 1.0, low_share=0.4)
    assert costs.window_s(fp32, 10) == pytest.approx(2.0) and costs.window_s(low, 10) == pytest.approx(1.4)
    costs.learn(low, 10, 4.0)
    assert costs.window_s(low, 20) == pytest.approx(7.0) and costs.window_s(fp32, 10) == pytest.approx(2.0)
    costs.learn_compile(12.0)
    assert costs.compile_s == 12.0


def test_a_window_that_hangs_is_ended_soon_after_the_budget(folder):
    clock = Clock()
    timeouts = []

    class Watching(TimedBench):
        def window(self, policy, window):
            timeouts.append((window.purpose, clock() + window.timeout_s))
            return super().window(policy, window)

    bench = Watching(clock, usual(0.02))
    tuned(folder, bench, clock, budget_s=60.0, execution="eager")
    latest_s = max(end_s for purpose, end_s in timeouts if purpose != "probe")
    assert latest_s < 1000 + 60 + 20


def test_a_window_cut_short_by_the_budget_is_not_remembered_as_a_failure(folder):
    from autoprec.records import Failure

    clock = Clock()

    class Hanging(TimedBench):
        def window(self, policy, window):
            if window.purpose == "FP32 twin":
                self._pass(window.purpose, window.timeout_s)
                return Failure(kind="timeout", message="no answer")
            return super().window(policy, window)

    bench = Hanging(clock, usual(0.02))
    result, _, used_s = tuned(folder, bench, clock, budget_s=30.0)
    assert result.chosen == "FP32" and "says nothing" in result.message
    assert used_s < 30 + 20
    kinds = {getattr(candidate.outcome, "kind", "ok") for candidate in RunFolder.read(folder).candidates}
    assert kinds == {"ok"}
