"""Whether low precision can pay at all: asked after the look, before any reference, profile or study.

Two things have to agree before a tune stops here. The ceiling bounds what the best assignment of precisions could give. And where
speed is measured, FP32 and what is cheap to try in low precision (stock AMP and pure half, in both layouts and, where execution
modes are tried, as CUDA graphs) are timed against each other, and none is ahead. Whatever stays unclear goes on to the search: a wasted
study costs minutes, a wrong "not worth it" costs the gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autoprec.policy import Policy
from autoprec.records import Candidate, Ceiling, Outcome, Record, Window
from autoprec.session.arms import (
    COMPILE_TIMEOUT_S,
    EXECUTION_NAMES,
    RANK_BASELINE,
    RANK_COMPILED,
    RANK_FP32,
    RANK_TUNED,
    STOCK_RANKS,
    arm_of,
)
from autoprec.session.context import Context
from autoprec.session.reference import run_reference
from autoprec.session.search import Tried, baselines_of, pure_of, yardstick_of
from autoprec.session.timing import say_dropped
from autoprec.session.verification import Verified, run_verification
from autoprec.tune.ceiling import measured_ceiling
from autoprec.tune.choice import LEAST_PREDICTED_GAIN, Arm, clearly_not_faster, faster_beyond_noise, median_s, speedup
from autoprec.tune.front import kind_of
from autoprec.tune.rows import role_words
from autoprec.tune.space import SearchSpace, allowed_precisions
from autoprec.tune.yardstick import Yardstick

# A measured ceiling below this is worth the time to measure whether low precision pays. Own choice; the measurement decides.
DOUBTFUL = 1.25
# A prediction needs no training: these steps only show that the set-up runs.
LOOK_STEPS = 3


class Worth(Record):
    """The answer of the first look.

    Attributes:
        pays: False where nothing in low precision can be faster than FP32.
        text: why, with the figures; empty where nothing had to be measured.
        arms: what was timed, FP32 first.
    """

    pays: bool
    text: str = ""
    arms: tuple[Arm, ...] = ()


def stop_early(context: Context, search_space: SearchSpace) -> tuple[Context, Tried, Verified] | None:
    """What a tune ends in where low precision cannot pay; None where it has to be searched for."""
    baselines = baselines_of(context, search_space)
    if context.settings.anyway or any(candidate.trial is not None for candidate in context.folder.candidates):
        return None  # asked for, or searched for in an earlier session
    worth = context.folder.load_stage("worth", Worth)
    if worth is None:
        worth = look_whether_it_pays(context, search_space, baselines)
        context.folder.save_stage("worth", worth)
    if worth.pays:
        return None
    context.progress.found(f"not worth it: {worth.text}")
    return _end(context, search_space, baselines, worth)


def look_whether_it_pays(context: Context, search_space: SearchSpace, baselines: Mapping[str, Policy]) -> Worth:
    """Bounds the gain, and times what is cheap to try where the bound leaves a doubt."""
    ceiling = ceiling_of(context, search_space, baselines["fp32"])
    if ceiling is None or ceiling.gain > (LEAST_PREDICTED_GAIN if ceiling.origin == "predicted" else DOUBTFUL):
        return Worth(pays=True)
    policies = {**baselines, **pure_of(context, search_space)}
    if not context.may_start(_cost_s(context, len(policies))):
        return Worth(pays=True)
    context.progress.stage("worth it?", len(policies))
    arms = _timed(context, policies)
    doubt = _doubt(arms)
    if doubt and context.may_start(3 * context.timing_s(len(arms)), context.least_after_s()):
        arms = _timed(context, policies, times=3)
        doubt = _doubt(arms)
    if not doubt and context.compiles:
        graphs = _as_graphs(context, arms)
        arms += graphs
        # A model that cannot be compiled in any precision has none to gain from graphs.
        doubt = _doubt(graphs) if any(arm.step_times_s for arm in graphs) else ""
    if doubt:
        context.progress.found(f"worth it?: {doubt}, so it is searched for")
        return Worth(pays=True, arms=tuple(arms))
    return Worth(pays=False, text=_words(context, ceiling, arms), arms=tuple(arms))


def _cost_s(context: Context, arms: int) -> float:
    """Seconds to compare some arms: their interleaved timing, or a few steps each where speed is predicted."""
    if context.target.timing == "predicted":
        return arms * context.low_s(LOOK_STEPS)
    return context.timing_s(arms)


def ceiling_of(context: Context, search_space: SearchSpace, fp32: Policy) -> Ceiling | None:
    """The most that low precision could give; None where nothing bounds it."""
    target, plan = context.target, context.plan
    allowed, _ = allowed_precisions(search_space, context.look, target.precisions)
    if target.timing == "predicted":
        return context.bench.ceiling(allowed, fp32)
    if fp32.batch.accumulation_steps > 1 or not plan.fp32_step_s:
        return None  # low precision may be what makes the whole batch fit
    gain = float("inf")
    if target.gpu is not None:
        # Half the plain float32 peak is what libraries reach at the least, so the ratio is taken twice as large.
        gain = 2 * max(target.gpu.peak_flops("fp16"), target.gpu.peak_flops("bf16")) / target.gpu.peak_flops("fp32")
    return measured_ceiling(context.look, plan.fp32_step_s, host_bound=plan.host_bound, heavy_gain=gain)


def _timed(context: Context, policies: Mapping[str, Policy], times: int = 1) -> list[Arm]:
    """The arms with step times that can be compared: predicted one by one, or measured interleaved in one process."""
    window = context.timing_window(times=times)
    if context.target.timing == "predicted":
        window = Window(steps=LOOK_STEPS, warmup_steps=1, seed=window.seed, timeout_s=window.timeout_s, purpose="first look")
        outcomes = [context.evaluate(policy, window, role=role) for role, policy in policies.items()]
    else:
        outcomes = context.interleave(tuple(policies.values()), window)
        for policy, outcome in zip(policies.values(), outcomes, strict=True):
            context.folder.record("timing", policy, window, outcome)
        say_dropped(context, {role_words(role): outcome for role, outcome in zip(policies, outcomes, strict=True)})
    context.progress.advance()
    return [_arm(context, role, policies[role], outcome) for role, outcome in zip(policies, outcomes, strict=True)]


def _arm(context: Context, role: str, policy: Policy, outcome: Outcome) -> Arm:
    usual = RANK_TUNED if role.startswith("pure") else RANK_BASELINE
    return arm_of(context, role_words(role), policy, STOCK_RANKS.get(role, usual), outcome, None)


def _doubt(arms: Iterable[Arm]) -> str:
    """Why it is not certain that low precision is no faster than FP32; empty where it is."""
    ran = [arm for arm in arms if arm.step_times_s and arm.useful_share > 0]
    fp32 = min((arm for arm in ran if not _is_low(arm)), key=median_s, default=None)
    low = [arm for arm in arms if _is_low(arm)]
    if fp32 is None or not low:
        return "there is nothing to compare"
    for arm in low:
        if arm.failure and not any(other.step_times_s and _is_pure(other) == _is_pure(arm) for other in low):
            return f"{arm.name} did not run"
        if arm.step_times_s and not clearly_not_faster(fp32, arm):
            ratio, least, most = speedup(fp32, arm)
            return f"{arm.name} is {ratio:.2f}x {fp32.name} ({least:.2f} to {most:.2f})"
    return ""


def _is_low(arm: Arm) -> bool:
    return kind_of(arm.policy)[0] != "fp32" or arm.policy.default != "fp32"


def _is_pure(arm: Arm) -> bool:
    return arm.policy.default.endswith("_pure") or any(s.precision.endswith("_pure") for s in arm.policy.layers.values())


def _as_graphs(context: Context, arms: list[Arm]) -> list[Arm]:
    """The fastest arm of FP32, of stock AMP and of pure half as CUDA graphs, where the time holds the compiling: a host that is too
    slow is what graphs cure, and low precision may pay under them alone."""
    ran = sorted((arm for arm in arms if arm.step_times_s), key=median_s)
    groups = (
        [arm for arm in ran if not _is_low(arm)],
        [arm for arm in ran if _is_low(arm) and not _is_pure(arm)],
        [arm for arm in ran if _is_pure(arm)],
    )
    heads = [group[0] for group in groups if group]
    cost_s = len(heads) * (context.costs.compile_s + context.timing_s(1))
    if not context.may_start(cost_s, context.least_after_s() + context.execution_s()):
        context.leave_out("CUDA graphs in the first look", decides=False)
        return []
    policies = {
        f"{arm.name}{EXECUTION_NAMES['compile_cudagraphs']}": arm.policy.model_copy(update={"execution": "compile_cudagraphs"})
        for arm in heads
    }
    window = context.timing_window(extra_timeout_s=COMPILE_TIMEOUT_S)
    outcomes = context.interleave(tuple(policies.values()), window)
    for policy, outcome in zip(policies.values(), outcomes, strict=True):
        context.folder.record("timing", policy, window, outcome)
    say_dropped(context, dict(zip(policies, outcomes, strict=True)))
    return [
        arm_of(context, name, policy, RANK_COMPILED, outcome, None)
        for (name, policy), outcome in zip(policies.items(), outcomes, strict=True)
    ]


def _words(context: Context, ceiling: Ceiling, arms: list[Arm]) -> str:
    """Why it does not pay, with the figures."""
    fp32 = next(arm for arm in arms if arm.rank == RANK_FP32)
    figures = ", ".join(_figure(fp32, arm) for arm in arms if arm is not fp32)
    rest = "issuing operations from the host" if ceiling.host_bound else "the optimizer and the least time of every operation"
    doubt = " (even with a host twice as fast as assumed)" if ceiling.origin == "predicted" else ""
    text = (
        f"an FP32 step takes {_ms(fp32)} ({fp32.speed_origin}); {figures}. "
        f"No assignment of precisions could be more than {ceiling.gain:.2f}x as fast{doubt}: {rest}, which a lower precision "
        "does not shorten, takes the time."
    )
    if context.left_out:
        text += " Under CUDA graphs, which were not tried for want of time, this may be different."
    elif ceiling.host_bound and not context.compiles:
        text += " A larger batch or CUDA graphs would gain more than a lower precision."
    return f"{text} Profile, study and repair were left out; --anyway searches all the same."


def _figure(fp32: Arm, arm: Arm) -> str:
    if not arm.step_times_s:
        return f"{arm.name} failed"
    ratio, least, most = speedup(fp32, arm)
    interval = f", {least:.2f} to {most:.2f}" if arm.speed_origin == "measured" else ""
    return f"{arm.name} {_ms(arm)} ({ratio:.2f}x{interval})"


def _ms(arm: Arm) -> str:
    return f"{median_s(arm) * 1e3:.3g} ms"


def _end(
    context: Context, search_space: SearchSpace, baselines: Mapping[str, Policy], worth: Worth
) -> tuple[Context, Tried, Verified]:
    """FP32, or FP32 with TF32, another layout or execution mode where that is what pays and it verifies."""
    fp32 = worth.arms[0]
    wide = {role: policy for role, policy in baselines.items() if role.startswith("fp32")}
    better = [arm for arm in worth.arms if not _is_low(arm) and arm.step_times_s and faster_beyond_noise(fp32, arm)]
    forced = context.compiles and context.settings.execution == "compile"
    if not better and not forced:
        nothing = Tried((), dict(wide), Yardstick(()))
        return context, nothing, Verified(worth.arms, fp32, worth.text)
    context = run_reference(context)
    candidates: list[Candidate] = []
    for role, policy in wide.items():
        if context.plan.verify_seeds and context.may_start(context.window_s(policy, context.trial_window())):
            outcome = context.evaluate(policy, context.trial_window(), role=role)
            candidates.append(_candidate(len(candidates), role, policy, context.trial_window(), outcome))
    found = Tried(tuple(candidates), wide, yardstick_of(context))
    verified = run_verification(context, found)
    shown = {arm.name for arm in verified.arms}
    return (
        context,
        found,
        Verified((*verified.arms, *(a for a in worth.arms if a.name not in shown)), verified.chosen, worth.text),
    )


def _candidate(number: int, role: str, policy: Policy, window: Window, outcome: Outcome) -> Candidate:
    return Candidate(number=number, role=role, policy=policy, window=window, outcome=outcome)
