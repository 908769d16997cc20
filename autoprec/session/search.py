"""Stages 3 to 7: baselines, profile, assignment fronts, the study, and the repair of a fast plan that diverges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoprec.errors import WorkerError
from autoprec.policy import Fingerprint, Policy, Weights
from autoprec.records import Candidate, Measurement, Outcome, Profile, Window
from autoprec.session.budget import FEWEST_TRIALS, MOST_FOR_PROFILE, REPORT_S, profile_s
from autoprec.session.context import Context
from autoprec.session.reference import reference_curve, twin_noise
from autoprec.session.repairing import repairs
from autoprec.session.rescoring import rescored
from autoprec.tune.baselines import STOCK_AMP, baseline_policies, pure_policies
from autoprec.tune.quantities import duration
from autoprec.tune.rows import role_words
from autoprec.tune.space import SearchSpace, allowed_precisions
from autoprec.tune.study import run_study
from autoprec.tune.study_space import StudySpace, fingerprint_of
from autoprec.tune.yardstick import Yardstick

# One seed says little, so a trial may depart this many times as far as a verified policy. Own choice; verification decides.
TRIAL_SLACK = 3.0


@dataclass(frozen=True)
class Tried:
    """What is left for verification where nothing was searched.

    Attributes:
        candidates: every evaluated trial, baselines included.
        baselines: policies by role.
        yardstick: what trials were held against.
    """

    candidates: tuple[Candidate, ...]
    baselines: dict[str, Policy]
    yardstick: Yardstick

    def outcome(self, role: str) -> Outcome | None:
        """What came of a baseline."""
        return next((c.outcome for c in self.candidates if c.role == role), None)


@dataclass(frozen=True)
class Found(Tried):
    """What the search leaves for verification.

    Attributes:
        profile: of the layers.
        space: the bound search space.
    """

    profile: Profile
    space: StudySpace


def run_search(context: Context, search_space: SearchSpace) -> Tried:
    """Profiles the layers, solves the fronts, and runs the study with the baselines first.

    Where the budget does not hold the profile, only set-ups that need none are tried: the baselines and pure half everywhere.
    """
    baselines = baselines_of(context, search_space)
    if not context.plan.verify_seeds:
        context.leave_out("everything but FP32", "nothing can be verified in the time that is left")
        return Tried((), baselines, yardstick_of(context))
    profiled = _profile_in_time(context, search_space, baselines)
    if profiled is None:
        return _unsearched(context, search_space, baselines)
    profile, space = profiled
    context.progress.found(
        "front: "
        + ", ".join(f"{len({plan.key() for plan in plans})} in {dtype}" for dtype, plans in space.plans.items())
        + " (whole assignments of the layers, from all FP32 to the fastest)"
    )
    baselines = baselines_of(context, search_space, space.fingerprint)
    yardstick = yardstick_of(context)
    candidates = _study(context, space, yardstick, baselines)
    found = Found(tuple(candidates), baselines, yardstick, profile, space)
    # Repairs need the time that unfinished baselines did not find either.
    finished = all(found.outcome(role) for role in baselines)
    repaired = repairs(context, space, yardstick, candidates, search_space) if finished else {}
    if repaired:
        candidates = _study(context, space, yardstick, {**baselines, **repaired}, trials=0)
    return Found(tuple(candidates), baselines, yardstick, profile, space)


def baselines_of(context: Context, search_space: SearchSpace, fingerprint: Fingerprint | None = None) -> dict[str, Policy]:
    """The baselines by role on this target."""
    target = context.target
    return baseline_policies(
        context.look,
        tuple(precision for precision in target.precisions if precision in search_space.precisions),
        cuda=target.stands_for_cuda,
        capability=target.capability,
        fingerprint=fingerprint or _fingerprint(context),
        fp32_micro=context.plan.fp32_micro,
    )


def pure_of(context: Context, search_space: SearchSpace) -> dict[str, Policy]:
    """Pure half precision everywhere the search space allows it, by role."""
    allowed, _ = allowed_precisions(search_space, context.look, context.target.precisions)
    weights: Weights = "half_with_masters" if context.target.device == "cuda" else "fp32"
    return pure_policies(context.look, allowed, fingerprint=_fingerprint(context), weights=weights)


def _fingerprint(context: Context) -> Fingerprint:
    """The one that the bound space has too, so that a set-up is the same with and without a search."""
    return fingerprint_of(context.look, device_name=context.target.device_name, capability=context.target.capability)


def yardstick_of(context: Context) -> Yardstick:
    """What trials are held against. Their window is the start of the first verification window: FP32 need not run again."""
    steps, seeds = context.plan.trial_steps, context.plan.verify_seeds
    return Yardstick(
        reference_losses=reference_curve(context, 0)[:steps] if seeds else (),
        noise_floor=twin_noise(context, seeds, steps),
        tolerance=TRIAL_SLACK * context.settings.tolerance,
        memory_limit_bytes=context.target.memory_limit_bytes,
    )


def _profile_in_time(
    context: Context, search_space: SearchSpace, baselines: Mapping[str, Policy]
) -> tuple[Profile, StudySpace] | None:
    """Profile and fronts; None where they would take what the rest of the tune needs."""
    cost_s = 0.0 if context.folder.load_profile() else profile_s(context.plan.step_s, len(context.look.layers))
    trial_s = context.low_s(context.plan.trial_steps)
    # Without its baselines and a few trials a profile is of no use.
    keep_s = (len(baselines) + FEWEST_TRIALS) * trial_s + context.least_after_s(2)
    if context.may_start(cost_s / MOST_FOR_PROFILE, 0.0) and context.may_start(cost_s, keep_s):
        return run_profile(context, search_space)
    context.leave_out("profile, search and repair", f"the profile alone takes about {duration(cost_s)}")
    return None


def _unsearched(context: Context, search_space: SearchSpace, baselines: Mapping[str, Policy]) -> Tried:
    """What needs no profile: the baselines, and pure half as the candidates. What they are worth is for the verification to say."""
    policies = {**baselines, **pure_of(context, search_space)}
    yardstick, window = yardstick_of(context), context.trial_window()
    context.progress.stage("baselines", len(policies))
    candidates: list[Candidate] = []
    for role, policy in policies.items():
        if not context.may_start(context.window_s(policy, window), context.least_after_s() if candidates else REPORT_S):
            context.leave_out(role_words(role))
            continue
        outcome = context.evaluate(policy, window, role=role)
        if not context.is_cut_short(outcome):
            number = len(candidates)
            candidates.append(Candidate(number=number, role=role, policy=policy, window=window, outcome=outcome))
        context.progress.advance(_best_text(candidates, yardstick))
    return Tried(tuple(candidates), dict(baselines), yardstick)


def run_profile(context: Context, search_space: SearchSpace) -> tuple[Profile, StudySpace]:
    """Costs and risks of every layer, and the plans they allow; read from the folder where an earlier session measured them."""
    context.progress.stage("profile", 1)
    profile = context.folder.load_profile()
    if profile is None:
        first = _profile_what_runs(context)
        space = _bound(context, search_space, first)
        profile = rescored(context, first, {dtype: space.fastest(dtype) for dtype in space.plans})
        context.folder.save_profile(profile)
        space = space if profile is first else _bound(context, search_space, profile)
    else:
        space = _bound(context, search_space, profile)
    context.progress.advance()
    pinned = [p.layer or "(root)" for p in profile.layers if any(risk.hard and risk.precision == "fp16" for risk in p.risks)]
    named = f": {', '.join(pinned[:4])}{' ...' if len(pinned) > 4 else ''}" if pinned else ""
    context.progress.found(
        f"profile: {len(profile.layers)} layers in {profile.cost_s:.1f} s{scoring_words(profile)}; {len(pinned)} cannot run in "
        f"fp16{named}"
    )
    return profile, space


def scoring_words(profile: Profile) -> str:
    """What scoring the layers in each precision took, in passes of the FP32 model; empty where nothing was scored."""
    figures = [f"{passes:.1f} ({precision})" for precision, passes in profile.sensitivity_passes.items()]
    if not figures:
        return ""
    took = " and ".join(filter(None, (", ".join(figures[:-1]), figures[-1])))
    return f", where scoring them took {took} FP32 forward and backward passes"


def _bound(context: Context, search_space: SearchSpace, profile: Profile) -> StudySpace:
    """The search space for this model on this target, with the fronts that the profile gives."""
    target = context.target
    return StudySpace.bind(
        search_space,
        context.look,
        profile,
        precisions=tuple(p for p in target.precisions if p in search_space.precisions and p in profile.precisions),
        cuda=target.stands_for_cuda,
        measured=target.timing == "measured",
        capability=target.capability,
        device_name=target.device_name,
    )


def _profile_what_runs(context: Context) -> Profile:
    """The profile of all precisions, or of fewer where one of them ends the worker process (a crash in user code, say)."""
    everything = context.target.precisions
    sets = [
        everything,
        *(tuple(p for p in everything if p == "fp32" or p.startswith(half)) for half in ("fp16", "bf16")),
        ("fp32",),
    ]
    for number, precisions in enumerate(dict.fromkeys(sets)):
        try:
            return context.bench.profile(precisions)
        except WorkerError as error:
            if precisions == ("fp32",):
                raise
            left_out = "with all precisions" if number == 0 else f"with {', '.join(precisions)}"
            context.progress.found(f"profile: {left_out} it ended the worker, so fewer are profiled. {error.message}")
    raise AssertionError("fp32 alone is always the last set")


def _study(
    context: Context,
    space: StudySpace,
    yardstick: Yardstick,
    baselines: Mapping[str, Policy],
    trials: int | None = None,
) -> list[Candidate]:
    """Runs the study until ``trials`` beyond the baselines are finished, or the study's share of the time is over."""
    total = len(baselines) + (context.settings.trials if trials is None else trials)
    if trials is None:
        context.progress.stage("study", total)
    done = sum(candidate.trial is not None for candidate in context.folder.candidates)
    start_left_s, done_before, window = context.time_left_s, done, context.trial_window()

    def is_over() -> bool:
        """Baselines run while one of them can still be verified, trials while all that comes after the study fits."""
        if trials == 0:
            return False  # repaired plans have run: nothing is trained again
        keep_s = context.least_after_s() if done < len(baselines) else context.after_study_s(start_left_s)
        # What the study itself does around a window is seen in how fast trials come.
        paced_s = (start_left_s - context.time_left_s) / (done - done_before) if done > done_before else 0.0
        return not context.may_start(max(context.low_s(window.steps), paced_s), keep_s)

    def on_trial(candidate: Candidate, _best_one: Candidate | None) -> None:
        nonlocal done
        done += 1
        context.folder.record(candidate.role, candidate.policy, candidate.window, candidate.outcome, trial=candidate.trial)
        context.progress.advance(_best_text([*earlier, *fresh, candidate], yardstick))
        fresh.append(candidate)

    fresh: list[Candidate] = []
    earlier = [candidate for candidate in context.folder.candidates if candidate.trial is not None]
    candidates = run_study(
        space,
        lambda policy, window: _evaluate(context, policy, window),
        yardstick,
        window=window,
        baselines=baselines,
        trials=total,
        storage=context.folder.study_url,
        seed=context.settings.seed,
        earlier=earlier,
        on_trial=on_trial,
        should_stop=is_over,
    )
    if trials is not None:
        return candidates
    feasible = sum(yardstick.feasible(candidate.outcome) for candidate in candidates)
    context.progress.found(f"study: {len(candidates)} trials, {feasible} within the limits; {_best_text(candidates, yardstick)}")
    if len(candidates) < total and is_over():
        context.left_out.append(f"{total - len(candidates)} of {total} trials")
        context.progress.found(
            f"study: stopped after {len(candidates)} of {total} trials, because the rest of the {context.settings.budget_s:.0f} s "
            "budget belongs to verification; a longer --budget searches further"
        )
    return candidates


def _evaluate(context: Context, policy: Policy, window: Window) -> Outcome:
    # Recorded by the caller, with the trial's number.
    known = context.folder.lookup(policy, window)
    return known if known is not None else context.run(policy, window)


def _best(candidates: Sequence[Candidate], yardstick: Yardstick) -> Candidate | None:
    feasible = [c for c in candidates if isinstance(c.outcome, Measurement) and yardstick.feasible(c.outcome)]
    return max(feasible, key=lambda c: _speed(c.outcome), default=None)


def _best_text(candidates: Sequence[Candidate], yardstick: Yardstick) -> str:
    """The fastest candidate within the limits, and how it compares with the faster stock AMP so far."""
    best = _best(candidates, yardstick)
    if best is None:
        return "nothing within the limits yet"
    stock = max((_speed(c.outcome) for c in candidates if c.role in STOCK_AMP), default=0.0)
    ratio = f", {_speed(best.outcome) / stock:.2f}x stock AMP" if stock else ""
    return f"best {_speed(best.outcome):,.0f} samples/s{ratio} ({role_words(best.role)})"


def _speed(outcome: Outcome) -> float:
    return outcome.samples_per_s if isinstance(outcome, Measurement) else 0.0
