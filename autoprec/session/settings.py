"""What a tune is asked for, and how its time is split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autoprec.errors import UserError, suggest
from autoprec.records import Record

ExecutionChoice = Literal["auto", "eager", "compile"]
EXECUTION_CHOICES: tuple[ExecutionChoice, ...] = ("auto", "eager", "compile")

DEFAULT_TRIALS = 24
DEFAULT_BUDGET_S = 240.0
DEFAULT_TOLERANCE = 0.01


@dataclass(frozen=True)
class Settings:
    """Everything ``autoprec tune`` can be told.

    Attributes:
        workload: ``path/model.py``, ``path/model.py:object``, ``package.module:object`` or an object with the same attributes.
        gpu: a card's name, ``cpu``, or None for the CUDA device that is here.
        predict: allow predicted speed for a card that is not the one here.
        trials: study trials beyond the baselines, in total over all sessions of the folder.
        budget_s: wall time to plan the windows for.
        out: the run's folder; None is ``reports/<model>-<gpu>``.
        execution: ``eager``, ``compile`` (with its CUDA-graph mode), or ``auto``: compile where the speed is measured on CUDA.
        search_space: a packaged name or a TOML file; None picks the family of the target.
        tolerance: largest relative loss gap to FP32 that passes, unless the noise floor is larger.
        seed: seed of the sampler and of the first window.
        keep_fp32: layer patterns pinned to FP32.
    """

    workload: Any
    gpu: str | None = None
    predict: bool = False
    trials: int = DEFAULT_TRIALS
    budget_s: float = DEFAULT_BUDGET_S
    out: Path | None = None
    execution: ExecutionChoice = "auto"
    search_space: str | None = None
    tolerance: float = DEFAULT_TOLERANCE
    seed: int = 0
    keep_fp32: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.execution not in EXECUTION_CHOICES:
            allowed = ", ".join(EXECUTION_CHOICES)
            raise UserError(
                f"execution is {self.execution!r}; allowed: {allowed}.{suggest(str(self.execution), EXECUTION_CHOICES)}"
            )
        if self.trials < 0:
            raise UserError(
                f"trials is {self.trials}; allowed is 0 or more.", hint="Give the number of trials beyond the baselines."
            )
        if not self.budget_s > 0:
            raise UserError(f"budget is {self.budget_s} s; allowed is more than 0.", hint="Give a time such as 10m or 90s.")
        if not 0 < self.tolerance < 1:
            raise UserError(
                f"tolerance is {self.tolerance}; allowed is between 0 and 1.", hint="0.01 lets the loss differ by 1%."
            )


class Plan(Record):
    """Window lengths that fit the budget, and the micro-batch with which FP32 fits into memory (0: the whole batch)."""

    trial_steps: int
    trial_warmup_steps: int
    verify_steps: int
    verify_seeds: int
    timed_steps: int
    timeout_s: float
    fp32_micro: int = 0


# A window shorter than this says nothing about a loss curve, and one longer than this no longer ranks candidates any better;
# both are choices of this project, checked on the examples (see "How it decides" in the README).
SHORTEST_TRIAL_STEPS, LONGEST_TRIAL_STEPS = 24, 120
VERIFY_SEEDS = 3
# Shares of the budget: FP32 with its twins, the study, the verification. The rest is for profile and execution modes.
REFERENCE_SHARE, STUDY_SHARE, VERIFICATION_SHARE = 0.14, 0.35, 0.2
TIMING_SHARE = 0.1
# A window that takes longer than this, and 60 times what the probe foretold, hangs. Own choice: other processes may take most of
# the machine for a while, and a set-up may be slow.
LEAST_TIMEOUT_S = 600.0
# Arms that are verified on every seed: TF32, two stock AMP, three finalists.
VERIFIED_ARMS = 6
# A step of a candidate against FP32's. Source: stock AMP took 0.34 of FP32's step for ResNet-50 on an H200; on a CPU that
# follows CUDA's rules it took 1.2 to 1.5 of it on the examples.
CANDIDATE_STEP_ON_CUDA, CANDIDATE_STEP_ON_CPU = 0.4, 1.4


def plan_windows(step_s: float, overhead_s: float, settings: Settings, *, num_baselines: int, on_cuda: bool) -> Plan:
    """Sizes every window from the time of an FP32 window.

    Args:
        step_s: wall seconds of one FP32 optimizer step.
        overhead_s: wall seconds of a window besides its steps (building the model, copying, cleaning up).
        settings: budget and trials.
        num_baselines: baselines that run before the study.
        on_cuda: whether the steps run on a GPU.
    """
    step_s = max(step_s, 1e-4)
    candidate_s = step_s * (CANDIDATE_STEP_ON_CUDA if on_cuda else CANDIDATE_STEP_ON_CPU)
    budget_s = settings.budget_s

    def steps(share: float, windows: int, seconds: float) -> int:
        return int((share * budget_s / windows - overhead_s) / seconds)

    trial = steps(STUDY_SHARE, max(settings.trials + num_baselines, 1), candidate_s)
    trial = min(max(trial, SHORTEST_TRIAL_STEPS), LONGEST_TRIAL_STEPS)
    verify = min(
        steps(REFERENCE_SHARE, 2 * VERIFY_SEEDS, step_s),
        steps(VERIFICATION_SHARE, VERIFIED_ARMS * VERIFY_SEEDS, candidate_s),
    )
    verify = min(max(verify, trial), 4 * trial)
    return Plan(
        trial_steps=trial,
        trial_warmup_steps=min(8, trial // 3),
        verify_steps=verify,
        verify_seeds=VERIFY_SEEDS,
        timed_steps=min(max(int(TIMING_SHARE * budget_s / (VERIFIED_ARMS + 1) / candidate_s), 20), 62),
        timeout_s=max(LEAST_TIMEOUT_S, 60 * (overhead_s + step_s * verify)),
    )
