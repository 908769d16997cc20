"""Stage 8: finalists and baselines against FP32 on several seeds, and against each other by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.policy import Execution, Policy
from autoprec.records import Candidate, Failure, Measurement, Outcome, Verdict, Window
from autoprec.session.context import Context
from autoprec.session.judging import at_settled_scale, judged, trained_on_seeds
from autoprec.session.search import Found
from autoprec.tune.choice import Arm, choose, faster_beyond_noise, median_s
from autoprec.tune.front import finalists, kind_of, score
from autoprec.tune.rows import role_words

NUM_FINALISTS = 3
# Seeds are added while a verdict is inconclusive, up to this many. Own choice: the interval shrinks with the root of the number.
MAX_SEEDS = 6
# How often a close pair is timed again, three times as long each time, and from what ratio on that is worth it. Own choice.
MAX_RETIMINGS, WORTH_SETTLING = 2, 1.01
# Extra seeds run only while more than this share of the budget is left.
EXTRA_SEEDS_SHARE = 0.25
# Compiling starts only while this much wall time is left. Source: ResNet-50 took 43 s to compile on an H200 (torch 2.11).
COMPILE_NEEDS_S = 45.0
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
    """The final comparison: every arm, and the one that became the policy."""

    arms: tuple[Arm, ...]
    chosen: Arm


def run_verification(context: Context, found: Found) -> Verified:
    """Verifies numerics, times the arms against each other, tries execution modes, and chooses."""
    checked = _checked(context, found)
    arms = _settled(context, _timed(context, checked))
    if context.compiles:
        arms += _compiled_arms(context, arms)
    if context.settings.execution == "compile" and any(arm.eligible for arm in arms if arm.policy.execution != "eager"):
        chosen = choose([arm for arm in arms if arm.policy.execution != "eager"])
    else:
        chosen = choose(arms)
    return Verified(tuple(arms), chosen)


RANK_FP32, RANK_TF32, RANK_STOCK, RANK_BASELINE, RANK_TUNED, RANK_COMPILED = range(6)
STOCK_RANKS = {"fp32": RANK_FP32, "fp32_tf32": RANK_TF32, "amp_fp16": RANK_STOCK, "amp_bf16": RANK_STOCK}


def _checked(context: Context, found: Found) -> list[Arm]:
    """The baselines, then as many finalists, then slower candidates as long as one may be faster than all that passed.

    What rounds as one that failed is left out, so its place goes to a candidate that may pass; finalists may also fail together.
    """
    stock = [(role, rank) for role, rank in STOCK_RANKS.items() if role in found.baselines]
    context.progress.stage("verification", len(stock) - 1 + NUM_FINALISTS)
    arms: list[Arm] = []
    for role, rank in stock:
        arms.append(_verified(context, BASELINE_NAMES[role], found.baselines[role], rank, arms))
    known = {found.baselines[role].setup_hash() for role, _ in stock}
    failed: set[tuple[object, ...]] = set()
    tried = 0
    for item in finalists(score(found.candidates, found.yardstick), len(found.candidates)):
        policy = item.candidate.policy
        if policy.setup_hash() in known or _numerics_of(policy) in failed:
            continue
        if tried >= NUM_FINALISTS and (item.samples_per_s <= _best_rate(context, arms) or _is_enough(context, tried)):
            continue
        name, rank = _entry(found, item.candidate)
        arms.append(_verified(context, name, policy, rank, arms))
        known.add(policy.setup_hash())
        failed |= set() if arms[-1].eligible else {_numerics_of(policy)}
        tried += 1
    return arms


def _is_enough(context: Context, tried: int) -> bool:
    """Whether no further candidate is to be tried: as many as there are finalists have followed them, or the time is needed."""
    return tried >= 2 * NUM_FINALISTS or context.study_time_is_over(EXTRA_SEEDS_SHARE)


def _best_rate(context: Context, arms: Sequence[Arm]) -> float:
    """Samples a second of the fastest arm that passed."""
    return max((context.look.effective_batch / median_s(arm) for arm in arms if arm.eligible), default=0.0)


def _entry(found: Found, candidate: Candidate) -> tuple[str, int]:
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


def _verified(context: Context, name: str, policy: Policy, rank: int, done: Sequence[Arm]) -> Arm:
    """An arm with its verdict.

    What the first seeds leave open gets more of them, and what skipped steps is started at the loss scale it settles at; both only
    for what may still become the policy: not where a faster arm of its kind is among those ``done`` and has passed.
    """
    if rank == RANK_FP32:
        outcome: Outcome = context.evaluate(policy, context.verify_window(0, "reference"), role="reference")
        return _arm(context, name, policy, rank, outcome, None)
    outcomes = trained_on_seeds(context, policy, f"verification of {name}")
    context.progress.advance()
    verdict = judged(context, outcomes)
    if rank >= RANK_BASELINE and not _is_beaten(_arm(context, name, policy, rank, outcomes[-1], verdict), done):
        if rank >= RANK_TUNED and not _has_passed(verdict):
            policy, outcomes = _settled_in(context, name, policy, outcomes)
        outcomes, verdict = _with_more_seeds(context, name, policy, outcomes)
    first = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), outcomes[0])
    context.progress.found(f"{name}: {verdict.text if verdict else _why(first)}")
    return _arm(context, name, policy, rank, first, verdict)


def _settled_in(context: Context, name: str, policy: Policy, outcomes: list[Outcome]) -> tuple[Policy, list[Outcome]]:
    """The policy started at the loss scale it settles at, with its outcomes, where it then ends nearer to FP32."""
    settled, verdict = at_settled_scale(policy, outcomes), judged(context, outcomes)
    if settled is None:
        return policy, outcomes
    again = trained_on_seeds(context, settled, f"verification of {name}")
    better = judged(context, again)
    if better is None or (verdict is not None and abs(verdict.loss_gap) < abs(better.loss_gap)):
        return policy, outcomes
    context.progress.found(f"{name}: started at the loss scale of {settled.loss_scale.init:g} that it settles at")
    return settled, again


def _is_beaten(arm: Arm, done: Sequence[Arm]) -> bool:
    """Whether an arm of the same kind is faster and has passed."""
    rivals = [other for other in done if other.eligible and kind_of(other.policy) == kind_of(arm.policy)]
    return bool(arm.step_times_s) and any(median_s(other) < median_s(arm) for other in rivals)


def _with_more_seeds(
    context: Context, name: str, policy: Policy, outcomes: list[Outcome]
) -> tuple[list[Outcome], Verdict | None]:
    """Outcomes and verdict, with further seeds where the verdict is open, while the budget lasts."""
    verdict = judged(context, outcomes)
    while _is_unclear(verdict) and len(outcomes) < MAX_SEEDS and not context.study_time_is_over(EXTRA_SEEDS_SHARE):
        window = context.verify_window(len(outcomes), f"verification of {name}")
        outcomes = [*outcomes, context.evaluate(policy, window, role="verification")]
        verdict = judged(context, outcomes)
    return outcomes, verdict


def _is_unclear(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.status == "inconclusive"


def _has_passed(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.status == "passed"


def _why(outcome: Outcome) -> str:
    if not isinstance(outcome, Failure):
        return ""
    where = f" in {outcome.layer}" if outcome.layer else ""
    return f"{outcome.kind}{where}: {outcome.message}"


def _arm(context: Context, name: str, policy: Policy, rank: int, outcome: Outcome, verdict: Verdict | None) -> Arm:
    if isinstance(outcome, Failure):
        return Arm(name=name, policy=policy, rank=rank, speed_origin=context.target.timing, failure=_why(outcome))
    return Arm(
        name=name,
        policy=policy,
        rank=rank,
        step_times_s=outcome.step_times_s,
        useful_share=_useful_share(outcome),
        speed_origin=outcome.speed_origin,
        peak_bytes=outcome.peak_bytes,
        verdict=verdict,
        host_bound=outcome.host_bound,
    )


def _useful_share(measurement: Measurement) -> float:
    """Share of steps that did work, counted over the second half: a scale that settles at the start costs a long run nothing."""
    if not measurement.losses:
        return 1.0
    return max(0.0, 1.0 - measurement.late_skipped_steps / max(len(measurement.losses) - len(measurement.losses) // 2, 1))


def _timed(context: Context, arms: list[Arm]) -> list[Arm]:
    """The arms with step times that can be compared: interleaved in one process where they are measured."""
    if context.target.timing == "predicted":
        return arms
    context.progress.stage("timing", 1)
    runnable = [arm for arm in arms if not arm.failure]
    outcomes = context.bench.interleave(tuple(arm.policy for arm in runnable), context.timing_window())
    context.progress.advance()
    timed = dict(zip((arm.name for arm in runnable), outcomes, strict=True))
    for arm in runnable:
        context.folder.record("timing", arm.policy, context.timing_window(), timed[arm.name])
    return [_retimed(arm, timed[arm.name]) if arm.name in timed else arm for arm in arms]


def _settled(context: Context, arms: list[Arm]) -> list[Arm]:
    """Times the two fastest arms again where their order is not clear and would matter for the choice."""
    if context.target.timing == "predicted":
        return arms
    for _ in range(MAX_RETIMINGS):
        pair = sorted((arm for arm in arms if arm.eligible), key=median_s)[:2]
        if len(pair) < 2 or context.study_time_is_over(EXTRA_SEEDS_SHARE) or not _is_close(*pair):
            return arms
        window = context.timing_window(times=3)
        outcomes = dict(
            zip((arm.name for arm in pair), context.bench.interleave([arm.policy for arm in pair], window), strict=True)
        )
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
        if context.time_left_s < COMPILE_NEEDS_S and made:
            context.progress.found(f"execution: {arm.name}{EXECUTION_NAMES[execution]} left out, no time for another compile")
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
    base, outcome = context.bench.interleave((anchor.policy, policy), window)
    context.folder.record("timing", policy, window, outcome)
    made = _arm(context, name, policy, RANK_COMPILED, outcome, None)
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
        if len(outcomes) >= context.plan.verify_seeds and context.time_left_s <= 0:
            break
        window: Window = context.verify_window(len(outcomes), f"verification of {arm.name}", extra_timeout_s=COMPILE_TIMEOUT_S)
        outcomes.append(context.evaluate(arm.policy, window, role="verification"))
        if isinstance(outcomes[-1], Failure):
            context.progress.found(f"{arm.name}: {_why(outcomes[-1])}")
            return arm.model_copy(update={"failure": _why(outcomes[-1]), "step_times_s": ()})
        verdict = judged(context, outcomes)
    peaks = [outcome.peak_bytes for outcome in outcomes if isinstance(outcome, Measurement)]
    context.progress.found(f"{arm.name}: {verdict.text if verdict else ''}")
    return arm.model_copy(update={"verdict": verdict, "peak_bytes": max(peaks, default=arm.peak_bytes)})
