"""A bench without tensors on a clock of its own: windows take the time that a test says, and nothing else takes any."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tune"))
from decision_fakes import ENVIRONMENT, look_of, small_model

from autoprec.bench.target import Target
from autoprec.policy import PRECISIONS, Policy, Precision
from autoprec.records import Ceiling, Look, Measurement, Outcome, Profile, Window
from autoprec.session.export import TuneResult
from autoprec.session.logbook import Logbook
from autoprec.session.run import run_stages
from autoprec.session.settings import Settings
from autoprec.tune.identity import Identity
from autoprec.tune.run_folder import RunFolder
from autoprec.tune.space import load_search_space

CUDA = Target("Fake GPU", None, "cuda", "measured", False, None, PRECISIONS, "9.0")
PREDICTED = Target("Fake GPU", None, "cpu", "predicted", True, None, PRECISIONS, "9.0")
StepOf = Callable[[Policy], float]


class Clock:
    """Seconds that pass only when a bench works."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class TimedBench:
    """Windows of made-up speed and losses.

    Attributes:
        calls: what was asked for, with what it took.
        longest_s: the longest window, compiling included; an interleaved call counts by its longest arm.
    """

    def __init__(
        self,
        clock: Clock,
        step_s: StepOf,
        *,
        look: Look | None = None,
        wall_s: StepOf | None = None,
        overhead_s: float = 0.3,
        compile_s: float = 40.0,
        profile_s: float = 5.0,
        host_bound: bool = False,
        scatter: float = 0.002,
        gap: float = 1e-4,
        gain: float = 2.0,
    ) -> None:
        known, self._profile = small_model(capability="9.0")
        self._look = look or known
        self._clock, self._step_s, self._wall_s = clock, step_s, wall_s or step_s
        self._overhead_s, self._compile_s, self._profile_s = overhead_s, compile_s, profile_s
        self._host_bound, self._scatter, self._gap, self._gain = host_bound, scatter, gap, gain
        self._compiled: set[str] = set()
        self.calls: list[tuple[str, float]] = []
        self.longest_s = 0.0

    def look(self) -> Look:
        return self._look

    def window(self, policy: Policy, window: Window) -> Outcome:
        seconds = self._arm_s(policy, window)
        self._pass(window.purpose, seconds)
        return self._measured(policy, window)

    def interleave(self, policies: Sequence[Policy], window: Window) -> list[Outcome]:
        seconds = [self._arm_s(policy, window) for policy in policies]
        self._pass("interleave", sum(seconds), longest_s=max(seconds))
        return [self._measured(policy, window) for policy in policies]

    def ceiling(self, allowed: Mapping[str, Sequence[Precision]], fp32: Policy) -> Ceiling:
        step_s = self._step_s(fp32)
        return Ceiling(
            fp32_step_s=step_s,
            best_fp32_step_s=step_s,
            floor_step_s=step_s / self._gain,
            host_bound=self._host_bound,
            origin="predicted",
        )

    def profile(self, precisions: Sequence[Precision]) -> Profile:
        self._pass("profile", self._profile_s, longest_s=self._profile_s)
        return self._profile

    def rescore(self, policy: Policy) -> dict[str, float]:
        return {}

    def _arm_s(self, policy: Policy, window: Window) -> float:
        compiles = policy.execution != "eager"
        key = policy.setup_hash()
        extra = (self._compile_s * (0.2 if key in self._compiled else 1.0)) if compiles else 0.0
        if compiles:
            self._compiled.add(key)
        return self._overhead_s + extra + window.steps * self._wall_s(policy)

    def _pass(self, what: str, seconds: float, longest_s: float | None = None) -> None:
        self._clock.now_s += seconds
        self.calls.append((what, seconds))
        self.longest_s = max(self.longest_s, seconds if longest_s is None else longest_s)

    def _measured(self, policy: Policy, window: Window) -> Measurement:
        low = policy.default != "fp32" or bool(policy.layers)
        shift = (self._gap if low else 0.0) + (1e-7 if window.perturbation else 0.0) + 1e-6 * window.seed * low
        losses = tuple((2.5 - 1.5 * step / window.steps) * (1 + shift) for step in range(window.steps))
        timed = max(window.steps - window.warmup_steps, 1)
        wave = [1 + self._scatter * ((step * 7919) % 11 - 5) / 5 for step in range(timed)]
        step_s = self._step_s(policy)
        return Measurement(
            losses=losses,
            step_times_s=tuple(step_s * factor for factor in wave),
            speed_origin="measured",
            batch_samples=64,
            peak_bytes=10**9,
            host_bound=self._host_bound and policy.execution != "compile_cudagraphs",
            environment=ENVIRONMENT,
        )


class Listener:
    """Keeps what a tune says."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.stages: list[str] = []
        self.bests: list[str] = []

    def stage(self, name: str, total: int) -> None:
        self.stages.append(name)

    def advance(self, text: str = "") -> None:
        self.bests.append(text)

    def found(self, text: str) -> None:
        self.lines.append(text)


def tuned(
    path: Path, bench: TimedBench, clock: Clock, *, target: Target = CUDA, look_s: float = 4.0, **settings: Any
) -> tuple[TuneResult, Listener, float]:
    """Runs every stage; returns the result, what was said, and the seconds of the budget that it took."""
    asked = Settings(workload="fake.py", **{"trials": 10, **settings})
    look, listener, started_s = bench.look(), Listener(), clock()
    clock.now_s += look_s
    identity = Identity(
        workload="fake.py",
        workload_sha256=look.workload_sha256,
        layer_list_sha256="0" * 64,
        search_space_sha256="0" * 64,
        target=target.name,
        torch_version=look.torch_version,
    )
    space = load_search_space("hopper", keep_fp32=asked.keep_fp32)
    with RunFolder.open(path, identity) as folder:
        result = run_stages(
            asked,
            target,
            bench,
            look,
            folder,
            Logbook(listener),
            space,
            started_s,
            clock,
        )
    return result, listener, clock() - started_s


def is_low(policy: Policy) -> bool:
    """Whether a policy has any half precision."""
    return policy.default != "fp32" or any(setting.precision != "fp32" for setting in policy.layers.values())


def is_pure(policy: Policy) -> bool:
    """Whether a policy has any pure half precision."""
    return any(precision.endswith("_pure") for precision in (policy.default, *policy.precisions().values()))


def usual(fp32_s: float, low: float = 0.4, graphs: float = 0.7) -> StepOf:
    """A model that gains from low precision, and from CUDA graphs."""

    def step_s(policy: Policy) -> float:
        share = low if is_low(policy) else (0.6 if policy.backend.tf32 else 1.0)
        share *= 0.95 if is_pure(policy) else 1.0
        return fp32_s * share * (1.0 if policy.execution == "eager" else graphs)

    return step_s


def looked(**fields: object) -> Look:
    """The small model's look with other figures."""
    known, _ = small_model()
    return look_of(known.layers, **{"has_conv": True, "capability": "9.0", **fields})
