"""Stages 3 to 7: baselines, profile, assignment fronts, the study, and the repair of a fast plan that diverges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoprec.errors import WorkerError
from autoprec.policy import Policy
from autoprec.records import Candidate, Measurement, Outcome, Profile, Window
from autoprec.session.context import Context
from autoprec.session.reference import reference_curve, twin_noise
from autoprec.session.repairing import repairs
from autoprec.session.rescoring import rescored
from autoprec.tune.baselines import baseline_policies
from autoprec.tune.space import SearchSpace
from autoprec.tune.study import run_study
from autoprec.tune.study_space import StudySpace
from autoprec.tune.yardstick import Yardstick

# One seed says little, so a trial may depart this many times as far as a verified policy. Own choice; verification decides.
TRIAL_SLACK = 3.0


@dataclass(frozen=True)
class Found:
    """What the search leaves for verification.

    Attributes:
        candidates: every evaluated trial, baselines included.
        baselines: policies by role.
        yardstick: what trials were held against.
        profile: of the layers.
        space: the bound search space.
    """

    candidates: tuple[Candidate, ...]
    baselines: dict[str, Policy]
    yardstick: Yardstick
    profile: Profile
    space: StudySpace

    def outcome(self, role: str) -> Outcome | None:
        """What came of a baseline."""
        return next((c.outcome for c in self.candidates if c.role == role), None)


def run_search(context: Context, search_space: SearchSpace) -> Found:
    """Profiles the layers, solves the fronts, and runs the study with the baselines first."""
    profile, space = run_profile(context, search_space)
    target = context.target
    allowed = tuple(precision for precision in target.precisions if precision in search_space.precisions)
    baselines = baseline_policies(
        context.look,
        allowed,
        cuda=target.stands_for_cuda,
        capability=target.capability,
        fingerprint=space.fingerprint,
        fp32_micro=context.plan.fp32_micro,
    )
    context.progress.found(
        "front: "
        + ", ".join(f"{len({plan.key() for plan in plans})} in {dtype}" for dtype, plans in space.plans.items())
        + " (whole assignments of the layers, from all FP32 to the fastest)"
    )
    window = context.trial_window()
    # The trial window is the start of the first verification window: same seed, same data, so FP32 need not run again.
    yardstick = Yardstick(
        reference_losses=reference_curve(context, 0)[: window.steps],
        noise_floor=twin_noise(context, context.plan.verify_seeds, window.steps),
        tolerance=TRIAL_SLACK * context.settings.tolerance,
        memory_limit_bytes=target.memory_limit_bytes,
    )
    candidates = _study(context, space, yardstick, baselines)
    repaired = repairs(context, space, yardstick, candidates, search_space)
    if repaired:
        candidates = _study(context, space, yardstick, {**baselines, **repaired}, trials=0)
    return Found(tuple(candidates), baselines, yardstick, profile, space)


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
        f"profile: {len(profile.layers)} layers in {profile.cost_s:.1f} s; {len(pinned)} cannot run in fp16{named}"
    )
    return profile, space


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

    def on_trial(candidate: Candidate, best: Candidate | None) -> None:
        nonlocal done
        done += 1
        context.folder.record(candidate.role, candidate.policy, candidate.window, candidate.outcome, trial=candidate.trial)
        context.progress.advance(_best_text(best))

    earlier = [candidate for candidate in context.folder.candidates if candidate.trial is not None]
    candidates = run_study(
        space,
        lambda policy, window: _evaluate(context, policy, window),
        yardstick,
        window=context.trial_window(),
        baselines=baselines,
        trials=total,
        storage=context.folder.study_url,
        seed=context.settings.seed,
        earlier=earlier,
        on_trial=on_trial,
        should_stop=lambda: trials is None and done >= len(baselines) and context.study_time_is_over(),
    )
    feasible = sum(yardstick.feasible(candidate.outcome) for candidate in candidates)
    if trials is None:
        context.progress.found(
            f"study: {len(candidates)} trials, {feasible} within the limits; {_best_text(_best(candidates, yardstick))}"
        )
    if trials is None and len(candidates) < total and context.study_time_is_over():
        context.progress.found(
            f"study: stopped after {len(candidates)} of {total} trials, because the rest of the {context.settings.budget_s:.0f} s "
            "budget belongs to verification; a longer --budget searches further"
        )
    return candidates


def _evaluate(context: Context, policy: Policy, window: Window) -> Outcome:
    # Recorded by the caller, with the trial's number.
    known = context.folder.lookup(policy, window)
    return known if known is not None else context.bench.window(policy, window)


def _best(candidates: Sequence[Candidate], yardstick: Yardstick) -> Candidate | None:
    feasible = [c for c in candidates if isinstance(c.outcome, Measurement) and yardstick.feasible(c.outcome)]
    return max(feasible, key=lambda c: _speed(c.outcome), default=None)


def _best_text(best: Candidate | None) -> str:
    return f"best {_speed(best.outcome):,.0f} samples/s ({best.role})" if best else "nothing within the limits yet"


def _speed(outcome: Outcome) -> float:
    return outcome.samples_per_s if isinstance(outcome, Measurement) else 0.0
