"""A run without a model: windows answer by a script, and what was asked is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tune"))
from decision_fakes import bound, measured, small_model
from timed_bench import Listener

from autoprec.bench.target import Target
from autoprec.policy import Backend, Policy, Precision
from autoprec.records import Candidate, Measurement, Outcome, Window, evaluation_key
from autoprec.session.budget import Costs
from autoprec.session.context import Context
from autoprec.session.settings import Plan, Settings
from autoprec.tune.study_space import StudySpace

FP16_ONLY: tuple[Precision, ...] = ("fp32", "fp16", "fp16_pure")
TRIAL_STEPS, VERIFY_STEPS, SEEDS, STEP_S = 20, 40, 3, 1.0
Script = Callable[[Policy, Window], Outcome]


def losses_of(window: Window, gap: float = 0.0) -> list[float]:
    """A falling loss, the tail higher than FP32's by ``gap``."""
    return [(2.0 - step / window.steps) * (1 + gap) for step in range(window.steps)]


def trained(window: Window, gap: float = 0.0, *, skipped: int = 0, final_scale: float | None = None) -> Measurement:
    """What a window measured that ended higher than FP32 by ``gap``."""
    outcome = measured(losses_of(window, gap), skipped_steps=skipped)
    return outcome.model_copy(update={"final_scale": final_scale})


def is_fp32(policy: Policy) -> bool:
    return {policy.default, *policy.precisions().values()} == {"fp32"}


class ScriptedBench:
    """Windows answer by a script. One in low precision takes a second a step; FP32's are taken to have run before.

    Attributes:
        asked: every window that ran, in order.
        now_s: the time.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self.asked: list[tuple[Policy, Window]] = []
        self.now_s = 0.0

    def window(self, policy: Policy, window: Window) -> Outcome:
        self.asked.append((policy, window))
        if is_fp32(policy) and policy.backend == Backend():
            return trained(window)
        self.now_s += window.steps * STEP_S
        return self._script(policy, window)


class MemoryFolder:
    """What a stage asks of a run's folder, without files."""

    def __init__(self) -> None:
        self._known: dict[str, Outcome] = {}
        self.candidates: list[Candidate] = []

    def lookup(self, policy: Policy, window: Window) -> Outcome | None:
        return self._known.get(evaluation_key(policy, window))

    def record(self, role: str, policy: Policy, window: Window, outcome: Outcome, trial: int | None = None) -> Candidate:
        number = len(self.candidates)
        self.candidates.append(Candidate(number=number, role=role, policy=policy, window=window, outcome=outcome, trial=trial))
        self._known.setdefault(evaluation_key(policy, window), outcome)
        return self.candidates[-1]


class ScriptedContext(Context):
    """A run's context over a scripted bench, with what was asked of it and what it said."""

    @property
    def asked(self) -> list[tuple[Policy, Window]]:
        """Windows that ran."""
        return self.bench.asked

    @property
    def said(self) -> list[str]:
        """Lines for a person."""
        return self.progress.lines


def scripted(script: Script, *, budget_s: float = 1e6) -> tuple[Any, StudySpace]:
    """A scripted context over the small made-up model, and its study space with fp16 and fp32 only."""
    look, profile = small_model()
    space = bound(look, profile, precisions=FP16_ONLY)
    bench = ScriptedBench(script)
    context = ScriptedContext(
        settings=Settings("scripted", execution="eager", tolerance=0.01, budget_s=budget_s),
        target=Target("Fake GPU", None, "cpu", "predicted", True, None, FP16_ONLY, "9.0"),
        bench=bench,
        look=space.look,
        plan=Plan(
            trial_steps=TRIAL_STEPS,
            trial_warmup_steps=2,
            verify_steps=VERIFY_STEPS,
            verify_seeds=SEEDS,
            timed_steps=TRIAL_STEPS,
            timeout_s=600.0,
        ),
        folder=MemoryFolder(),
        progress=Listener(),
        started_s=0.0,
        costs=Costs(STEP_S),
        clock=lambda: bench.now_s,
    )
    return context, space
