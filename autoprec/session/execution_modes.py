"""Stage 8, execution modes: the best arms under torch.compile and CUDA graphs, timed against the best eager arm and verified."""

from __future__ import annotations

from autoprec.policy import Execution
from autoprec.records import Failure, Measurement, Outcome, Verdict, Window
from autoprec.session.arms import (
    COMPILE_TIMEOUT_S,
    EXECUTION_NAMES,
    MAX_SEEDS,
    RANK_COMPILED,
    RANK_STOCK,
    arm_of,
    is_unclear,
    why,
)
from autoprec.session.budget import REPORT_S
from autoprec.session.context import Context
from autoprec.session.judging import judged
from autoprec.session.timing import say_dropped
from autoprec.tune.choice import Arm, median_s
from autoprec.tune.front import kind_of


def compiled_arms(context: Context, arms: list[Arm]) -> list[Arm]:
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
    say_dropped(context, {anchor.name: base, name: outcome})
    made = arm_of(context, name, policy, RANK_COMPILED, outcome, None)
    if isinstance(base, Failure) or made.failure:
        context.progress.found(f"{name}: {made.failure or why(base)}")
        return made.model_copy(update={"step_times_s": (), "block_steps": ()})
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
    while len(outcomes) < context.plan.verify_seeds or (is_unclear(verdict) and len(outcomes) < MAX_SEEDS):
        if outcomes and not context.may_start(context.compiled_s()):
            break
        if context.time_left_s <= 0:
            context.leave_out(f"verification of {arm.name}")
            return arm
        window: Window = context.verify_window(len(outcomes), f"verification of {arm.name}", extra_timeout_s=COMPILE_TIMEOUT_S)
        outcomes.append(context.evaluate(arm.policy, window, role="verification"))
        if isinstance(outcomes[-1], Failure):
            context.progress.found(f"{arm.name}: {why(outcomes[-1])}")
            return arm.model_copy(update={"failure": why(outcomes[-1]), "step_times_s": (), "block_steps": ()})
        verdict = judged(context, outcomes)
    peaks = [outcome.peak_bytes for outcome in outcomes if isinstance(outcome, Measurement)]
    context.progress.found(f"{arm.name}: {verdict.text if verdict else ''}")
    return arm.model_copy(update={"verdict": verdict, "peak_bytes": max(peaks, default=arm.peak_bytes)})
