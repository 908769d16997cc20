"""Where on an assignment front does harm become too much? A bisection, steered by what the last failing plan measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autoprec.records import Failure, Outcome
from autoprec.tune.assignment import Assignment
from autoprec.tune.yardstick import Yardstick


def next_index(
    plans: Sequence[Assignment], last: int, outcome_of: Callable[[int], Outcome | None], yardstick: Yardstick
) -> int | None:
    """The next plan to try between fp32 (index 0) and the plan at ``last``, which ran; None where nothing is left to learn.

    Harm rises along the front. The gap that a failing plan measured, over the harm it was predicted to do, says how much predicted
    harm is too much here; the fastest plan under that is tried next, the middle where no gap was measured or that plan is at an end.

    Args:
        plans: the front, safest first.
        last: index of the fastest plan that ran.
        outcome_of: what came of the plan at an index; None where it has not run.
        yardstick: the limits.
    """
    low, high = 0, last
    outcome = outcome_of(high)
    while high - low > 1 and outcome is not None and not yardstick.feasible(outcome):
        probe = _probe(plans, low, high, outcome, yardstick)
        found = outcome_of(probe)
        if found is None:
            return probe
        if yardstick.feasible(found):
            low = probe
        else:
            high, outcome = probe, found
    return None


def _probe(plans: Sequence[Assignment], low: int, high: int, failed: Outcome, yardstick: Yardstick) -> int:
    middle = (low + high) // 2
    gap, harm = yardstick.gap(failed), plans[high].harm
    if isinstance(failed, Failure) or not math.isfinite(gap) or not math.isfinite(harm) or gap <= yardstick.limit or low > 0:
        return middle
    bearable = harm * yardstick.limit / gap
    inside = [index for index in range(low + 1, high) if plans[index].harm <= bearable]
    return max(inside, default=middle)


def decided_by_numerics(outcome: Outcome) -> bool:
    """Whether a bad outcome lies in the layers' precisions alone: no step was skipped, so another loss scale changes nothing."""
    if isinstance(outcome, Failure):
        return outcome.kind == "unsupported"
    return outcome.skipped_steps == 0
