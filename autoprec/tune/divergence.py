"""How far a loss curve departs from FP32's: a relative gap of the last part of the window, and the noise it is held against."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

# The tail is the last quarter of the window, at least 5 steps. Own choice: early losses fall too steeply to compare.
TAIL_SHARE = 0.25
MIN_TAIL_STEPS = 5
# A reference loss near zero would make every gap infinite; 5% of what the reference fell by is the least it is divided by.
FALL_SHARE = 0.05
# Two standard deviations hold about 95% of the gaps of a normal distribution.
NOISE_SIGMAS = 2.0


def loss_gap(reference: Sequence[float], candidate: Sequence[float]) -> float:
    """How much higher the candidate's loss ends than the reference's, relative to the reference.

    Both curves saw the same data in the same order, so the step-to-step noise they share cancels in the difference of means:

        gap = (mean of candidate's tail - mean of reference's tail) / max(|mean of reference's tail|, 5% of the reference's fall)

    Args:
        reference: FP32 losses, one a step, all finite.
        candidate: losses of the same steps.

    Returns:
        0.01 for a loss 1% higher, negative for a lower one, infinite where the candidate has a non-finite loss or stopped early.

    Raises:
        ValueError: the reference is empty or not finite, or the candidate is finite and longer.
    """
    expected = np.asarray(reference, dtype=np.float64)
    given = np.asarray(candidate, dtype=np.float64)
    if not len(expected) or not np.isfinite(expected).all():
        raise ValueError("the reference has no losses, or some that are not finite")
    if not np.isfinite(given).all() or len(given) < len(expected):
        return math.inf
    if len(given) > len(expected):
        raise ValueError(f"the candidate has {len(given)} steps, the reference {len(expected)}")
    steps = tail_steps(len(expected))
    end, start = float(expected[-steps:].mean()), float(expected[:steps].mean())
    difference = float(given[-steps:].mean()) - end
    scale = max(abs(end), FALL_SHARE * abs(start - end), float(np.finfo(np.float32).tiny))
    return difference / scale


def tail_steps(steps: int) -> int:
    """How many steps at a window's end are averaged."""
    return min(steps, max(MIN_TAIL_STEPS, math.ceil(TAIL_SHARE * steps)))


def noise_floor(pairs: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float:
    """What two FP32 runs differ by that should not differ: twice the root mean square of their gaps.

    Args:
        pairs: losses of an FP32 run and of its twin (perturbed by rounding-size noise, or TF32), a pair a seed.

    Returns:
        The relative gap below which nothing can be told; infinite where a twin diverged, 0 without pairs.
    """
    gaps = [loss_gap(reference, twin) for reference, twin in pairs]
    if not gaps:
        return 0.0
    return NOISE_SIGMAS * math.sqrt(sum(gap * gap for gap in gaps) / len(gaps))
