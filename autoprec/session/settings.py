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
        budget_s: wall time of the whole tune; overrun by no more than the window (or compile) that is running when it ends.
        out: the run's folder; None is ``reports/<model>-<gpu>``.
        execution: ``eager``, ``compile`` (with its CUDA-graph mode), or ``auto``: compile where the speed is measured on CUDA.
        search_space: a packaged name or a TOML file; None picks the family of the target.
        tolerance: largest relative loss gap to FP32 that passes, unless the noise floor is larger.
        seed: seed of the sampler and of the first window.
        keep_fp32: layer patterns pinned to FP32.
        anyway: search also where the first look says that low precision cannot pay.
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
    anyway: bool = False

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
    """Window lengths that fit the budget, and the micro-batch with which FP32 fits into memory (0: the whole batch).

    ``step_s`` and ``overhead_s`` are what the probe's FP32 step and the rest of its window took by the wall clock; ``fp32_step_s`` is
    the step as the bench measured it (0 where speed is predicted) and ``host_bound`` what the bench said of it.
    """

    trial_steps: int
    trial_warmup_steps: int
    verify_steps: int
    verify_seeds: int
    timed_steps: int
    timeout_s: float
    fp32_micro: int = 0
    step_s: float = 0.0
    overhead_s: float = 0.0
    fp32_step_s: float = 0.0
    host_bound: bool = False
