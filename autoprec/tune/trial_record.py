"""What a trial leaves in the study: attributes, constraints where TPE and the dashboard both see them, and its state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from optuna import Trial, TrialPruned

from autoprec.policy import Policy
from autoprec.records import Failure, Outcome
from autoprec.tune.assignment import summarize
from autoprec.tune.yardstick import CONSTRAINTS, Yardstick


def set_constraints(trial: Trial, values: Mapping[str, float]) -> None:
    """Sets a trial's constraints (feasible at 0 or below), once, at its end.

    optuna-dashboard 0.21 reads only the list Optuna 4 kept, so it is mirrored there; ``_trial_id`` is private, hence one place
    and a test.
    """
    for name, value in values.items():
        trial.set_constraint(name, value)
    trial.storage.set_trial_system_attr(trial._trial_id, "constraints", [float(value) for value in values.values()])


def describe_policy(trial: Trial, policy: Policy) -> None:
    """Notes what the policy is before its window runs, so that a trial that dies can still be told from others."""
    trial.set_user_attr("policy_sha256", policy.setup_hash())
    trial.set_user_attr("assignment", summarize(policy.precisions().values()))
    if policy.needs_loss_scale:
        trial.set_user_attr("loss_scale", f"init {policy.loss_scale.init:g}, growth after {policy.loss_scale.growth_interval}")


def record_outcome(trial: Trial, outcome: Outcome, yardstick: Yardstick) -> tuple[float, float]:
    """Writes attributes and constraints of a finished window.

    Returns:
        The study's values: samples/s and divergence.

    Raises:
        TrialPruned: the window failed or its loss is not finite. With a constraint above 0 TPE counts the trial against its
            region; a trial in state FAIL would be ignored and the region tried again and again.
    """
    values = yardstick.constraints(outcome)
    gap = yardstick.gap(outcome)
    broken = [name for name in CONSTRAINTS if values[name] > 0]
    attributes: dict[str, Any] = {"verdict": f"breaks {', '.join(broken)}" if broken else "within tolerance"}
    failure = _failure_text(outcome, values)
    if not isinstance(outcome, Failure):
        attributes |= {
            "samples_per_s": outcome.samples_per_s,
            "step_s": outcome.step_s,
            "peak_bytes": outcome.peak_bytes,
            "skipped_steps": outcome.skipped_steps,
            "origin": outcome.speed_origin,
            **({"dropped": outcome.dropped} if outcome.disturbed else {}),
        }
    if math.isfinite(gap):
        attributes["divergence"] = gap
    if failure:
        attributes["failure"] = failure
    for name, value in attributes.items():
        trial.set_user_attr(name, value)
    set_constraints(trial, values)
    if failure or isinstance(outcome, Failure):
        raise TrialPruned(failure)
    return outcome.samples_per_s, yardstick.divergence(outcome)


def _failure_text(outcome: Outcome, values: Mapping[str, float]) -> str:
    if isinstance(outcome, Failure):
        where = "".join((f" in {outcome.layer}" if outcome.layer else "", f" at step {outcome.step}" if outcome.step else ""))
        return f"{outcome.kind}{where}: {outcome.message}"
    return "diverged: the loss is not finite" if values["finite"] > 0 else ""
