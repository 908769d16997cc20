"""What every stage of one tune shares, and the one call from the search to the hardware."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autoprec.bench.target import Target
from autoprec.policy import Batch, Fingerprint, Policy, Precision
from autoprec.records import Ceiling, Failure, Look, Outcome, Profile, Window
from autoprec.session.budget import MOST_AFTER_STUDY, MOST_WITH_MODES, RECOMPILE_SHARE, REPORT_S, VERIFIED_ARMS, Costs
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

    def ceiling(self, allowed: Mapping[str, Sequence[Precision]], fp32: Policy) -> Ceiling:
        """The most that any assignment could give where speed is predicted."""

    def profile(self, precisions: Sequence[Precision]) -> Profile:
        """Costs and risks of every layer."""

    def rescore(self, policy: Policy) -> dict[str, float]:
        """Harm of every layer under a policy, its other layers active; infinite where a layer's results are not finite."""


# A window is ended when the budget is over and it has run this many times as long as expected, and a moment more. Own choice: a
# window that is a little late still counts, one that hangs does not hold up the answer.
LATE_TIMES, LATE_S = 2.0, 10.0


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
    costs: Costs = field(default_factory=Costs)
    clock: Callable[[], float] = time.monotonic
    left_out: list[str] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)

    @property
    def time_left_s(self) -> float:
        """Seconds of the budget that are left; negative when it is overrun."""
        return self.started_s + self.settings.budget_s - self.clock()

    def study_time_is_over(self, share: float) -> bool:
        """Whether less than a share of the budget is left."""
        return self.time_left_s < share * self.settings.budget_s

    def may_start(self, cost_s: float, keep_s: float = REPORT_S) -> bool:
        """Whether what takes ``cost_s`` ends before the time that later stages keep; never once the budget is over."""
        return self.time_left_s > 0 and cost_s + keep_s <= self.time_left_s

    def leave_out(self, what: str, why: str = "no time left", *, decides: bool = True) -> None:
        """Says, and remembers for the report, that something of the tune is left out; whether the answer might be another with it."""
        self.left_out.append(what)
        if decides:
            self.untried.append(what)
        self.progress.found(f"budget: {what} left out, {why}")

    def with_seeds(self, seeds: int) -> Context:
        """This context with verification on fewer (or no) seeds."""
        return replace(self, plan=self.plan.model_copy(update={"verify_seeds": seeds}))

    def window_s(self, policy: Policy, window: Window) -> float:
        """Seconds that a window is expected to take; none where its outcome is already known."""
        return 0.0 if self.folder.lookup(policy, window) is not None else self.costs.window_s(policy, window.steps)

    def low_s(self, steps: int) -> float:
        """Seconds of a window in low precision."""
        return self.costs.window_s(self.plain_fp32().model_copy(update={"default": "bf16"}), steps)

    def verification_s(self, arms: int) -> float:
        """Seconds to verify some arms on every seed; where trials are as long, the first seed has run."""
        again = self.plan.verify_seeds - (self.plan.verify_steps == self.plan.trial_steps)
        return arms * again * self.low_s(self.plan.verify_steps)

    def timing_s(self, arms: int) -> float:
        """Seconds to time some arms interleaved; none where speed is predicted."""
        if self.target.timing == "predicted":
            return 0.0
        fp32_s = self.costs.window_s(self.plain_fp32(), self.plan.timed_steps)
        return fp32_s + (arms - 1) * self.low_s(self.plan.timed_steps)

    def execution_s(self) -> float:
        """Seconds to compile, time and verify one set-up, on two seeds at least; none where execution modes are not tried."""
        if not self.compiles:
            return 0.0
        return self.costs.compile_s + min(self.plan.verify_seeds, 2) * self.compiled_s()

    def compiled_s(self) -> float:
        """Seconds to verify on one seed what has been compiled before."""
        return RECOMPILE_SHARE * self.costs.compile_s + self.low_s(self.plan.verify_steps)

    def kept_for_execution_s(self, beside_s: float) -> float:
        """The same where it fits beside what has to be done before, so that verifying and timing further arms does not take it."""
        wanted_s = self.execution_s()
        return wanted_s if self.may_start(wanted_s, beside_s) else 0.0

    def least_after_s(self, arms: int = 1) -> float:
        """Seconds without which nothing that a stage finds can be exported: one arm verified and timed, and the report."""
        return self.verification_s(arms) + self.timing_s(arms + 1) + REPORT_S

    def after_study_s(self, start_left_s: float) -> float:
        """Seconds that a study begun with ``start_left_s`` to go leaves to the stages after it."""
        whole_s = self.verification_s(VERIFIED_ARMS) + self.timing_s(VERIFIED_ARMS + 1) + self.execution_s() + REPORT_S
        most_s = MOST_AFTER_STUDY * start_left_s
        # One compiled arm is worth more than the last trials: graphs gave 1.2x to 1.5x of the best eager arm on ResNet-50 and GPT-2.
        # The look at the fastest plan of each compute type comes before.
        with_modes_s = self.execution_s() + self.least_after_s() + 3 * self.low_s(self.plan.trial_steps)
        return min(whole_s, max(most_s, with_modes_s) if with_modes_s < MOST_WITH_MODES * start_left_s else most_s)

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
        outcome = self.run(policy, window)
        if not self.is_cut_short(outcome):
            self.folder.record(role, policy, window, outcome)
        return outcome

    def run(self, policy: Policy, window: Window) -> Outcome:
        """Runs a window and learns what it took. One that hangs is ended soon after the budget is over."""
        expected_s = self.costs.compile_s if policy.execution != "eager" else self.costs.window_s(policy, window.steps)
        timeout_s = min(window.timeout_s, max(self.time_left_s, 0.0) + LATE_TIMES * expected_s + LATE_S)
        start_s = self.clock()
        outcome = self.bench.window(policy, window.model_copy(update={"timeout_s": timeout_s}))
        if not isinstance(outcome, Failure):
            self.costs.learn(policy, window.steps, self.clock() - start_s)
        return outcome

    def interleave(self, policies: Sequence[Policy], window: Window) -> list[Outcome]:
        """Times several policies in one process, which is ended soon after the budget is over, and learns what compiling takes."""
        compiled = sum(policy.execution != "eager" for policy in policies)
        expected_s = compiled * self.costs.compile_s + sum(self.costs.window_s(policy, window.steps) for policy in policies)
        # The bench gives every arm this long.
        most_s = (max(self.time_left_s, 0.0) + LATE_TIMES * expected_s + LATE_S) / max(len(policies), 1)
        start_s = self.clock()
        outcomes = self.bench.interleave(tuple(policies), window.model_copy(update={"timeout_s": min(window.timeout_s, most_s)}))
        if compiled:
            self.costs.learn_compile((self.clock() - start_s) / compiled)
        return outcomes

    def is_cut_short(self, outcome: Outcome) -> bool:
        """Whether a window has no samples only because the budget was over: that says nothing about its set-up."""
        return isinstance(outcome, Failure) and outcome.kind == "timeout" and self.time_left_s <= 0
