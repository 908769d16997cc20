"""Figures as people read them: the one place where units are converted, for the report, the notes and ``autoprec show``."""

from __future__ import annotations

import math

NOTHING = "–"
# Own choice: a hundredth of the default tolerance.
LEAST_GAP = 1e-4


def significant(value: float, digits: int = 3) -> str:
    """``digits`` significant digits without an exponent between 0.001 and a million; thousands separated."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{decimals}f}"


def throughput(samples_per_s: float | None) -> str:
    """Samples per second, without the unit."""
    return NOTHING if samples_per_s is None else significant(samples_per_s)


def ratio(value: float | None) -> str:
    """A speed ratio: ``2.07×``."""
    return NOTHING if value is None else f"{value:.2f}×"


def memory(num_bytes: float | None) -> str:
    """Bytes in the largest decimal unit that leaves at least one: ``3.86 GB``."""
    if num_bytes is None:
        return NOTHING
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{significant(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds as µs, ms, s or minutes."""
    if seconds is None:
        return NOTHING
    if seconds >= 120:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if float(seconds).is_integer():
        return f"{seconds:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{significant(seconds / size)} {unit}"
    return f"{significant(seconds / 1e-6)} µs"


def gap(loss_gap: float | None) -> str:
    """A relative loss gap in percent: ``0.31 %``; sizes that no reader needs as ``<0.01 %``."""
    if loss_gap is None:
        return NOTHING
    if not math.isfinite(loss_gap):
        return "not finite"
    if 0 < abs(loss_gap) < LEAST_GAP:
        return "<0.01 %"
    return f"{significant(100 * loss_gap, 2)} %"
