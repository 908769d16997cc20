"""Stage 2: how FP32 trains, and how far two FP32 runs differ."""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.errors import WorkloadError
from autoprec.policy import Policy
from autoprec.records import Failure, Measurement, Window
from autoprec.session.context import Context
from autoprec.tune.divergence import loss_gap, noise_floor

# Half a unit in the last place of float32: the smallest change that any reordering of FP32 sums makes anyway.
# Source: IEEE 754 binary32 has a 24-bit significand, so rounding moves a value by up to 2^-24 of itself.
ROUNDING = 2.0**-24


@dataclass(frozen=True)
class Reference:
    """FP32 losses by seed, and those of twins whose initial weights were moved by rounding-size noise.

    Attributes:
        losses: loss of every step, by seed.
        twins: the same for the perturbed twin.
    """

    losses: dict[int, tuple[float, ...]]
    twins: dict[int, tuple[float, ...]]

    def gap(self, measurement: Measurement, seed: int) -> float:
        """Relative loss gap of a run to the FP32 run of the same seed over the same number of steps."""
        return loss_gap(self.losses[seed][: len(measurement.losses)], measurement.losses)

    def noise(self, num_losses: int) -> float:
        """The noise floor over runs of ``num_losses`` steps."""
        return noise_floor([(self.losses[seed][:num_losses], self.twins[seed][:num_losses]) for seed in self.losses])


def run_reference(context: Context) -> Reference:
    """Trains FP32 (TF32 off) and a perturbed twin on every seed.

    Raises:
        WorkloadError: FP32 itself does not train.
    """
    context.progress.stage("reference", 2 * context.plan.verify_seeds)
    policy = context.plain_policy("fp32")
    losses: dict[int, tuple[float, ...]] = {}
    twins: dict[int, tuple[float, ...]] = {}
    for number in range(context.plan.verify_seeds):
        for curves, perturbation in ((losses, 0.0), (twins, ROUNDING)):
            window = context.verify_window(number, "reference" if not perturbation else "FP32 twin", perturbation)
            curves[window.seed] = _train(context, policy, window)
            context.progress.advance()
    reference = Reference(losses, twins)
    steps = len(next(iter(losses.values())))
    context.progress.found(
        f"reference: FP32 on {len(losses)} seeds, {steps} steps; two FP32 runs differ by {reference.noise(steps):.2%} of the loss"
    )
    return reference


def _train(context: Context, policy: Policy, window: Window) -> tuple[float, ...]:
    outcome = context.evaluate(policy, window, role="reference")
    if isinstance(outcome, Failure):
        raise WorkloadError(
            f"The FP32 reference run failed ({outcome.kind}): {outcome.message}",
            hint="autoprec compares with FP32, so FP32 has to train: mend the workload (learning rate, data, batch size) first.",
        )
    return outcome.losses
