"""What every stage of one tune shares, and the one call from the search to the hardware."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from autoprec.bench.target import Target
from autoprec.policy import Batch, Fingerprint, Policy, Precision
from autoprec.records import Look, Outcome, Profile, Window
from autoprec.session.progress import Progress
from autoprec.session.settings import Plan, Settings
from autoprec.tune.run_folder import RunFolder
from autoprec.tune.study_space import fingerprint_of


class Measuring(Protocol):
    """What a stage may ask of the hardware; ``Bench`` in this process or ``IsolatedBench`` in a worker."""

    def look(self) -> Look:
        """Traces one FP32 step."""

    def window(self, policy: Policy, window: Window) -> Outcome:
        """Trains one window under a policy."""

    def interleave(self, policies: Sequence[Policy], window: Window) -> list[Outcome]:
        """Times several policies in one process, A B A B."""

    def profile(self, precisions: Sequence[Precision]) -> Profile:
        """Costs and risks of every layer."""

    def rescore(self, policy: Policy) -> dict[str, float]:
        """Harm of every layer under a policy, its other layers active; infinite where a layer's results are not finite."""


# Share of the budget that the study leaves to verification and the report, and to execution modes where they are tried.
SHARE_AFTER_STUDY, SHARE_AFTER_STUDY_COMPILING = 0.3, 0.5


@dataclass(frozen=True)
class Context:
    """One running tune: what was asked, what runs it, what it found first, and where it writes."""

    settings: Settings
    target: Target
    bench: Measuring
    look: Look
    plan: Plan
    folder: RunFolder
    progress: Progress
    started_s: float

    @property
    def time_left_s(self) -> float:
        """Seconds of the budget that are left; negative when it is overrun."""
        return self.started_s + self.settings.budget_s - time.monotonic()

    def study_time_is_over(self, share: float | None = None) -> bool:
        """Whether less than a share of the budget is left; by default, what the stages after the study need."""
        kept = share if share is not None else (SHARE_AFTER_STUDY_COMPILING if self.compiles else SHARE_AFTER_STUDY)
        return self.time_left_s < kept * self.settings.budget_s

    @property
    def compiles(self) -> bool:
        """Whether execution modes are tried: only where their speed is measured on CUDA."""
        return self.settings.execution != "eager" and self.target.device == "cuda" and self.target.timing == "measured"

    @property
    def fingerprint(self) -> Fingerprint:
        """What a policy of this run is made for."""
        return fingerprint_of(self.look)

    def plain_fp32(self) -> Policy:
        """FP32 everywhere, the whole batch at once where that fits, torch's own flags."""
        whole = self.look.effective_batch
        micro = self.plan.fp32_micro or whole
        batch = Batch(effective=whole, micro=micro, accumulation_steps=whole // micro)
        return Policy(default="fp32", batch=batch, fingerprint=self.fingerprint)

    def trial_window(self, purpose: str = "trial") -> Window:
        """The window of study trials: one seed, the same for every candidate."""
        return Window(
            steps=self.plan.trial_steps,
            warmup_steps=self.plan.trial_warmup_steps,
            seed=self.settings.seed,
            timeout_s=self.plan.timeout_s,
            purpose=purpose,
        )

    def timing_window(self, *, times: int = 1, extra_timeout_s: float = 0.0) -> Window:
        """The window in which arms are interleaved, or one several times as long."""
        return Window(
            steps=times * self.plan.timed_steps,
            warmup_steps=self.plan.trial_warmup_steps,
            seed=self.settings.seed,
            timeout_s=times * self.plan.timeout_s + extra_timeout_s,
            purpose="interleaved timing",
        )

    def verify_window(self, seed: int, purpose: str, *, perturbation: float = 0.0, extra_timeout_s: float = 0.0) -> Window:
        """The longer window of reference runs and verification, on one of several seeds."""
        return Window(
            steps=self.plan.verify_steps,
            warmup_steps=self.plan.trial_warmup_steps,
            seed=self.settings.seed + seed,
            perturbation=perturbation,
            timeout_s=self.plan.timeout_s + extra_timeout_s,
            purpose=purpose,
        )

    def evaluate(self, policy: Policy, window: Window, role: str) -> Outcome:
        """Runs a window, or returns what the same window gave earlier in this run; written to the folder either way it ends."""
        known = self.folder.lookup(policy, window)
        if known is not None:
            return known
        outcome = self.bench.window(policy, window)
        self.folder.record(role, policy, window, outcome)
        return outcome
