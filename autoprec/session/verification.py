"""Stage 8: finalists and baselines against FP32 on several seeds, and against each other by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.policy import Policy
from autoprec.records import Candidate, Failure, Measurement, Outcome, Verdict
from autoprec.session.arms import (
    BASELINE_NAMES,
    EXTRA_SEEDS_SHARE,
    MAX_SEEDS,
    RANK_BASELINE,
    RANK_FP32,
    RANK_TUNED,
    STOCK_RANKS,
    arm_of,
    is_unclear,
    why,
)
from autoprec.session.budget import REPORT_S, VERIFIED_ARMS
from autoprec.session.context import Context
from autoprec.session.execution_modes import compiled_arms
from autoprec.session.judging import at_settled_scale, judged, trained_on_seeds
from autoprec.session.search import Tried
from autoprec.session.timing import settled, timed
from autoprec.tune.choice import Arm, choose, median_s
from autoprec.tune.front import finalists, kind_of, score
from autoprec.tune.rows import role_words

NUM_FINALISTS = 3


@dataclass(frozen=True)
class Verified:
    """The final comparison: every arm, and the one that became the policy; why the tune ended early, where it did."""

    arms: tuple[Arm, ...]
    chosen: Arm
    not_worth_it: str = ""


def run_verification(context: Context, found: Tried) -> Verified:
    """Verifies numerics, times the arms against each other, tries execution modes, and chooses."""
    arms = settled(context, timed(context, _checked(context, found)))
    if context.compiles and context.plan.verify_seeds:
        arms += compiled_arms(context, arms)
    if context.settings.execution == "compile" and any(arm.eligible for arm in arms if arm.policy.execution != "eager"):
        chosen = choose([arm for arm in arms if arm.policy.execution != "eager"])
    else:
        chosen = choose(arms)
    return Verified(tuple(arms), chosen)


def _checked(context: Context, found: Tried) -> list[Arm]:
    """The baselines and the finalists. FP32 costs nothing; with little time what could become the policy comes before stock AMP."""
    stock = [(role, rank) for role, rank in STOCK_RANKS.items() if role in found.baselines]
    expected = len(stock) - 1 + NUM_FINALISTS
    context.progress.stage("verification", expected)
    modes_s = context.kept_for_execution_s(context.least_after_s())
    short = not context.may_start(context.verification_s(expected), context.timing_s(expected + 1) + modes_s)
    checks = _Checks(context, found, context.timing_s(2) + REPORT_S + modes_s)
    for role, rank in stock[:1]:
        checks.add(BASELINE_NAMES[role], found.baselines[role], rank)
    if short:
        checks.add_finalists()
    for role, rank in reversed(stock[1:]) if short else stock[1:]:
        checks.add(BASELINE_NAMES[role], found.baselines[role], rank)
    if not short:
        checks.add_finalists()
    return sorted(checks.arms, key=lambda arm: min(arm.rank, RANK_BASELINE))


class _Checks:
    """Arms verified one after the other, as far as the time goes."""

    def __init__(self, context: Context, found: Tried, keep_s: float) -> None:
        """Starts with none.

        Args:
            context: of the tune.
            found: what there is to verify.
            keep_s: seconds that the stages after this one need.
        """
        self.arms: list[Arm] = []
        self._context, self._found, self._keep_s = context, found, keep_s

    def add(self, name: str, policy: Policy, rank: int) -> Arm | None:
        """Verifies a set-up; where there is no time for that it has the speed of its trial, or is left out where none ran."""
        context = self._context
        if rank == RANK_FP32 and not context.plan.verify_seeds:
            arm: Arm | None = _unverified(context, name, policy, rank)
        elif rank == RANK_FP32 or context.may_start(_cost_s(context, policy), self._keep_s):
            arm = _verified(context, name, policy, rank, self.arms)
        else:
            context.leave_out(f"verification of {name}")
            ran = any(c.policy.setup_hash() == policy.setup_hash() for c in context.folder.candidates)
            arm = _unverified(context, name, policy, rank) if ran else None
        self.arms += [arm] if arm is not None else []
        return arm

    def add_finalists(self) -> None:
        """As many finalists, then slower candidates as long as one may be faster than all that passed.

        What rounds as one that failed is left out, so its place goes to a candidate that may pass; finalists may also fail together.
        """
        found, context = self._found, self._context
        known = {found.baselines[role].setup_hash() for role in STOCK_RANKS if role in found.baselines}
        failed: set[tuple[object, ...]] = set()
        tried = 0
        for item in finalists(score(found.candidates, found.yardstick), len(found.candidates)):
            policy = item.candidate.policy
            if policy.setup_hash() in known or _numerics_of(policy) in failed:
                continue
            if tried >= NUM_FINALISTS and (
                item.samples_per_s <= _best_rate(context, self.arms) or _is_enough(context, policy, tried, self._keep_s)
            ):
                continue
            name, rank = _entry(found, item.candidate)
            arm = self.add(name, policy, rank)
            known.add(policy.setup_hash())
            failed |= {_numerics_of(policy)} if arm is not None and _has_failed(arm) else set()
            tried += 1


def _is_enough(context: Context, policy: Policy, tried: int, keep_s: float) -> bool:
    """Whether no further candidate is to be tried: as many as there are finalists have followed them, or the time is needed."""
    return tried >= 2 * NUM_FINALISTS or not context.may_start(_cost_s(context, policy), keep_s)


def _has_failed(arm: Arm) -> bool:
    """Whether it was looked at and did not pass."""
    return bool(arm.failure) or (arm.verdict is not None and arm.verdict.status != "passed")


def _best_rate(context: Context, arms: Sequence[Arm]) -> float:
    """Samples a second of the fastest arm that passed."""
    return max((context.look.effective_batch / median_s(arm) for arm in arms if arm.eligible), default=0.0)


def _entry(found: Tried, candidate: Candidate) -> tuple[str, int]:
    """A candidate's name in the comparison, and how far it is from plain FP32."""
    trial = f"trial {candidate.number}"
    if candidate.role in found.baselines:
        return role_words(candidate.role), RANK_BASELINE
    if candidate.role.startswith(("repaired", "fastest")):
        return f"{role_words(candidate.role)} ({trial})", RANK_TUNED
    return trial, RANK_TUNED


def _numerics_of(policy: Policy) -> tuple[object, ...]:
    """What decides how it rounds: where these fail, they fail under other knobs too."""
    backend = policy.backend
    return policy.default, policy.weights, backend.tf32, backend.fp16_accumulation, *sorted(policy.precisions().items())


def _cost_s(context: Context, policy: Policy) -> float:
    """Seconds of the verification windows that have not run yet."""
    return sum(context.window_s(policy, context.verify_window(seed, "")) for seed in range(context.plan.verify_seeds))


def _unverified(context: Context, name: str, policy: Policy, rank: int) -> Arm:
    """The arm with the speed of its trial (FP32: of its probe) and no verdict, so that it cannot become the policy."""
    ran = [c.outcome for c in context.folder.candidates if c.policy.setup_hash() == policy.setup_hash()]
    outcome = next((outcome for outcome in reversed(ran) if isinstance(outcome, Measurement)), ran[-1])
    return arm_of(context, name, policy, rank, outcome, None)


def _verified(context: Context, name: str, policy: Policy, rank: int, done: Sequence[Arm]) -> Arm:
    """An arm with its verdict.

    What the first seeds leave open gets more of them, and what skipped steps is started at the loss scale it settles at; both only
    for what may still become the policy: not where a faster arm of its kind is among those ``done`` and has passed.
    """
    if rank == RANK_FP32:
        outcome: Outcome = context.evaluate(policy, context.verify_window(0, "reference"), role="reference")
        return arm_of(context, name, policy, rank, outcome, None)
    outcomes = trained_on_seeds(context, policy, f"verification of {name}")
    context.progress.advance()
    verdict = judged(context, outcomes)
    if rank >= RANK_BASELINE and not _is_beaten(arm_of(context, name, policy, rank, outcomes[-1], verdict), done):
        if rank >= RANK_TUNED and not _has_passed(verdict):
            policy, outcomes = _settled_in(context, name, policy, outcomes)
        outcomes, verdict = _with_more_seeds(context, name, policy, outcomes)
    first = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), outcomes[0])
    context.progress.found(f"{name}: {verdict.text if verdict else why(first)}")
    return arm_of(context, name, policy, rank, first, verdict)


def _settled_in(context: Context, name: str, policy: Policy, outcomes: list[Outcome]) -> tuple[Policy, list[Outcome]]:
    """The policy started at the loss scale it settles at, with its outcomes, where it then ends nearer to FP32."""
    at_settled, verdict = at_settled_scale(policy, outcomes), judged(context, outcomes)
    if at_settled is None or not context.may_start(_cost_s(context, at_settled), context.timing_s(VERIFIED_ARMS) + REPORT_S):
        return policy, outcomes
    again = trained_on_seeds(context, at_settled, f"verification of {name}")
    better = judged(context, again)
    if better is None or (verdict is not None and abs(verdict.loss_gap) < abs(better.loss_gap)):
        return policy, outcomes
    context.progress.found(f"{name}: started at the loss scale of {at_settled.loss_scale.init:g} that it settles at")
    return at_settled, again


def _is_beaten(arm: Arm, done: Sequence[Arm]) -> bool:
    """Whether an arm of the same kind is faster and has passed."""
    rivals = [other for other in done if other.eligible and kind_of(other.policy) == kind_of(arm.policy)]
    return bool(arm.step_times_s) and any(median_s(other) < median_s(arm) for other in rivals)


def _with_more_seeds(
    context: Context, name: str, policy: Policy, outcomes: list[Outcome]
) -> tuple[list[Outcome], Verdict | None]:
    """Outcomes and verdict, with further seeds where the verdict is open, while the budget lasts."""
    verdict = judged(context, outcomes)
    while _may_clear(context, verdict) and len(outcomes) < MAX_SEEDS:
        window = context.verify_window(len(outcomes), f"verification of {name}")
        outcomes = [*outcomes, context.evaluate(policy, window, role="verification")]
        verdict = judged(context, outcomes)
    return outcomes, verdict


def _may_clear(context: Context, verdict: Verdict | None) -> bool:
    """Whether more seeds are worth their time: where they could decide, while the budget lasts."""
    if not is_unclear(verdict) or context.study_time_is_over(EXTRA_SEEDS_SHARE):
        return False
    steps = context.plan.verify_steps
    cost_s = context.low_s(steps) + context.costs.window_s(context.plain_fp32(), steps)
    return context.may_start(cost_s, context.timing_s(VERIFIED_ARMS) + REPORT_S)


def _has_passed(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.status == "passed"
