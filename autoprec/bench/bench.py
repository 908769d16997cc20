"""Everything that touches the hardware for one workload on one target, with what is worth keeping between calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autoprec.bench.arms import interleave
from autoprec.bench.ceiling import predict_ceiling
from autoprec.bench.data import LongBatches, Start
from autoprec.bench.look import trace_workload
from autoprec.bench.optrace import OpTrace
from autoprec.bench.profile import profile, rescore
from autoprec.bench.roofline import RooflineSpeed
from autoprec.bench.target import Target, cap_memory
from autoprec.bench.window import run_window
from autoprec.bench.workload import Workload, load_workload
from autoprec.bench.workload_check import check_workload
from autoprec.policy import Policy, Precision
from autoprec.records import Ceiling, Look, Measurement, Outcome, Profile, Window


class Bench:
    """Runs windows of one workload on one target in this process."""

    def __init__(self, workload: Any, target: Target) -> None:
        """Loads the workload.

        Raises:
            WorkloadError: it cannot be loaded; what is missing or misspelt is named.
        """
        cap_memory(target)
        self._workload: Workload = workload if isinstance(workload, Workload) else load_workload(workload)
        self._target = target
        self._starts: dict[int, Start] = {}
        self._look: Look | None = None
        self._trace: OpTrace | None = None
        self._is_checked = False

    def look(self) -> Look:
        """Checks the workload and traces one FP32 step; the second call returns the first one's answer.

        Raises:
            WorkloadError: the workload does not train in FP32, or breaks the contract of a model.py.
        """
        return self._traced()[0]

    def window(self, policy: Policy, window: Window) -> Outcome:
        """Trains one window under a policy."""
        return run_window(self._checked(), self._target, policy, window, self._start_of(window.seed), self._speed())

    def interleave(self, policies: Sequence[Policy], window: Window) -> list[Outcome]:
        """Times several policies against each other in this process, A B A B."""
        return interleave(self._checked(), self._target, policies, window, self._start_of(window.seed))

    def profile(self, precisions: Sequence[Precision]) -> Profile:
        """Costs and risks of every layer."""
        seen, trace = self._traced()
        return profile(self._workload, self._target, seen, precisions, trace=trace)

    def ceiling(self, allowed: Mapping[str, Sequence[Precision]], fp32: Policy) -> Ceiling:
        """The most that any assignment of these precisions could give, where speed is predicted.

        Raises:
            ValueError: the target is not in the GPU table.
        """
        if self._target.gpu is None:
            raise ValueError(f"{self._target.name} is not in the GPU table: there is no step time to predict.")
        seen, trace = self._traced()
        return predict_ceiling(trace, self._target.gpu, allowed, fp32, most_micro=max(seen.micro_batches))

    def _checked(self) -> Workload:
        """The workload with what its check finds out (smaller batches, closures); a worker started anew checks again."""
        if not self._is_checked:
            self._workload = check_workload(self._workload, self._target.device)
            self._is_checked = True
        return self._workload

    def rescore(self, policy: Policy) -> dict[str, float]:
        """Harm of every layer under a policy, its other layers active; infinite where a layer's own results are not finite.

        Forward errors only: how gradients fare is the loss scale's business and was scored with the profile.
        """
        seen, trace = self._traced()
        scores = rescore(self._workload, self._target, seen, policy, trace=trace)
        return {name: math.inf if entry.bad else entry.harm + entry.output for name, entry in scores.items()}

    def _traced(self) -> tuple[Look, OpTrace]:
        if self._look is None or self._trace is None:
            seen, self._trace = trace_workload(self._checked(), self._target)
            self._look = seen.model_copy(update={"grad_clip": self._workload.grad_clip, "notes": self._workload.notes})
        return self._look, self._trace

    def _start_of(self, seed: int) -> Start:
        if seed not in self._starts:
            self._starts[seed] = Start(self._workload, seed, pinned=self._target.device == "cuda")
        return self._starts[seed]

    def _speed(self) -> RooflineSpeed | None:
        """Predicts times for a card that is not here, and memory on a CPU; CUDA measures both."""
        if self._target.gpu is None and self._target.device != "cpu":
            return None
        seen, trace = self._traced()
        return RooflineSpeed(trace, self._target.gpu, seen)


class LongRunBench(Bench):
    """A bench whose windows see all the data, however many steps they have; arms are timed on a few kept batches, as ever.

    The batches of one seed only are held in memory, so run all windows of a seed before those of the next.
    """

    def __init__(self, workload: Any, target: Target) -> None:
        """See ``Bench``."""
        super().__init__(workload, target)
        self._long: tuple[int, Start] | None = None

    def window(self, policy: Policy, window: Window) -> Outcome:
        """Trains one window under a policy; says in its note how often the data was gone through, where it ended."""
        start = self._long_start_of(window.seed)
        # Its losses are what counts: arms are timed in turns, on windows of their own.
        outcome = run_window(self._checked(), self._target, policy, window, start, self._speed(), watched=False)
        length = start.batches.pass_length if isinstance(start.batches, LongBatches) else None
        if not isinstance(outcome, Measurement) or length is None:
            return outcome
        note = (
            f"batches() ended after {length:,} batches and was started again with the same seed: {window.steps:,} steps go "
            f"{window.steps / length:.1f} times through the same batches in the same order"
        )
        return outcome.model_copy(update={"note": note})

    def _long_start_of(self, seed: int) -> Start:
        if self._long is None or self._long[0] != seed:
            self._long = None  # before the next one fills
            self._long = (seed, Start(self._checked(), seed, pinned=self._target.device == "cuda", kind=LongBatches))
        return self._long[1]
