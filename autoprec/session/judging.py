"""A policy on the verification windows: its outcomes by seed, the verdict over them, and the loss scale it settled at."""

from __future__ import annotations

from collections.abc import Iterable

from autoprec.policy import Policy
from autoprec.records import Failure, Measurement, Outcome, Verdict
from autoprec.session.context import Context
from autoprec.session.reference import reference_curve, twin_noise
from autoprec.tune.divergence import loss_gap
from autoprec.tune.verdict import judge

# On one seed, all that a short budget holds, a policy passes only well within the tolerance: nothing shows how seeds scatter.
# Own choice.
ONE_SEED_SHARE = 0.25


def judged(context: Context, outcomes: Iterable[Outcome]) -> Verdict | None:
    """The verdict over the outcomes of the first seeds; None where a window failed."""
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


def does_harm(verdict: Verdict | None) -> bool:
    """Whether other precisions are worth looking for: a window failed, or the gap is real and too large.

    A verdict that is inconclusive with FP32's own loss inside its interval speaks of noise, which more seeds average out and no
    lifted layer cures.
    """
    return verdict is None or (verdict.status != "passed" and verdict.low > 0)


def trained_on_seeds(context: Context, policy: Policy, purpose: str) -> list[Outcome]:
    """Outcomes of the verification windows, seed by seed up to the first failure. What ran earlier in the run is not run again.

    Where the budget ends in between there are fewer seeds, and the verdict says so.
    """
    outcomes: list[Outcome] = []
    for seed in range(context.plan.verify_seeds):
        if outcomes and context.time_left_s <= 0:
            break
        outcomes.append(context.evaluate(policy, context.verify_window(seed, purpose), role="verification"))
        if isinstance(outcomes[-1], Failure):
            break
    return outcomes


def at_settled_scale(policy: Policy, outcomes: Iterable[Outcome]) -> Policy | None:
    """The policy started at the loss scale at which its windows ended; None where it never had to come down.

    A scale that is too large at first skips steps. A run of thousands forgets them, but in a short window each leaves the loss behind
    FP32's, and a layer would be blamed for it. So a start that was too high is mended before any layer is lifted, also to a scale
    under those the study chooses from.
    """
    scales = [o.final_scale for o in outcomes if isinstance(o, Measurement) and o.skipped_steps and o.final_scale is not None]
    lowest = min(scales, default=policy.loss_scale.init)
    if lowest >= policy.loss_scale.init:
        return None
    return policy.model_copy(update={"loss_scale": policy.loss_scale.model_copy(update={"init": lowest})})
