"""Which of the verified arms becomes the policy: a gain inside the noise is no gain."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from autoprec.policy import Origin, Policy
from autoprec.records import Record, Verdict
from autoprec.tune.verdict import is_faster, speed_ratio

# A roofline has no scatter, so its ratios have no interval; a predicted gain under 1% is below what its constants are worth.
# Source: an assumption of this project.
LEAST_PREDICTED_GAIN = 1.01
# An interval that ends below this rules out a gain worth having. Own choice: twice the scatter of device-bound steps.
GAIN_THAT_MATTERS = 1.02


class Arm(Record):
    """One contender of the final comparison.

    Attributes:
        name: as people read it.
        policy: its set-up.
        rank: how far it is from plain FP32; of two equally fast arms the lower rank is chosen.
        step_times_s: samples of one step, comparable between arms; empty where it failed.
        block_steps: how many of them each block of interleaved timing gave, in order; empty where there were no blocks.
        useful_share: share of the steps that were not skipped, 0 to 1.
        speed_origin: measured or predicted.
        peak_bytes: peak memory; None where it failed.
        host_bound: whether the device waits for the host.
        verdict: against FP32; None for FP32 itself and for arms that failed.
        failure: why it has no samples, or an empty string.
    """

    name: str
    policy: Policy
    rank: int
    step_times_s: tuple[float, ...] = ()
    block_steps: tuple[int, ...] = ()
    useful_share: float = 1.0
    speed_origin: Origin
    peak_bytes: int | None = None
    verdict: Verdict | None = None
    host_bound: bool = False
    failure: str = ""

    @property
    def useful_times_s(self) -> tuple[float, ...]:
        """Seconds for one step of useful work: skipped steps stretch the others."""
        return tuple(time_s / self.useful_share for time_s in self.step_times_s)

    @property
    def eligible(self) -> bool:
        """True where it ran, and passed or is FP32 itself."""
        if not self.step_times_s or self.useful_share <= 0:
            return False
        return self.rank == 0 if self.verdict is None else self.verdict.status == "passed"


def speedup(slow: Arm, fast: Arm) -> tuple[float, float, float]:
    """How many times faster ``fast`` does a step of useful work than ``slow``, with its 95% interval; see ``verdict.speed_ratio``."""
    return speed_ratio(
        slow.useful_times_s,
        fast.useful_times_s,
        baseline_block_steps=slow.block_steps,
        candidate_block_steps=fast.block_steps,
    )


def faster_beyond_noise(slow: Arm, fast: Arm) -> bool:
    """True where ``fast`` does a step in less time than ``slow``, with the whole interval of the ratio more than a trifle above 1."""
    ratio, low, _ = speedup(slow, fast)
    if "predicted" in (slow.speed_origin, fast.speed_origin):
        return ratio > LEAST_PREDICTED_GAIN
    return is_faster(low)


def clearly_not_faster(slow: Arm, fast: Arm) -> bool:
    """True where ``fast`` is certain not to be ahead of ``slow`` by anything that matters: not the same as not being clearly ahead."""
    ratio, _, high = speedup(slow, fast)
    if "predicted" in (slow.speed_origin, fast.speed_origin):
        return ratio <= LEAST_PREDICTED_GAIN
    return high < GAIN_THAT_MATTERS


def choose(arms: Sequence[Arm]) -> Arm:
    """The simplest arm that no other passed arm beats beyond noise.

    Raises:
        ValueError: no arm is eligible; FP32 always is, so it was left out or has no samples.
    """
    eligible = sorted((arm for arm in arms if arm.eligible), key=lambda arm: (arm.rank, median_s(arm)))
    if not eligible:
        raise ValueError("no arm ran and passed; the FP32 arm must be among them")
    chosen = eligible[0]
    for arm in eligible[1:]:
        if faster_beyond_noise(chosen, arm):
            chosen = arm
    return chosen


def median_s(arm: Arm) -> float:
    """Median seconds of one step of useful work."""
    return statistics.median(arm.useful_times_s)
