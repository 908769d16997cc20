"""A run without a model: windows answer by a script, and what was asked is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autoprec.policy import Backend, Batch, Policy, Precision
from autoprec.records import Measurement, Outcome, Window, evaluation_key
from autoprec.session.settings import Settings
from autoprec.tune.study_space import StudySpace

sys.path.insert(0, str(Path(__file__).parent.parent / "tune"))
from decision_fakes import bound, measured, small_model

FP16_ONLY: tuple[Precision, ...] = ("fp32", "fp16", "fp16_pure")
TRIAL_STEPS, VERIFY_STEPS, SEEDS = 20, 40, 3
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


class ScriptedContext:
    """As much of a run's context as the stages after the study use."""

    def __init__(self, script: Script, space: StudySpace, *, is_over: bool = False) -> None:
        self._script, self._is_over = script, is_over
        self._known: dict[str, Outcome] = {}
        self.asked: list[tuple[Policy, Window]] = []
        self.said: list[str] = []
        self.look = space.look
        self.compiles = False
        self.settings = Settings("scripted", execution="eager", tolerance=0.01)
        self.plan = SimpleNamespace(verify_seeds=SEEDS, trial_steps=TRIAL_STEPS)
        self.target = SimpleNamespace(precisions=FP16_ONLY, timing="predicted")
        self.progress = SimpleNamespace(stage=lambda *_: None, advance=lambda *_: None, found=self.said.append)
        self._fingerprint = space.fingerprint

    def plain_fp32(self) -> Policy:
        return Policy(default="fp32", batch=Batch(effective=64, micro=64), fingerprint=self._fingerprint)

    def trial_window(self, purpose: str = "trial") -> Window:
        return Window(steps=TRIAL_STEPS, purpose=purpose)

    def verify_window(self, seed: int, purpose: str, *, perturbation: float = 0.0) -> Window:
        return Window(steps=VERIFY_STEPS, seed=seed, purpose=purpose, perturbation=perturbation)

    def study_time_is_over(self, _share: float | None = None) -> bool:
        return self._is_over

    def evaluate(self, policy: Policy, window: Window, role: str) -> Outcome:
        key = evaluation_key(policy, window)
        if key not in self._known:
            self.asked.append((policy, window))
            self._known[key] = (
                trained(window) if is_fp32(policy) and policy.backend == Backend() else self._script(policy, window)
            )
        return self._known[key]


def scripted(script: Script, **options: Any) -> tuple[Any, StudySpace]:
    """A scripted context over the small made-up model, and its study space with fp16 and fp32 only."""
    look, profile = small_model()
    space = bound(look, profile, precisions=FP16_ONLY)
    return ScriptedContext(script, space, **options), space
