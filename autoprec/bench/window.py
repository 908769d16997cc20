"""One window: a short training run under a policy, its raw samples or why there are none."""

from __future__ import annotations

import itertools
import math
from typing import Protocol

import torch

from autoprec.bench.data import Start
from autoprec.bench.disturbance import MOST_REPEATS, Disturbance, TimedBlocks, card_of
from autoprec.bench.environment import environment
from autoprec.bench.failures import broken_buffer, divergence_of, failure_of, first_nonfinite_layer, skipped_steps
from autoprec.bench.target import Target
from autoprec.bench.timing import HOST_PROBES, LEAD_STEPS, StepClock
from autoprec.bench.training import Training, free_memory, undisturbed
from autoprec.bench.workload import Workload
from autoprec.errors import PolicyMismatch, WorkloadError
from autoprec.policy import Policy
from autoprec.records import Failure, Measurement, Outcome, Window

# Losses are looked at after these steps and then every twentieth: a look waits for the device, and most failures come at once.
_EARLY_LOOKS, _LOOK_EVERY_STEPS = (1, 2, 5, 9), 20
# A failure later than this is not trained up to again only to name the layer.
_LOCATE_UP_TO_STEPS = 40
# Where less than this share of a window's timed steps is left, more are run for their times alone. Own choice: a median of half the
# samples is 1.4 times as uncertain.
_ENOUGH_SHARE = 0.5


class SpeedModel(Protocol):
    """Predicts what cannot be measured here."""

    def step_s(self, policy: Policy) -> float:
        """Seconds of one optimizer step."""

    def host_bound(self, policy: Policy) -> bool:
        """Whether the device waits for the host."""

    def peak_bytes(self, policy: Policy) -> int:
        """Peak memory of one step."""


def run_window(
    workload: Workload,
    target: Target,
    policy: Policy,
    window: Window,
    start: Start,
    speed: SpeedModel | None,
    *,
    watched: bool = True,
) -> Outcome:
    """Trains a fresh model for a window; everything process-wide is as before when it returns.

    Where too many timed steps were disturbed, further steps are trained for their times alone: losses are those of the window.

    Args:
        workload: what is trained.
        target: where; where its timing is predicted, ``speed`` gives times and memory.
        policy: how.
        window: how long, from which seed.
        start: model and batches of the window's seed.
        speed: predicts what is not measured; on a CPU it also gives the memory.
        watched: False where only losses are wanted of it, so that disturbed step times are of no concern.

    Raises:
        WorkloadError: plain FP32 fails, or the batches end early.
    """
    on_cuda = target.device == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    with undisturbed(target):
        disturbance = Disturbance(card_of(target) if watched else None)
        training, outcome = _train(workload, target, policy, window, start, disturbance)
        # The peak is read before anything else allocates.
        peak_bytes = torch.cuda.max_memory_allocated() if on_cuda else 0
        if training is not None:
            training.close()
        del training
        if isinstance(outcome, Failure) and outcome.kind == "diverged" and (outcome.step or 0) < _LOCATE_UP_TO_STEPS:
            outcome = _located(outcome, workload, target, policy, window, start)
    free_memory(target, compiled=policy.execution != "eager")
    if isinstance(outcome, Failure):
        return outcome
    if speed is not None and target.timing == "predicted":
        step_s = speed.step_s(policy)
        return outcome.model_copy(
            update={
                "step_times_s": (step_s,) * len(outcome.step_times_s),
                "speed_origin": "predicted",
                "peak_bytes": speed.peak_bytes(policy),
                "host_bound": speed.host_bound(policy),
            }
        )
    if not on_cuda and speed is not None:
        peak_bytes = speed.peak_bytes(policy)
    return outcome.model_copy(update={"peak_bytes": peak_bytes})


def _train(
    workload: Workload, target: Target, policy: Policy, window: Window, start: Start, disturbance: Disturbance
) -> tuple[Training | None, Outcome]:
    """Trains; returns the training, so that its memory can be read before it is let go, and what came of it."""
    training: Training | None = None
    step = 0
    try:
        try:
            training = Training(workload, target, policy, window, start)
            clock = StepClock(target.device)
            blocks, block_start = TimedBlocks(clock, disturbance), window.warmup_steps
            for step in range(window.steps):
                if step == block_start:
                    disturbance.start()
                run_step(training, clock, step, window)
                if step in _EARLY_LOOKS or step % _LOOK_EVERY_STEPS == _LOOK_EVERY_STEPS - 1 or step == window.steps - 1:
                    failure = look_at(training)
                    if failure is not None:
                        return training, _with_losses(failure, training)
                    if step >= block_start:
                        blocks.end(range(block_start, step + 1))
                        block_start = step + 1
            outcome = finished(training, clock, target)
            if isinstance(outcome, Measurement):
                _time_again(training, clock, blocks, window, disturbance)
                outcome = counted(outcome, training, blocks, target)
            return training, _with_losses(outcome, training)
        except (WorkloadError, PolicyMismatch):
            raise
        except Exception as error:
            return training, failure_of(error, policy, training.model if training else None, step)
    except BaseException:
        if training is not None:
            training.close()
        raise


def _time_again(training: Training, clock: StepClock, blocks: TimedBlocks, window: Window, disturbance: Disturbance) -> None:
    """Trains on over the window's batches where too many of its timed steps were disturbed, until enough were not."""
    wanted = _ENOUGH_SHARE * (window.steps - window.warmup_steps)
    first = window.steps
    for _ in range(MOST_REPEATS):
        if not blocks.lost() or blocks.num_clean() >= wanted:
            return
        if not disturbance.settle():
            continue
        disturbance.start()
        steps = range(first, first + LEAD_STEPS + max(blocks.lost()))
        for number in steps:
            parts = training.prepare(number % window.steps)
            if number < first + LEAD_STEPS:
                training.step(parts)
            else:
                clock.time(lambda parts=parts: training.step(parts), number)  # type: ignore[misc]
        training.losses.values()  # waits for the device
        blocks.end(steps)
        first = steps.stop


def counted(outcome: Measurement, training: Training, blocks: TimedBlocks, target: Target, *, in_turns: bool = False) -> Outcome:
    """A measurement with the step times that count; see ``TimedBlocks.counted``. Where speed is predicted, with a placeholder."""
    skipped = skipped_steps(training.scales.values(), training.policy.loss_scale.init)
    with_times = blocks.counted(outcome, skipped, in_turns=in_turns)
    if target.timing == "predicted" and isinstance(with_times, Failure):  # all steps skipped: the prediction stands all the same
        return outcome.model_copy(update={"step_times_s": (0.0,)})
    return with_times


def _with_losses(outcome: Outcome, training: Training) -> Outcome:
    """A failure with the losses that led to it."""
    if not isinstance(outcome, Failure):
        return outcome
    return outcome.model_copy(update={"losses": tuple(itertools.takewhile(math.isfinite, training.losses.values()))})


def run_step(training: Training, clock: StepClock, step: int, window: Window) -> None:
    """Runs one step of a window: untimed in the warm-up, of which the last steps show whether the host is the limit."""
    parts = training.prepare(step)
    if step < window.warmup_steps - HOST_PROBES:
        training.step(parts)
    elif step < window.warmup_steps:
        clock.probe_host(lambda: training.step(parts))
    else:
        clock.time(lambda: training.step(parts), step)


def look_at(training: Training) -> Failure | None:
    """Reads losses and scales so far; waits for the device."""
    return divergence_of(training.losses.values(), training.scales.values(), training.policy)


def finished(training: Training, clock: StepClock, target: Target) -> Outcome:
    """What a window that ran to its end shows, but for its step times, or the failure it shows."""
    failure = look_at(training)
    if failure is not None:
        return failure
    buffer = broken_buffer(training.model, training.infinite_at_start)
    if buffer is not None:
        layer = buffer.rpartition(".")[0]
        return Failure(kind="diverged", message=f"buffer {buffer} holds NaN or infinity though the loss is finite", layer=layer)
    losses, scales = training.losses.values(), training.scales.values()
    skipped = skipped_steps(scales, training.policy.loss_scale.init)
    return Measurement(
        losses=tuple(losses),
        step_times_s=(),
        speed_origin="measured",
        batch_samples=training.policy.batch.effective,
        peak_bytes=0,
        skipped_steps=len(skipped),
        late_skipped_steps=sum(step >= len(losses) // 2 for step in skipped),
        final_scale=scales[-1] if scales else None,
        host_bound=clock.host_bound,
        environment=environment(target.device),
    )


def _located(failure: Failure, workload: Workload, target: Target, policy: Policy, window: Window, start: Start) -> Failure:
    """The failure with the first layer that goes non-finite, found by training up to it again, eager, with hooks."""
    training = Training(workload, target, policy.model_copy(update={"execution": "eager"}), window, start)
    layer: str | None = None
    try:
        for step in range((failure.step or 0) + 1):
            parts = training.prepare(step)
            layer = first_nonfinite_layer(training.model, lambda parts=parts: training.step(parts))  # type: ignore[misc]
            if layer is not None:
                break
    finally:
        training.close()
    return failure if layer is None else failure.model_copy(update={"layer": layer})
