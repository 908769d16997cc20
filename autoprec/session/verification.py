"""Stage 8: finalists and baselines against FP32 on several seeds, and against each other by the clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoprec.policy import Execution, Policy
from autoprec.records import Failure, Measurement, Outcome, Verdict, Window
from autoprec.session.budget import REPORT_S, VERIFIED_ARMS
from autoprec.session.context import Context
from autoprec.session.reference import reference_curve, twin_noise
from autoprec.session.search import Tried
from autoprec.tune.choice import Arm, choose, faster_beyond_noise, median_s
from autoprec.tune.divergence import loss_gap
from autoprec.tune.front import finalists, kind_of, score
from autoprec.tune.rows import role_words
from autoprec.tune.verdict import judge

NUM_FINALISTS = 3
# Seeds are added while a verdict is inconclusive, up to this many. Own choice: the interval shrinks with the root of the number.
MAX_SEEDS = 6
# On one seed, all that a short budget holds, a policy passes only well within the tolerance: nothing shows how seeds scatter.
# Own choice.
ONE_SEED_SHARE = 0.25
# How often a close pair is timed again, three times as long each time, and from what ratio on that is worth it. Own choice.
MAX_RETIMINGS, WORTH_SETTLING = 2, 1.01
# Extra seeds run only while more than this share of the budget is left.
EXTRA_SEEDS_SHARE = 0.25
# A compiled window may take this much longer than an eager one.
COMPILE_TIMEOUT_S = 300.0
BASELINE_NAMES = {
    "fp32": "FP32",
    "fp32_tf32": "FP32 + TF32",
    "amp_fp16": "stock AMP fp16",
    "amp_bf16": "stock AMP bf16",
}
EXECUTION_NAMES: dict[Execution, str] = {"eager": "", "compile": ", compiled", "compile_cudagraphs": ", CUDA graphs"}


@dataclass(frozen=True)
class Verified:
    """The final comparison: every arm, and the one that became the policy; why the tune ended early, where it did."""

    arms: tuple[Arm, ...]
    chosen: Arm
    not_worth_it: str = ""


def run_verification(context: Context, found: Tried) -> Verified:
    """Verifies numerics, times the arms against each other, tries execution modes, and chooses."""
    contenders = _contenders(context, found)
    context.progress.stage("verification", (len(contenders) - 1) * context.plan.verify_seeds)
    checked = _checked(context, contenders)
    arms = _settled(context, _timed(context, checked))
    if context.compiles and context.plan.verify_seeds:
        arms += _compiled_arms(context, arms)
    if context.settings.execution == "compile" and any(arm.eligible for arm in arms if arm.policy.execution != "eager"):
        chosen = choose([arm for arm in arms if arm.policy.execution != "eager"])
    else:
        chosen = choose(arms)
    return Verified(tuple(arms), chosen)


RANK_FP32, RANK_TF32, RANK_STOCK, RANK_BASELINE, RANK_TUNED, RANK_COMPILED = range(6)


def _contenders(context: Context, found: Tried) -> dict[str, tuple[Policy, int]]:
    """Policies to compare, with how far each is from plain FP32."""
    ranks = {"fp32": RANK_FP32, "fp32_tf32": RANK_TF32, "amp_fp16": RANK_STOCK, "amp_bf16": RANK_STOCK}
    contenders = {BASELINE_NAMES[role]: (found.baselines[role], rank) for role, rank in ranks.items() if role in found.baselines}
    known = {policy.setup_hash() for policy, _ in contenders.values()}
    for item in finalists(score(found.candidates, found.yardstick), NUM_FINALISTS + len(contenders)):
        policy = item.candidate.policy
        if policy.setup_hash() in known or sum(rank >= RANK_BASELINE for _, rank in contenders.values()) >= NUM_FINALISTS:
            continue
        known.add(policy.setup_hash())
        is_baseline = item.candidate.role in found.baselines
        trial = f"trial {item.candidate.number}"
        name = role_words(item.candidate.role) if is_baseline else trial
        if item.candidate.role.startswith(("repaired", "fastest")):
            name = f"{role_words(item.candidate.role)} ({trial})"
        contenders[name] = (policy, RANK_BASELINE if is_baseline else RANK_TUNED)
    return contenders


def _checked(context: Context, contenders: Mapping[str, tuple[Policy, int]]) -> dict[str, tuple[Arm, Outcome]]:
    """Every contender with its verdict. Where the time may not hold all, those that could become the policy come first."""
    modes_s = context.kept_for_execution_s(context.least_after_s())
    short = not context.may_start(context.verification_s(len(contenders)), context.timing_s(len(contenders)) + modes_s)
    order = sorted(contenders, key=lambda name: _urgency(contenders[name][1], short))
    checked: dict[str, tuple[Arm, Outcome]] = {}
    for name in order:
        policy, rank = contenders[name]
        keep_s = context.timing_s(2) + REPORT_S + modes_s
        if rank != RANK_FP32 and not context.may_start(_cost_s(context, policy), keep_s):
            context.leave_out(f"verification of {name}")
            if any(c.policy.setup_hash() == policy.setup_hash() for c in context.folder.candidates):
                checked[name] = _unverified(context, name, policy, rank)
        else:
            checked[name] = _verified(context, name, policy, rank)
    return {name: checked[name] for name in contenders if name in checked}


def _urgency(rank: int, short: bool) -> int:
    """What is verified first: FP32 costs nothing; with little time the finalists, then stock AMP, then TF32."""
    return rank if rank == RANK_FP32 or not short else -rank + RANK_COMPILED + 1


def _cost_s(context: Context, policy: Policy) -> float:
    """Seconds of the verification windows that have not run yet."""
    return sum(context.window_s(policy, context.verify_window(seed, "")) for seed in range(context.plan.verify_seeds))


def _unverified(context: Context, name: str, policy: Policy, rank: int) -> tuple[Arm, Outcome]:
    """The arm with the speed of its trial (FP32: of its probe) and no verdict, so that it cannot become the policy."""
    ran = [c.outcome for c in context.folder.candidates if c.policy.setup_hash() == policy.setup_hash()]
    outcome = next((outcome for outcome in reversed(ran) if isinstance(outcome, Measurement)), ran[-1])
    return arm_of(context, name, policy, rank, outcome, None), outcome


def _verified(context: Context, name: str, policy: Policy, rank: int) -> tuple[Arm, Outcome]:
    """An arm with its verdict and the outcome of its first seed."""
    if rank == RANK_FP32:
        if not context.plan.verify_seeds:
            return _unverified(context, name, policy, rank)
        outcome: Outcome = context.evaluate(policy, context.verify_window(0, "reference"), role="reference")
        return arm_of(context, name, policy, rank, outcome, None), outcome
    outcomes: list[Outcome] = []
    for seed in range(context.plan.verify_seeds):
        if outcomes and context.time_left_s <= 0:
            break  # fewer seeds, and the verdict says so
        outcomes.append(context.evaluate(policy, context.verify_window(seed, f"verification of {name}"), role="verification"))
        context.progress.advance()
        if isinstance(outcomes[-1], Failure):
            break
    verdict = _judged(context, outcomes)
    while _may_clear(context, rank, verdict) and len(outcomes) < MAX_SEEDS:
        window = context.verify_window(len(outcomes), f"verification of {name}")
        outcomes.append(context.evaluate(policy, window, role="verification"))
        verdict = _judged(context, outcomes)
    first = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), outcomes[0])
    context.progress.found(f"{name}: {verdict.text if verdict else _why(first)}")
    return arm_of(context, name, policy, rank, first, verdict), outcomes[0]


def _may_clear(context: Context, rank: int, verdict: Verdict | None) -> bool:
    """Whether more seeds are worth their time: for what may become the policy, while the budget lasts."""
    if not _is_unclear(verdict) or rank < RANK_BASELINE or context.study_time_is_over(EXTRA_SEEDS_SHARE):
        return False
    steps = context.plan.verify_steps
    cost_s = context.low_s(steps) + context.costs.window_s(context.plain_fp32(), steps)
    return context.may_start(cost_s, context.timing_s(VERIFIED_ARMS) + REPORT_S)


def _is_unclear(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.status == "inconclusive"


def _judged(context: Context, outcomes: Iterable[Outcome]) -> Verdict | None:
    """The verdict over the seeds; None where a window failed."""
    gaps = []
    for seed, outcome in enumerate(outcomes):
        if isinstance(outcome, Failure):
            return None
        gaps.append(loss_gap(reference_curve(context, seed)[: len(outcome.losses)], outcome.losses))
    noise = twin_noise(context, context.plan.verify_seeds)
    verdict = judge(gaps, noise, tolerance=context.settings.tolerance, noise_pairs=context.plan.verify_seeds)
    if len(gaps) == 1 and verdict.status == "passed" and gaps[0] > ONE_SEED_SHARE * verdict.tolerance:
        text = "Inconclusive: one seed shows no scatter, and its loss ends"
        told = verdict.text.replace("Passed: the loss ends", text)
        return verdict.model_copy(update={"status": "inconclusive", "text": told})
    return verdict


def _why(outcome: Outcome) -> str:
    if not isinstance(outcome, Failure):
        return ""
    where = f" in {outcome.layer}" if outcome.layer else ""
    return f"{outcome.kind}{where}: {outcome.message}"


def arm_of(context: Context, name: str, policy: Policy, rank: int, outcome: Outcome, verdict: Verdict | None) -> Arm:
    if isinstance(outcome, Failure):
        return Arm(name=name, policy=policy, rank=rank, speed_origin=context.target.timing, failure=_why(outcome))
    return Arm(
        name=name,
        policy=policy,
        rank=rank,
        step_times_s=outcome.step_times_s,
        useful_share=useful_share(outcome),
        speed_origin=outcome.speed_origin,
        peak_bytes=outcome.peak_bytes,
        verdict=verdict,
        host_bound=outcome.host_bound,
    )


def useful_share(measurement: Measurement) -> float:
    """Share of steps that did work, counted over the second half: a scale that settles at the start costs a long run nothing."""
    if not measurement.losses:
        return 1.0
    return max(0.0, 1.0 - measurement.late_skipped_steps / max(len(measurement.losses) - len(measurement.losses) // 2, 1))


def _timed(context: Context, checked: Mapping[str, tuple[Arm, Outcome]]) -> list[Arm]:
    """The arms with step times that can be compared: interleaved in one process where they are measured."""
    arms = [arm for arm, _ in checked.values()]
    if context.target.timing == "predicted":
        return arms
    context.progress.stage("timing", 1)
    runnable = _timed_in_time(context, [arm for arm in arms if not arm.failure])
    if len(runnable) < 2:
        return arms
    outcomes = context.interleave(tuple(arm.policy for arm in runnable), context.timing_window())
    context.progress.advance()
    timed = dict(zip((arm.name for arm in runnable), outcomes, strict=True))
    for arm in runnable:
        context.folder.record("timing", arm.policy, context.timing_window(), timed[arm.name])
    return [_retimed(arm, timed[arm.name]) if arm.name in timed else arm for arm in arms]


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


def _settled(context: Context, arms: list[Arm]) -> list[Arm]:
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
        arms = [_with_more_samples(arm, outcomes[arm.name]) if arm.name in outcomes else arm for arm in arms]
    return arms


def _is_close(fast: Arm, slow: Arm) -> bool:
    """Whether the faster arm is ahead by more than a trifle, is not the simpler one, and yet not ahead beyond noise."""
    ahead = median_s(slow) / median_s(fast) > WORTH_SETTLING
    return ahead and fast.rank >= slow.rank and not faster_beyond_noise(slow, fast)


def _with_more_samples(arm: Arm, outcome: Outcome) -> Arm:
    if isinstance(outcome, Failure):
        return arm
    return arm.model_copy(update={"step_times_s": arm.step_times_s + outcome.step_times_s})


def _retimed(arm: Arm, outcome: Outcome) -> Arm:
    if isinstance(outcome, Failure):
        return arm.model_copy(update={"step_times_s": (), "failure": _why(outcome)})
    return arm.model_copy(update={"step_times_s": outcome.step_times_s, "host_bound": outcome.host_bound})


def _compiled_arms(context: Context, arms: list[Arm]) -> list[Arm]:
    """Finalists of different kinds and the better stock AMP, compiled; each timed against the best eager arm."""
    eager = sorted((arm for arm in arms if arm.eligible), key=median_s)
    anchor = eager[0]
    variants = _variants(eager, [arm for arm in eager if arm.rank == RANK_STOCK])
    context.progress.stage("execution", len(variants))
    made: list[Arm] = []
    for arm, execution in variants:
        # What cannot be verified afterwards is not worth compiling; asked for by name, one compile runs while there is any time.
        asked = context.settings.execution == "compile" and not made and context.time_left_s > 0
        if not asked and not context.may_start(
            context.costs.compile_s, context.execution_s() - context.costs.compile_s + REPORT_S
        ):
            context.leave_out(f"{arm.name}{EXECUTION_NAMES[execution]}", "no time for another compile")
            continue
        made.append(_compiled(context, anchor, arm, execution))
        context.progress.advance()
    # The fastest is verified first; a slower one is only looked at where it fails.
    result: list[Arm] = []
    for arm in sorted(made, key=lambda arm: median_s(arm) if arm.step_times_s else float("inf")):
        if arm.step_times_s and not any(done.eligible for done in result):
            arm = _verify_compiled(context, arm)
        result.append(arm)
    return result


def _variants(eager: list[Arm], stock: list[Arm]) -> list[tuple[Arm, Execution]]:
    """What to compile, the most promising first: CUDA graphs of each kind, then plain compile of the fastest and of stock AMP."""
    kinds: dict[tuple[str, bool], Arm] = {}
    for arm in eager:
        kinds.setdefault(kind_of(arm.policy), arm)
    heads = sorted(kinds.values(), key=median_s)
    low = [arm for arm in heads if kind_of(arm.policy)[0] != "fp32"][:2] or heads[:1]
    variants: list[tuple[Arm, Execution]] = [(arm, "compile_cudagraphs") for arm in low]
    variants.append((low[0], "compile"))
    variants += [(arm, "compile") for arm in stock[:1] if arm.name != low[0].name]
    if eager[0].host_bound:
        variants += [(arm, "compile_cudagraphs") for arm in heads if arm not in low][:1]
    return variants


def _compiled(context: Context, anchor: Arm, arm: Arm, execution: Execution) -> Arm:
    name = f"{arm.name}{EXECUTION_NAMES[execution]}"
    policy = arm.policy.model_copy(update={"execution": execution})
    window = context.timing_window(extra_timeout_s=COMPILE_TIMEOUT_S)
    base, outcome = context.interleave((anchor.policy, policy), window)
    context.folder.record("timing", policy, window, outcome)
    made = arm_of(context, name, policy, RANK_COMPILED, outcome, None)
    if isinstance(base, Failure) or made.failure:
        context.progress.found(f"{name}: {made.failure or _why(base)}")
        return made.model_copy(update={"step_times_s": ()})
    # Both ran interleaved, so the anchor's own drift between the two timings is taken out.
    drift = median_s(anchor) / base.step_s
    context.progress.found(f"{name}: {base.step_s / median_s(made):.2f}x the best eager arm")
    return made.model_copy(
        update={"step_times_s": tuple(time_s * drift for time_s in made.step_times_s), "peak_bytes": arm.peak_bytes}
    )


def _verify_compiled(context: Context, arm: Arm) -> Arm:
    """Numerics of the compiled model itself on every seed; its kernels are kept in the cache, so this compiles only once more."""
    outcomes: list[Outcome] = []
    verdict: Verdict | None = None
    # A further seed costs no further compile, so an unclear verdict is worth one while any time is left.
    while len(outcomes) < context.plan.verify_seeds or (_is_unclear(verdict) and len(outcomes) < MAX_SEEDS):
        if outcomes and not context.may_start(context.compiled_s()):
            break
        if context.time_left_s <= 0:
            context.leave_out(f"verification of {arm.name}")
            return arm
        window: Window = context.verify_window(len(outcomes), f"verification of {arm.name}", extra_timeout_s=COMPILE_TIMEOUT_S)
        outcomes.append(context.evaluate(arm.policy, window, role="verification"))
        if isinstance(outcomes[-1], Failure):
            context.progress.found(f"{arm.name}: {_why(outcomes[-1])}")
            return arm.model_copy(update={"failure": _why(outcomes[-1]), "step_times_s": ()})
        verdict = _judged(context, outcomes)
    peaks = [outcome.peak_bytes for outcome in outcomes if isinstance(outcome, Measurement)]
    context.progress.found(f"{arm.name}: {verdict.text if verdict else ''}")
    return arm.model_copy(update={"verdict": verdict, "peak_bytes": max(peaks, default=arm.peak_bytes)})
