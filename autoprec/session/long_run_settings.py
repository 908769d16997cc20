"""What a verification is asked for: the policy, the workload, and how long a long run is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoprec.errors import RunFolderError, UserError
from autoprec.policy import Policy, load_policy
from autoprec.session.budget import LONGEST_TRIAL_STEPS
from autoprec.session.settings import Plan
from autoprec.tune.run_folder import RunFolder
from autoprec.tune.verdict import DEFAULT_TOLERANCE

DEFAULT_SEEDS = 3
# A long run is this many trial windows. Source: the project's own aim, a run of at least ten windows within FP32's noise.
TIMES_THE_TRIAL = 10
DEFAULT_STEPS = TIMES_THE_TRIAL * LONGEST_TRIAL_STEPS
# Fewer steps have no tail to compare: a quarter of them must hold a few.
LEAST_STEPS = 20


@dataclass(frozen=True)
class VerifySettings:
    """Everything ``autoprec verify`` can be told.

    Attributes:
        policy: path of a policy.json, or of a run's folder that holds one; or the policy itself.
        workload: as ``tune`` takes it.
        steps: of every training; None is ten times the tune's trial window where the run's folder tells it, else 1,200.
        seeds: trainings of every set-up; up to twice as many while the verdict is unclear.
        tolerance: relative loss gap to FP32 that passes, unless FP32's own noise is larger.
        gpu: a card's name, ``cpu``, or None: the CUDA device here; without one the CPU stands in for the policy's card.
        predict: allow another CUDA card to stand in for the one named.
        out: folder of the evidence; None is ``verify-<n>`` in the run's folder, or beside the policy.
    """

    policy: str | os.PathLike[str] | Policy
    workload: Any
    steps: int | None = None
    seeds: int = DEFAULT_SEEDS
    tolerance: float = DEFAULT_TOLERANCE
    gpu: str | None = None
    predict: bool = False
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < LEAST_STEPS:
            hint = f"A long run is {DEFAULT_STEPS:,} steps where nothing else is said."
            raise UserError(f"steps is {self.steps}; allowed is {LEAST_STEPS} or more.", hint=hint)
        if self.seeds < 1:
            raise UserError(f"seeds is {self.seeds}; allowed is 1 or more.", hint=f"{DEFAULT_SEEDS} is what a tune uses.")
        if not 0 < self.tolerance < 1:
            hint = "0.01 lets the loss differ by 1%."
            raise UserError(f"tolerance is {self.tolerance}; allowed is between 0 and 1.", hint=hint)


@dataclass(frozen=True)
class Given:
    """The policy and where it came from; ``run`` is the tune's folder, where the file lies in one."""

    policy: Policy
    name: str
    path: Path | None
    run: Path | None


def given_policy(policy: str | os.PathLike[str] | Policy) -> Given:
    """Reads the policy.

    Raises:
        PolicyError: there is none, or it cannot be read.
    """
    if isinstance(policy, Policy):
        return Given(policy, "a policy in memory", None, None)
    path = Path(policy)
    path = path / "policy.json" if path.is_dir() else path
    loaded = load_policy(path)
    return Given(loaded, str(path), path, path.parent if (path.parent / "run.json").is_file() else None)


def chosen_steps(settings: VerifySettings, run: Path | None) -> tuple[int, str]:
    """How many steps, and why."""
    if settings.steps is not None:
        return settings.steps, "as asked"
    plan = None
    if run is not None:
        try:
            plan = RunFolder.read(run).load_stage("plan", Plan)
        except RunFolderError:  # of another version, or damaged: only the length of its windows is asked for
            plan = None
    if plan is None:
        return DEFAULT_STEPS, f"{TIMES_THE_TRIAL} times the longest trial window of a tune; --steps changes it"
    steps = max(TIMES_THE_TRIAL * plan.trial_steps, LEAST_STEPS)
    return steps, f"{TIMES_THE_TRIAL} times the {plan.trial_steps} steps of this run's trials; --steps changes it"
