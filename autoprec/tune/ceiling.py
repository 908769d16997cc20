"""The most that low precision could give where speed is measured: Amdahl's law over what an FP32 step spends its time on."""

from __future__ import annotations

from autoprec.records import Ceiling, Look

# Half the bytes at best: an operation that is limited by memory traffic gains at most this. Source: 4 against 2 bytes an element.
LIGHT_GAIN = 2.0
# A host-bound step has the device done within a tenth of it after the host has issued it, so less work on the device saves no more.
# Source: ``HOST_BOUND_LAG_SHARE`` of the bench.
HOST_BOUND_SAVES = 0.1
# The floor is no less than this share of the step, so that a gain without bound stays a number.
LEAST_SHARE = 0.01


def measured_ceiling(look: Look, step_s: float, *, host_bound: bool, heavy_gain: float = float("inf")) -> Ceiling | None:
    """Bounds the speed of every assignment by what the FP32 step could lose at most.

    A lower precision shortens matmuls and convolutions by no more than the ratio of the card's peak rates, everything else in forward
    and backward by half, and neither the optimizer nor what the host does. Removing device work saves at most that much time.

    Args:
        look: with the measured seconds of the two kinds of work.
        step_s: a whole FP32 step, TF32 off.
        host_bound: whether the device waits for the host.
        heavy_gain: the ratio of peak rates; infinite where it is not known.

    Returns:
        The ceiling; None where the look measured nothing.
    """
    if step_s <= 0 or look.heavy_s + look.light_s <= 0:
        return None
    saved_s = look.heavy_s * (1 - 1 / heavy_gain) + look.light_s * (1 - 1 / LIGHT_GAIN)
    if host_bound:
        saved_s = min(saved_s, HOST_BOUND_SAVES * step_s)
    floor_s = max(step_s - saved_s, LEAST_SHARE * step_s)
    return Ceiling(fp32_step_s=step_s, best_fp32_step_s=step_s, floor_step_s=floor_s, host_bound=host_bound, origin="measured")
