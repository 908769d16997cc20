"""The curves of a long run in few points: losses, the policy's departure from FP32, and the band that FP32 itself covers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoprec.records import Record
from autoprec.tune.divergence import FALL_SHARE, NOISE_SIGMAS, tail_steps
from autoprec.tune.drawing import MAX_CURVE_POINTS
from autoprec.tune.long_run import LongRun, Trained

# Departures in the picture are smoothed over this share of the run, as in the report's own picture.
SMOOTHED_SHARE = 0.05
BLOCKS = "▁▂▃▄▅▆▇█"


class LongRunCurves(Record):
    """Means over stretches of equal length.

    Attributes:
        steps: the last step of each stretch.
        fp32: FP32's loss, mean over the seeds that the policy got through.
        policy: the policy's, likewise; empty where it got through none.
        departures: the policy's relative departure from FP32, a curve a seed.
        departure: their mean.
        band: what FP32 departs from itself by: twice the root mean square over its pairs.
        lost: losses of a policy that failed, as far as it came; with FP32's of the same seed before it.
    """

    steps: tuple[int, ...]
    fp32: tuple[float, ...]
    policy: tuple[float, ...]
    departures: tuple[tuple[float, ...], ...]
    departure: tuple[float, ...]
    band: tuple[float, ...]
    lost: tuple[float, ...] = ()


def curves_of(run: LongRun, *, points: int = MAX_CURVE_POINTS, smoothed: bool = True) -> LongRunCurves:
    """The curves of a run in at most ``points`` stretches."""
    size = max(math.ceil(run.steps / points), 1)
    span = max(round(SMOOTHED_SHARE * run.steps / size), 1) if smoothed else 1
    reference = {item.seed: item.losses for item in run.arm("fp32").runs}
    whole = [item for item in run.arm("policy").runs if item.failure is None]
    seeds = [item.seed for item in whole] or list(reference)[:1]
    departures = tuple(tuple(departure(reference[item.seed], item.losses, size, span)) for item in whole)
    pairs: list[list[float]] = []
    counted = [run.arm("fp32_twin"), *([run.arm("fp32_tf32")] if run.noise.tf32_counts else [])]
    for arm in counted:
        pairs += _departures(arm, reference, size, span)
    failed = run.arm("policy").failed
    return LongRunCurves(
        steps=tuple(min((index + 1) * size, run.steps) for index in range(math.ceil(run.steps / size))),
        fp32=_mean([_stretches(reference[seed], size) for seed in seeds]),
        policy=_mean([_stretches(item.losses, size) for item in whole]),
        departures=departures,
        departure=_mean(departures),
        band=tuple(NOISE_SIGMAS * math.sqrt(sum(v * v for v in values) / len(values)) for values in zip(*pairs, strict=True)),
        lost=tuple(_stretches(failed.losses, size)) if failed is not None else (),
    )


def _departures(arm: Trained, reference: dict[int, tuple[float, ...]], size: int, span: int) -> list[list[float]]:
    finished = (run for run in arm.runs if run.failure is None and run.seed in reference)
    return [departure(reference[run.seed], run.losses, size, span) for run in finished]


def departure(reference: Sequence[float], losses: Sequence[float], size: int, span: int) -> list[float]:
    """How much higher the losses are than the reference's in every stretch, relative to it.

    The scale is ``divergence.loss_gap``'s: a loss near zero does not blow the departure up.

    Args:
        reference: FP32 losses, one a step.
        losses: those of the same steps under another set-up.
        size: steps of a stretch.
        span: stretches over which both are averaged.
    """
    expected, given = (_smooth(_stretches(values, size), span) for values in (reference, losses))
    steps = tail_steps(len(reference))
    fall = abs(sum(reference[:steps]) - sum(reference[-steps:])) / steps
    return [(mine - base) / max(abs(base), FALL_SHARE * fall, 1e-30) for base, mine in zip(expected, given, strict=False)]


def _stretches(values: Sequence[float], size: int) -> list[float]:
    parts = (values[start : start + size] for start in range(0, len(values), size))
    return [sum(part) / len(part) for part in parts]


def _smooth(values: Sequence[float], span: int) -> list[float]:
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - span + 1) : i + 1])]


def _mean(curves: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(sum(values) / len(values) for values in zip(*curves, strict=True))


def sparkline(values: Sequence[float], low: float, high: float, *, signs: str = BLOCKS) -> str:
    """A character a value, the higher the taller; by logarithm where all are positive, since losses fall steeply at first."""
    if low > 0:
        low, high, values = math.log(low), math.log(high), [math.log(max(value, low)) for value in values]
    top, span = len(signs) - 1, high - low
    return "".join(signs[round(min(max((value - low) / span, 0.0), 1.0) * top) if span > 0 else 0] for value in values)


def departure_strip(curves: LongRunCurves, limit: float) -> str:
    """A character a stretch: ``·`` inside FP32's own noise, ``-`` inside the limit, ``+`` above it, ``v`` below it."""
    signs = []
    for value, size in zip(curves.departure, curves.band, strict=True):
        signs.append("·" if abs(value) <= size else "-" if abs(value) <= limit else "+" if value > 0 else "v")
    return "".join(signs)
