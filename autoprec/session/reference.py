"""Stage 2: how FP32 trains, and how far two FP32 runs differ.

FP32 curves are windows like any other, so the run's folder is their memory: asking for a seed's curve again costs nothing.
"""

from __future__ import annotations

from autoprec.errors import DeviceError, UserError, WorkloadError
from autoprec.records import Failure, Window
from autoprec.session.context import Context
from autoprec.tune.divergence import noise_floor

# Half a unit in the last place of float32: the smallest change that any reordering of FP32 sums makes anyway.
# Source: IEEE 754 binary32 has a 24-bit significand, so rounding moves a value by up to 2^-24 of itself.
ROUNDING = 2.0**-24


def run_reference(context: Context) -> Context:
    """Trains FP32 (TF32 off) and a twin moved by rounding-size noise on every seed that the budget holds.

    Returns:
        The context with the seeds that ran; none where not even one pair did, and then nothing can be verified.

    Raises:
        WorkloadError: FP32 itself does not train.
        DeviceError: the card was never quiet enough to time it.
    """
    planned = context.plan.verify_seeds
    context.progress.stage("reference", 2 * planned)
    seeds = 0
    while seeds < planned and _pair(context, seeds):
        seeds += 1
    if seeds < planned:
        context.leave_out(f"{planned - seeds} of {planned} seeds", decides=False)
    if seeds:
        context.progress.found(
            f"reference: FP32 on {seeds} {'seed' if seeds == 1 else 'seeds'}, {context.plan.verify_steps} steps; "
            f"two FP32 runs differ by {twin_noise(context, seeds):.2%} of the loss at the end of the window"
        )
    return context.with_seeds(seeds)


def _pair(context: Context, seed: int) -> bool:
    """Trains FP32 and its twin on a seed where both fit; the first pair runs in whatever time there is."""
    windows = (context.verify_window(seed, "reference"), context.verify_window(seed, "FP32 twin", perturbation=ROUNDING))
    cost_s = sum(context.window_s(context.plain_fp32(), window) for window in windows)
    if seed and cost_s and not context.may_start(cost_s, context.with_seeds(seed + 1).least_after_s()):
        return False
    for window in windows:
        if context.time_left_s <= 0 and context.folder.lookup(context.plain_fp32(), window) is None:
            return False
        if context.is_cut_short(context.evaluate(context.plain_fp32(), window, role="reference")):
            return False
        _train(context, window)
        context.progress.advance()
    return True


def reference_curve(context: Context, seed: int) -> tuple[float, ...]:
    """FP32 losses of the verification window of a seed, one a step."""
    return _train(context, context.verify_window(seed, "reference"))


def twin_curve(context: Context, seed: int) -> tuple[float, ...]:
    """The same for a run whose initial weights were moved by rounding-size noise."""
    return _train(context, context.verify_window(seed, "FP32 twin", perturbation=ROUNDING))


def twin_noise(context: Context, seeds: int, steps: int | None = None) -> float:
    """The noise floor over the first ``steps`` of the windows (all of them where None): FP32 against its twins."""
    return noise_floor([(reference_curve(context, seed)[:steps], twin_curve(context, seed)[:steps]) for seed in range(seeds)])


def _train(context: Context, window: Window) -> tuple[float, ...]:
    outcome = context.evaluate(context.plain_fp32(), window, role="reference")
    if isinstance(outcome, Failure):
        raise fp32_error(outcome)
    return outcome.losses


def fp32_error(failure: Failure, what: str = "reference run") -> UserError:
    """The error that a failed FP32 run is: the workload's, unless the card was never quiet."""
    if failure.kind == "disturbed":
        return DeviceError(
            f"The card cannot be timed: in the FP32 {what} {failure.message}.",
            hint="What was measured is kept: run the same command again when the card is quiet.",
        )
    return WorkloadError(
        f"The FP32 {what} failed ({failure.kind}): {failure.message}",
        hint="autoprec compares with FP32, so FP32 has to train: mend the workload (learning rate, data, batch size) first.",
    )
