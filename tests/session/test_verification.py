"""Verification goes down the candidates until one passes, and spends extra seeds only where they may change the choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scripted_run import SEEDS, STEP_S, VERIFY_STEPS, is_fp32, scripted, trained

from autoprec.policy import Policy
from autoprec.records import Candidate, Measurement, Window
from autoprec.session.arms import MAX_SEEDS
from autoprec.session.search import TRIAL_SLACK, Found
from autoprec.session.verification import NUM_FINALISTS, run_verification
from autoprec.tune.yardstick import Yardstick

REJECTED, NOISE = (0.1, 0.1, 0.1), (0.05, -0.05, 0.01, 0.02, -0.02, 0.0)


class Contest:
    """fp16 plans, the fastest first, each with its gaps by seed on the verification windows; all train in their trials."""

    def __init__(
        self,
        gaps: Sequence[Sequence[float]],
        behave: Callable[..., Measurement] | None = None,
        again: int | None = None,
        **options: Any,
    ) -> None:
        self._gaps, self._behave = gaps, behave
        self.context, space = scripted(self._script, **options)
        params = space.starts()[0] | {"tf32": False, "channels_last": False, "padding": 0}
        indices = range(len(space.plans["fp16"]) - 1, 0, -1)
        made = [
            space.to_policy(params | {"front_index": index})
            for index in indices
            if not space.hopeless(params | {"front_index": index})
        ]
        self.policies = list({_precisions(policy): policy for policy in made}.values())[: len(gaps)]
        assert len(self.policies) == len(gaps)
        window, fp32 = self.context.trial_window(), self.context.plain_fp32()
        trials = [("fp32", fp32), *(("search", policy) for policy in self.policies)]
        if again is not None:  # one more trial of a plan, under a knob that no window shows
            scale = self.policies[again].loss_scale.model_copy(update={"growth_interval": 1234})
            trials.append(("search", self.policies[again].model_copy(update={"loss_scale": scale})))
        candidates = [
            Candidate(number=n, role=role, policy=policy, window=window, outcome=self._paced(policy, trained(window)), trial=n)
            for n, (role, policy) in enumerate(trials)
        ]
        yardstick = Yardstick(trained(window).losses, tolerance=TRIAL_SLACK * self.context.settings.tolerance)
        found = Found(tuple(candidates), {"fp32": fp32}, yardstick, space.profile, space)
        self.verified = run_verification(self.context, found)

    @property
    def winner(self) -> int | None:
        """The chosen plan's place among the plans; None for plain FP32."""
        return self._place(self.verified.chosen.policy)

    def seeds(self, place: int) -> int:
        """Windows that a plan ran, whatever its loss scale."""
        return sum(self._place(policy) == place for policy, _ in self.context.asked)

    def _place(self, policy: Policy) -> int | None:
        if is_fp32(policy):
            return None
        return next(n for n, other in enumerate(self.policies) if _precisions(other) == _precisions(policy))

    def _paced(self, policy: Policy, outcome: Measurement) -> Measurement:
        place = self._place(policy)
        step_s = 1e-2 if place is None else 1e-3 * (place + 1)
        return outcome.model_copy(update={"step_times_s": (step_s,) * 18})

    def _script(self, policy: Policy, window: Window) -> Measurement:
        place = self._place(policy)
        assert place is not None
        outcome = self._behave(policy, window) if self._behave else trained(window, self._gaps[place][window.seed])
        return self._paced(policy, outcome)


def _precisions(policy: Policy) -> tuple[object, ...]:
    return policy.default, *sorted(policy.precisions().items())


def test_where_all_finalists_fail_the_next_candidates_are_tried_until_one_passes() -> None:
    contest = Contest([REJECTED] * 3 + [(0.0,) * 6] * 3)
    assert contest.winner == 3
    assert contest.seeds(5) == 0, "a slower one has nothing to win"


def test_as_many_fallbacks_as_finalists_are_tried_and_then_fp32_it_is() -> None:
    contest = Contest([REJECTED] * 8)
    assert contest.winner is None
    assert [contest.seeds(place) > 0 for place in range(8)] == [True] * 2 * NUM_FINALISTS + [False] * 2


def test_no_fallback_runs_without_time() -> None:
    contest = Contest([REJECTED] * 5, budget_s=(NUM_FINALISTS + 0.5) * SEEDS * VERIFY_STEPS * STEP_S)
    assert contest.winner is None
    assert sum(contest.seeds(place) > 0 for place in range(5)) == NUM_FINALISTS


def test_a_slower_plan_of_the_same_kind_gets_no_seeds_beyond_the_first() -> None:
    contest = Contest([(0.0,) * 6, NOISE])
    assert contest.winner == 0
    assert (contest.seeds(0), contest.seeds(1)) == (SEEDS, SEEDS)


def test_what_the_first_seeds_leave_open_gets_more_of_them_where_it_could_win() -> None:
    contest = Contest([NOISE, (0.0,) * 6])
    assert contest.winner == 1
    assert contest.seeds(0) == MAX_SEEDS


def test_a_plan_that_falls_behind_by_its_first_skipped_steps_passes_from_the_scale_it_settles_at() -> None:
    def behave(policy: Policy, window: Window) -> Measurement:
        if policy.loss_scale.init > 512:
            return trained(window, 0.02, skipped=4, final_scale=512.0)
        return trained(window)

    contest = Contest([()], behave)
    assert contest.winner == 0
    assert contest.verified.chosen.policy.loss_scale.init == 512.0
    assert any("started at the loss scale of 512" in line for line in contest.context.said)


def test_a_lower_scale_that_trains_worse_is_not_taken() -> None:
    def behave(policy: Policy, window: Window) -> Measurement:
        if policy.loss_scale.init > 512:
            return trained(window, 0.02, skipped=4, final_scale=512.0)
        return trained(window, 0.08)

    contest = Contest([()], behave)
    assert contest.winner is None
    tuned = [arm for arm in contest.verified.arms if not is_fp32(arm.policy)]
    assert [arm.policy.loss_scale.init > 512 for arm in tuned] == [True]


def test_a_finalist_that_rounds_as_one_that_failed_leaves_its_place_to_another() -> None:
    contest = Contest([REJECTED, (0.0,) * 6, (0.0,) * 6], again=0)
    assert contest.winner == 1
    assert contest.seeds(0) == SEEDS, "the same plan with another growth interval would fail too"
    tuned = [arm for arm in contest.verified.arms if not is_fp32(arm.policy)]
    assert len(tuned) == NUM_FINALISTS
