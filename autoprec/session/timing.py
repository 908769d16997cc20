"""Stage 8, by the clock: arms interleaved in one process, the closest pair timed again."""

from __future__ import annotations

from collections.abc import Mapping

from autoprec.records import UNDECIDED_FAILURES, Failure, Outcome
from autoprec.session.arms import EXTRA_SEEDS_SHARE, RANK_FP32, RANK_STOCK, why
from autoprec.session.budget import REPORT_S
from autoprec.session.context import Context
from autoprec.tune.choice import Arm, faster_beyond_noise, median_s

# How often a close pair is timed again, three times as long each time, and from what ratio on that is worth it. Own choice.
MAX_RETIMINGS, WORTH_SETTLING = 2, 1.01


def timed(context: Context, arms: list[Arm]) -> list[Arm]:
    """The arms with step times that can be compared: interleaved in one process where they are measured."""
    if context.target.timing == "predicted":
        return arms
    context.progress.stage("timing", 1)
    runnable = _timed_in_time(context, [arm for arm in arms if not arm.failure])
    if len(runnable) < 2:
        return arms
    outcomes = context.interleave(tuple(arm.policy for arm in runnable), context.timing_window())
    context.progress.advance()
    by_name = dict(zip((arm.name for arm in runnable), outcomes, strict=True))
    for arm in runnable:
        context.folder.record("timing", arm.policy, context.timing_window(), by_name[arm.name])
    say_dropped(context, by_name)
    if (reason := _void(runnable, by_name)) is not None:
        text = (
            f"FP32 could not be timed in turns with the others ({reason}), so step times are those of windows one after the other"
        )
        context.progress.found(f"timing: {text}")
        context.folder.notes.append(f"{text}.")
        return [_failed_for_good(arm, by_name.get(arm.name)) for arm in arms]
    return [_retimed(arm, by_name[arm.name]) if arm.name in by_name else arm for arm in arms]


def say_dropped(context: Context, outcomes: Mapping[str, Outcome]) -> None:
    """Says of every set-up timed how many of its steps did not count, and why."""
    for name, outcome in outcomes.items():
        if not isinstance(outcome, Failure) and outcome.note:
            context.progress.found(f"timing: {name}: {outcome.note}")


def _void(arms: list[Arm], outcomes: Mapping[str, Outcome]) -> str | None:
    """Why a timing in turns says nothing of any set-up; None where it does. A process that died takes all arms with it."""
    fp32 = next((outcomes[arm.name] for arm in arms if arm.rank == RANK_FP32), None)
    return why(fp32) if isinstance(fp32, Failure) else None


def _failed_for_good(arm: Arm, outcome: Outcome | None) -> Arm:
    """The arm as its own windows showed it, unless the timing in turns showed that it does not train."""
    decided = isinstance(outcome, Failure) and outcome.kind not in UNDECIDED_FAILURES and arm.rank != RANK_FP32
    return _retimed(arm, outcome) if decided and outcome is not None else arm


def _timed_in_time(context: Context, arms: list[Arm]) -> list[Arm]:
    """The arms whose interleaved timing the budget holds: FP32, what can become the policy, fastest first, then stock AMP."""
    first = sorted(
        (arm for arm in arms if arm.rank != RANK_FP32), key=lambda arm: (not arm.eligible, arm.rank != RANK_STOCK, median_s(arm))
    )
    chosen = [arm for arm in arms if arm.rank == RANK_FP32]
    keep_s = context.kept_for_execution_s(context.timing_s(2) + REPORT_S) + REPORT_S
    for arm in first:
        if context.may_start(context.timing_s(len(chosen) + 1), keep_s):
            chosen.append(arm)
    if len(chosen) < len(arms):
        context.leave_out(f"interleaved timing of {len(arms) - len(chosen)} of {len(arms)} set-ups", decides=False)
    return [arm for arm in arms if arm in chosen]


def settled(context: Context, arms: list[Arm]) -> list[Arm]:
    """Times the two fastest arms again where their order is not clear and would matter for the choice."""
    if context.target.timing == "predicted":
        return arms
    for _ in range(MAX_RETIMINGS):
        pair = sorted((arm for arm in arms if arm.eligible), key=median_s)[:2]
        if len(pair) < 2 or context.study_time_is_over(EXTRA_SEEDS_SHARE) or not _is_close(*pair):
            return arms
        if not context.may_start(3 * context.timing_s(2), context.kept_for_execution_s(REPORT_S) + REPORT_S):
            return arms
        window = context.timing_window(times=3)
        outcomes = dict(zip((arm.name for arm in pair), context.interleave([arm.policy for arm in pair], window), strict=True))
        context.progress.found(f"timing: {pair[0].name} against {pair[1].name} is too close to call, timed again")
        for arm in pair:
            context.folder.record("timing", arm.policy, window, outcomes[arm.name])
        say_dropped(context, outcomes)
        if any(isinstance(outcome, Failure) for outcome in outcomes.values()):
            return arms
        arms = [_with_more_samples(arm, outcomes[arm.name]) if arm.name in outcomes else arm for arm in arms]
    return arms


def _is_close(fast: Arm, slow: Arm) -> bool:
    """Whether the faster arm is ahead by more than a trifle, is not the simpler one, and yet not ahead beyond noise."""
    ahead = median_s(slow) / median_s(fast) > WORTH_SETTLING
    return ahead and fast.rank >= slow.rank and not faster_beyond_noise(slow, fast)


def _with_more_samples(arm: Arm, outcome: Outcome) -> Arm:
    if isinstance(outcome, Failure):
        return arm
    fields = {"step_times_s": arm.step_times_s + outcome.step_times_s, "block_steps": arm.block_steps + outcome.block_steps}
    return arm.model_copy(update=fields)


def _retimed(arm: Arm, outcome: Outcome) -> Arm:
    if isinstance(outcome, Failure):
        return arm.model_copy(update={"step_times_s": (), "block_steps": (), "failure": why(outcome)})
    fields = {name: getattr(outcome, name) for name in ("step_times_s", "block_steps", "host_bound")}
    return arm.model_copy(update=fields)
