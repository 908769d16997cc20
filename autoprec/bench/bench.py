"""Everything that touches the hardware for one workload on one target, with what is worth keeping between calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoprec.bench.arms import interleave
from autoprec.bench.data import Batches
from autoprec.bench.look import look, trace_workload
from autoprec.bench.optrace import OpTrace
from autoprec.bench.profile import profile
from autoprec.bench.roofline import RooflineSpeed
from autoprec.bench.target import Target
from autoprec.bench.window import run_window
from autoprec.bench.workload import Workload, check_workload, load_workload
from autoprec.policy import Policy, Precision
from autoprec.records import Look, Outcome, Profile, Window


class Bench:
    """Runs windows of one workload on one target in this process."""

    def __init__(self, workload: Any, target: Target) -> None:
        """Loads the workload.

        Raises:
            WorkloadError: it cannot be loaded; what is missing or misspelt is named.
        """
        self._workload: Workload = workload if isinstance(workload, Workload) else load_workload(workload)
        self._target = target
        self._batches: dict[int, Batches] = {}
        self._look: Look | None = None
        self._trace: OpTrace | None = None

    def look(self) -> Look:
        """Checks the workload and traces one FP32 step; the second call returns the first one's answer."""
        if self._look is None:
            check_workload(self._workload, self._target.device)
            self._look, self._trace = look(self._workload, self._target)
        return self._look
