"""The bench of one workload on one target: everything that touches hardware or the model, behind a few methods.

It keeps what windows share: batches and initial weights by seed, and the traced operations that speed is predicted from.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.bench.arms import interleave
from autoprec.bench.isolation import IsolatedBench
from autoprec.bench.look import trace_workload
from autoprec.bench.optrace import OpTrace
from autoprec.bench.profile import profile
from autoprec.bench.provisions import DataCache, ModelCache
from autoprec.bench.roofline import RooflineSpeed
from autoprec.bench.target import Target, cap_memory
from autoprec.bench.training import SpeedModel
from autoprec.bench.window import run_window
from autoprec.bench.workload import Workload, load_workload
from autoprec.bench.workload_check import check_workload
from autoprec.policy import Policy, Precision
from autoprec.records import Failure, Look, Measurement, Profile, Window

IN_PROCESS_NOTE = (
    "The workload is an object in memory, so windows run in this process: a crash, a hang or a CUDA error would end the run. "
    "Give path/model.py or package.module:object to isolate them."
)


class Bench:
    """Measures one workload in this process.

    Args:
        reference: what ``load_workload`` accepts.
        target: where to measure.

    Raises:
        WorkloadError: the workload does not load, or does not train one step in FP32.
    """

    def __init__(self, reference: object, target: Target) -> None:
        cap_memory(target)
        self.target = target
        self.workload: Workload = check_workload(load_workload(reference), target.device)
        self._data = DataCache(self.workload)
        self._models = ModelCache(self.workload)
        self._traced: tuple[Look, OpTrace] | None = None
        self._notes: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about the workload and the target."""
        return (*self.target.notes, *self.workload.notes, *self._notes)

    def add_note(self, text: str) -> None:
        """Adds something a person should know."""
        self._notes = (*self._notes, text)

    def look(self) -> Look:
        """Layers, edges and shares of one traced FP32 step; traced once."""
        return self._trace()[0]

    def window(self, policy: Policy, window: Window) -> Measurement | Failure:
        """Trains for one window under a policy; see ``run_window``."""
        return run_window(self.workload, self.target, policy, window, data=self._data, models=self._models, speed=self._speed())

    def interleave(self, policies: Sequence[Policy], window: Window) -> list[Measurement | Failure]:
        """Measures policies side by side; see ``arms.interleave``."""
        return interleave(self.workload, self.target, policies, window, data=self._data, models=self._models, speed=self._speed())

    def profile(self, precisions: tuple[Precision, ...]) -> Profile:
        """What every layer costs and risks in each precision."""
        look, trace = self._trace()
        return profile(self.workload, self.target, look, precisions, trace=trace)

    def close(self) -> None:
        """Lets go of what is kept."""
        self._traced = None

    def _trace(self) -> tuple[Look, OpTrace]:
        if self._traced is None:
            self._traced = trace_workload(self.workload, self.target)
        return self._traced

    def _speed(self) -> SpeedModel | None:
        if self.target.gpu is None or (self.target.device == "cuda" and self.target.timing == "measured"):
            return None
        look, trace = self._trace()
        return RooflineSpeed(trace, self.target.gpu, look)


def open_bench(reference: object, target: Target) -> Bench | IsolatedBench:
    """An isolated bench where another process can load the workload, otherwise one in this process, with a note.

    Raises:
        WorkloadError: the workload does not load, or does not train one step in FP32.
    """
    workload = load_workload(reference)
    if workload.reference:
        return IsolatedBench(workload.reference, target)
    bench = Bench(workload, target)
    bench.add_note(IN_PROCESS_NOTE)
    return bench
