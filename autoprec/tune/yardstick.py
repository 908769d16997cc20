"""Yardstick: what one outcome is held against during a study; loss gap, constraints and whether it may win."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoprec.records import Failure, Measurement, Outcome
from autoprec.tune.divergence import loss_gap
from autoprec.tune.verdict import DEFAULT_TOLERANCE

CONSTRAINTS = ("memory", "finite", "divergence", "runs")
# A constraint's value is cut here: TPE ranks bad trials by the sum of violations, and one huge value would hide the others.
WORST = 10.0


@dataclass(frozen=True)
class Yardstick:
    """What trials are compared with.

    Attributes:
        reference_losses: FP32 losses of the study's window.
        noise_floor: the gap two FP32 runs show; smaller gaps count as equal.
        tolerance: the largest relative gap accepted, where it is above the noise floor.
        memory_limit_bytes: the most a policy may use; None for no limit.
    """

    reference_losses: tuple[float, ...]
    noise_floor: float = 0.0
    tolerance: float = DEFAULT_TOLERANCE
    memory_limit_bytes: int | None = None

    @property
    def limit(self) -> float:
        """The largest loss gap accepted: the tolerance, or the noise floor where it is larger."""
        return max(self.tolerance, self.noise_floor)

    def gap(self, outcome: Outcome) -> float:
        """Signed relative loss gap; infinite for a failure or a non-finite loss."""
        return math.inf if isinstance(outcome, Failure) else loss_gap(self.reference_losses, outcome.losses)

    def divergence(self, measurement: Measurement) -> float:
        """The study's second objective: distance from FP32, where gaps under the noise floor count as equal."""
        return max(abs(self.gap(measurement)), self.noise_floor)

    def constraints(self, outcome: Outcome) -> dict[str, float]:
        """Values by constraint, feasible at 0 or below, always all of CONSTRAINTS and always finite."""
        values = dict.fromkeys(CONSTRAINTS, 0.0)
        if isinstance(outcome, Failure):
            broken = {"out_of_memory": "memory", "diverged": "finite", "scale_collapsed": "finite"}.get(outcome.kind, "runs")
            return values | {broken: 1.0}
        if self.memory_limit_bytes is not None:
            values["memory"] = _cut(outcome.peak_bytes / self.memory_limit_bytes - 1.0)
        gap = self.gap(outcome)
        if not math.isfinite(gap) or outcome.samples_per_s <= 0:
            return values | {"finite": 1.0}
        return values | {"divergence": _cut(gap / self.limit - 1.0)}

    def feasible(self, outcome: Outcome) -> bool:
        """True where every constraint holds."""
        return all(value <= 0 for value in self.constraints(outcome).values())


def _cut(value: float) -> float:
    return max(-WORST, min(value, WORST))
