"""Wall time of a tune: how long windows are, what they cost, and what the stages still to come need.

Everything is planned from measured times: a probe says what an FP32 step and a window around it cost, and every window that runs
corrects that. A stage starts a window only where it ends before the time that later stages need; what does not fit is left out.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from autoprec.policy import Policy
from autoprec.session.settings import Plan, Settings
from autoprec.tune.quantities import duration

# A window shorter than this says little about a loss curve, and one longer than this no longer ranks candidates any better;
# both are choices of this project, checked on the examples (see "How it decides" in the README).
SHORTEST_TRIAL_STEPS, LONGEST_TRIAL_STEPS = 24, 120
# What a window may shrink to where the budget holds nothing longer: twice the tail of 5 steps that is averaged, and the start.
# Own choice; the noise floor of the same windows says what such a verdict is worth.
LEAST_TRIAL_STEPS = 12
VERIFY_SEEDS = 3
# Shares of the budget: FP32 with its twins, the study, the verification. The rest is for profile and execution modes.
REFERENCE_SHARE, STUDY_SHARE, VERIFICATION_SHARE = 0.14, 0.35, 0.2
TIMING_SHARE = 0.1
# FP32 runs on fewer seeds where the shortest windows would take more than the first share of what is left; then in shorter windows
# where they would take more than the second. Own choices: a verdict that needs more seeds gets them later.
MOST_FOR_SEEDS, MOST_FOR_REFERENCE = 0.15, 0.25
# A window that takes longer than this, and 60 times what the probe foretold, hangs. Own choice: other processes may take most of
# the machine for a while, and a set-up may be slow.
LEAST_TIMEOUT_S = 600.0
# Arms that are verified on every seed: TF32, two stock AMP, three finalists.
VERIFIED_ARMS = 6
FEWEST_TIMED_STEPS, MOST_TIMED_STEPS = 20, 62
# A step of a candidate against FP32's, until one has run. Source: stock AMP took 0.34 of FP32's step for ResNet-50 on an H200; on
# a CPU that follows CUDA's rules it took 1.2 to 1.5 of it on the examples.
CANDIDATE_STEP_ON_CUDA, CANDIDATE_STEP_ON_CPU = 0.4, 1.4
# What writing policy, table, notes and report takes. Source: 2.5 s on two cores of an x86 server, the end of the
# process included.
REPORT_S = 3.0
# What profiling takes, in FP32 steps of the whole batch, besides a fixed part, and what solving the fronts takes a layer.
# Source: one H200, GPT-2: 20.5 s in steps of 160 ms, and 16 s for 113 layers; ResNet-50: 18 s in steps of 146 ms.
PROFILE_STEPS, PROFILE_FIXED_S, FRONT_S_PER_LAYER = 130, 1.0, 0.1
# The study starts only where its profile leaves more than this share of the time. Own choice: a profile that eats the time in which
# its fruits would be tried is of no use.
MOST_FOR_PROFILE = 0.6
# Compiling one set-up and running it. Source: ResNet-50 took 43 s to compile on an H200 (torch 2.11).
COMPILE_S = 45.0
# Compiled kernels are kept, so each window that verifies what was timed compiles this share again. Source: GPT-2 on an H200, about 4
# of 20 s.
RECOMPILE_SHARE = 0.2
# The study never leaves more than this share of the time it starts with to the stages after it. Own choice.
MOST_AFTER_STUDY = 0.5
# With execution modes it may leave this share, so that one arm can still be compiled. Own choice.
MOST_WITH_MODES = 0.8
# Trials for which a profile is worth making, and windows for which a repair is worth beginning.
FEWEST_TRIALS = 4
FEWEST_REPAIR_WINDOWS = 4


Kind = tuple[bool, bool, bool]


class Costs:
    """What windows take by the wall clock: the probe's times first, then those of the windows that ran. It learns in place."""

    def __init__(self, step_s: float = 0.0, overhead_s: float = 0.0, *, low_share: float = 1.0) -> None:
        """Starts from a probe.

        Args:
            step_s: seconds of an FP32 step.
            overhead_s: seconds of a window besides its steps.
            low_share: what a low-precision step is taken to cost against FP32's until one has run.
        """
        self._step_s, self._overhead_s, self._low_share = step_s, overhead_s, low_share
        self._seen: list[tuple[Kind, float]] = []
        self._compiles_s: list[float] = []

    def learn(self, policy: Policy, steps: int, seconds: float) -> None:
        """Notes what an eager window of ``steps`` steps took."""
        if policy.execution == "eager":
            self._seen.append((_kind(policy), max(seconds - self._overhead_s, 0.0) / max(steps, 1)))

    def learn_compile(self, seconds: float) -> None:
        """Notes what compiling a set-up and running it took."""
        self._compiles_s.append(seconds)

    def window_s(self, policy: Policy, steps: int) -> float:
        """Seconds that a window of ``steps`` steps is expected to take."""
        kind = _kind(policy)
        places = [place for place, (known, _) in enumerate(self._seen) if known == kind]
        places = places or [place for place, (known, _) in enumerate(self._seen) if known[0] == kind[0]]
        if not places:
            return self._overhead_s + steps * self._step_s * (self._low_share if kind[0] else 1.0)
        # A device that slows down counts at once, one that was slow for a moment soon no more.
        alike = [self._seen[place][1] for place in places]
        return self._overhead_s + steps * max(statistics.median(alike[-5:]), alike[-1]) * self._slowed_since(places[-1])

    def _slowed_since(self, place: int) -> float:
        """How many times slower windows of other kinds became since one window; 1 where none did."""
        slowed = 1.0
        for kind, step_s in self._seen[place + 1 :]:
            before = [seconds for known, seconds in self._seen[: place + 1] if known == kind]
            if before and statistics.median(before) > 0:
                slowed = max(slowed, step_s / statistics.median(before))
        return slowed

    @property
    def compile_s(self) -> float:
        """Seconds that compiling a set-up and running it is expected to take."""
        return max(self._compiles_s[-3:], default=COMPILE_S)


def _kind(policy: Policy) -> Kind:
    """What decides the cost of a step: any half precision, TF32, memory layout."""
    low = policy.default != "fp32" or any(setting.precision != "fp32" for setting in policy.layers.values())
    return low, policy.backend.tf32, policy.backend.channels_last


def plan_windows(
    step_s: float,
    overhead_s: float,
    settings: Settings,
    *,
    num_baselines: int,
    on_cuda: bool,
    time_left_s: float | None = None,
) -> Plan:
    """Sizes every window from the time of an FP32 window.

    Args:
        step_s: wall seconds of one FP32 optimizer step.
        overhead_s: wall seconds of a window besides its steps (building the model, copying, cleaning up).
        settings: budget and trials.
        num_baselines: baselines that run before the study.
        on_cuda: whether the steps run on a GPU.
        time_left_s: what is left of the budget; all of it where None.
    """
    step_s = max(step_s, 1e-4)
    candidate_s = step_s * low_share(on_cuda)
    budget_s = settings.budget_s if time_left_s is None else max(time_left_s, 0.0)

    def steps(share: float, windows: int, seconds: float) -> int:
        return int((share * budget_s / windows - overhead_s) / seconds)

    trial = steps(STUDY_SHARE, max(settings.trials + num_baselines, 1), candidate_s)
    trial = min(max(trial, SHORTEST_TRIAL_STEPS), LONGEST_TRIAL_STEPS)
    seeds = int(MOST_FOR_SEEDS * budget_s / (2 * (overhead_s + SHORTEST_TRIAL_STEPS * step_s)))
    seeds = min(max(seeds, 1), VERIFY_SEEDS)
    shortest = LEAST_TRIAL_STEPS if seeds == 1 else SHORTEST_TRIAL_STEPS
    trial = min(trial, max(steps(MOST_FOR_REFERENCE, 2 * seeds, step_s), shortest))
    verify = min(
        steps(REFERENCE_SHARE, 2 * VERIFY_SEEDS, step_s),
        steps(VERIFICATION_SHARE, VERIFIED_ARMS * VERIFY_SEEDS, candidate_s),
    )
    verify = min(max(verify, trial), 4 * trial)
    timed = int(TIMING_SHARE * budget_s / (VERIFIED_ARMS + 1) / candidate_s)
    return Plan(
        trial_steps=trial,
        trial_warmup_steps=min(8, trial // 3),
        verify_steps=verify,
        verify_seeds=seeds,
        timed_steps=min(max(timed, FEWEST_TIMED_STEPS), MOST_TIMED_STEPS),
        timeout_s=max(LEAST_TIMEOUT_S, 60 * (overhead_s + step_s * verify)),
        step_s=step_s,
        overhead_s=overhead_s,
    )


def low_share(on_cuda: bool) -> float:
    """What a low-precision step is taken to cost against FP32's until one has run."""
    return CANDIDATE_STEP_ON_CUDA if on_cuda else CANDIDATE_STEP_ON_CPU


@dataclass(frozen=True)
class Needs:
    """Seconds that stages of a tune take."""

    reference_s: float
    profile_s: float
    baselines_s: float
    search_s: float
    verification_s: float
    timing_s: float
    execution_s: float
    report_s: float = REPORT_S

    @property
    def total_s(self) -> float:
        """All of them."""
        before = self.reference_s + self.profile_s + self.baselines_s + self.search_s
        return before + self.after_study_s

    @property
    def after_study_s(self) -> float:
        """Of the stages after the study."""
        return self.verification_s + self.timing_s + self.execution_s + self.report_s


def whole_needs(
    plan: Plan, *, num_layers: int, trials: int, num_baselines: int, low: float, timed: bool, compiles: bool
) -> Needs:
    """What a tune takes that leaves nothing out, by a plan's probe."""
    fp32_s = plan.overhead_s + plan.verify_steps * plan.step_s
    verify_s = plan.overhead_s + plan.verify_steps * plan.step_s * low
    trial_s = plan.overhead_s + plan.trial_steps * plan.step_s * low
    timed_s = plan.overhead_s + (plan.timed_steps + plan.trial_warmup_steps) * plan.step_s * low
    # Where both windows are the same, the trial of an arm is the first of its verification.
    again = plan.verify_seeds - (plan.verify_steps == plan.trial_steps)
    return Needs(
        reference_s=2 * plan.verify_seeds * fp32_s,
        profile_s=profile_s(plan.step_s, num_layers),
        baselines_s=num_baselines * trial_s,
        search_s=trials * trial_s,
        verification_s=VERIFIED_ARMS * again * verify_s,
        timing_s=(VERIFIED_ARMS + 1) * timed_s if timed else 0.0,
        execution_s=COMPILE_S * (1 + RECOMPILE_SHARE * plan.verify_seeds) + plan.verify_seeds * verify_s if compiles else 0.0,
    )


def least_needs(plan: Plan, *, low: float, timed: bool) -> Needs:
    """What the shortest tune takes that still verifies something: one seed, stock AMP in both types, no search."""
    steps = min(plan.trial_steps, LEAST_TRIAL_STEPS)
    short = replace_steps(plan, steps)
    whole = whole_needs(short, num_layers=0, trials=0, num_baselines=2, low=low, timed=timed, compiles=False)
    return replace(whole, profile_s=0.0, verification_s=0.0, timing_s=whole.timing_s * 3 / (VERIFIED_ARMS + 1))


def replace_steps(plan: Plan, steps: int) -> Plan:
    """The plan with one seed and all windows of one length."""
    return plan.model_copy(update={"trial_steps": steps, "verify_steps": steps, "verify_seeds": 1})


def profile_s(step_s: float, num_layers: int) -> float:
    """Seconds that the profile and solving the fronts are expected to take."""
    return PROFILE_FIXED_S + PROFILE_STEPS * step_s + FRONT_S_PER_LAYER * num_layers


def plan_words(plan: Plan, whole: Needs, least: Needs, left_s: float, budget_s: float) -> str:
    """What the budget holds, in a line: the windows, and what is likely to be left out where it is short."""
    seeds = f"{plan.verify_seeds} {'seed' if plan.verify_seeds == 1 else 'seeds'}"
    windows = f"windows of {plan.trial_steps} steps, verification of {plan.verify_steps} steps on {seeds}"
    asked = f"budget: {duration(budget_s)}, {duration(max(left_s, 0))} of it left after the first look"
    if least.total_s > left_s:
        return (
            f"{asked}. That is shorter than the shortest tune of this model, about {duration(budget_s - left_s + least.total_s)}: "
            "profile, search, repair and further seeds are left out, and what cannot be verified in time is not exported"
        )
    left_out = _left_out(plan, whole, left_s)
    if not left_out:
        return f"{asked}; {windows}"
    return (
        f"{asked}; {windows}. A whole tune of this model takes about {duration(budget_s - left_s + whole.total_s)}; "
        f"cut or left out: {', '.join(left_out)}"
    )


def _left_out(plan: Plan, whole: Needs, left_s: float) -> list[str]:
    """What the time will not hold, in the order in which it is given up."""
    left_out = []
    if plan.verify_seeds < VERIFY_SEEDS:
        left_out.append(f"{plan.verify_seeds} instead of {VERIFY_SEEDS} seeds")
    if plan.trial_steps < SHORTEST_TRIAL_STEPS:
        left_out.append(f"windows of {plan.trial_steps} instead of {SHORTEST_TRIAL_STEPS} steps")
    left_s -= whole.reference_s
    if whole.profile_s > MOST_FOR_PROFILE * left_s:
        return [*left_out, f"the profile (about {duration(whole.profile_s)}) and with it search and repair"]
    left_s -= whole.profile_s + whole.baselines_s
    after_s = min(whole.after_study_s, MOST_AFTER_STUDY * left_s)
    if whole.search_s > left_s - after_s:
        left_out.append("some of the trials")
    if whole.execution_s and whole.after_study_s > left_s:
        left_out.append("execution modes")
    elif whole.after_study_s > left_s:
        left_out.append("some of the verification")
    return left_out
