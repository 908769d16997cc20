"""One window: a short training under a policy, and its samples or why there are none."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch

from autoprec.bench.culprit import Culprit, Watch, first_bad_parameter, who_raised
from autoprec.bench.memory import free_memory, is_out_of_memory
from autoprec.bench.provisions import DataCache, ModelCache
from autoprec.bench.source import describe, user_line
from autoprec.bench.target import Target
from autoprec.bench.training import CHECK_EVERY_STEPS, SpeedModel, TrainingRun
from autoprec.bench.workload import Workload
from autoprec.errors import PolicyMismatch, UserError, WorkloadError
from autoprec.policy import Policy
from autoprec.records import Failure, FailureKind, Measurement, Window

# A failure later than this is not run again to find its layer: the repeat would take longer than what is learnt is worth.
_MOST_STEPS_REPEATED = 100
_TRACEBACK_CHARACTERS = 4000


@dataclass(frozen=True)
class Raised:
    """An exception as plain text, so that it holds no tensors."""

    kind: FailureKind
    text: str
    line: str
    traceback: str
    step: int


def run_window(
    workload: Workload,
    target: Target,
    policy: Policy,
    window: Window,
    *,
    data: DataCache,
    models: ModelCache,
    speed: SpeedModel | None = None,
) -> Measurement | Failure:
    """Trains through ``apply_policy`` for a window and measures it. Waits for the GPU; process-wide state is restored.

    Args:
        workload: what to train.
        target: where, and whether speed is measured or predicted.
        policy: how.
        window: how long, and from which seed.
        data: batches by seed.
        models: initial weights by seed.
        speed: predicts step time where the target's timing is predicted, and peak memory on a CPU.

    Returns:
        The samples; or a failure when memory runs out, the loss or a buffer goes non-finite, the loss scale collapses, or the
        model raises under this policy. The failure names the layer where that can be found.

    Raises:
        WorkloadError: the batches end early, or the model raises in plain FP32: that is the user's to mend.
        PolicyMismatch: the policy was made for another list of layers.
    """
    run = TrainingRun(workload, target, policy, window, data=data, models=models, speed=speed)
    try:
        outcome = train(run)
    finally:
        shut(run)
    free_memory()
    if isinstance(outcome, Raised):
        if outcome.kind == "unsupported" and is_plain_fp32(policy):
            raise WorkloadError(
                f"Step {outcome.step} of plain FP32 training raised {outcome.text}\n{outcome.line}",
                hint="The model must train in FP32 before precisions can be searched.",
            )
        outcome = as_failure(outcome, target)
    if isinstance(outcome, Failure):
        outcome = _with_layer(outcome, TrainingRun(workload, target, _eager(policy), window, data=data, models=models))
        free_memory()
    return outcome


def train(run: TrainingRun) -> Measurement | Failure | Raised:
    """Builds a run and trains it through its window; exceptions come back as text."""
    try:
        with run.active():
            run.build()
            failure = advance(run, run.window.warmup_steps, timed=False) or advance(run, run.window.steps, timed=True)
            if failure is None:
                failure = run.final_check()
            if failure is None:
                run.probe_device_time()
            return failure or run.measurement()
    except Exception as error:
        if is_users_mistake(error):
            raise
        return raised(error, run.num_steps)


def advance(run: TrainingRun, steps: int, *, timed: bool) -> Failure | None:
    """Takes steps until they are done or training has broken down."""
    for _ in range(steps):
        run.step(timed=timed)
        if run.num_steps % CHECK_EVERY_STEPS == 0:
            failure = run.check()
            if failure is not None:
                return failure
    return None


def shut(*runs: TrainingRun) -> None:
    """Closes runs with their own flags in force, so that undoing a policy ends at the flags from before."""
    for run in reversed(runs):
        with run.active():
            run.close()
    if any(run.policy.execution != "eager" for run in runs):
        # Dynamo counts the compilations of one forward over all models and falls back to eager at its limit.
        torch.compiler.reset()


def is_users_mistake(error: Exception) -> bool:
    """Errors that are no outcome of a policy: the workload's own, and a policy for another model."""
    return isinstance(error, (WorkloadError, PolicyMismatch))


def raised(error: Exception, step: int) -> Raised:
    """An exception as text. Call it inside ``except``; use the result outside, where the tensors are free."""
    kind: FailureKind = "unsupported"
    if is_out_of_memory(error):
        kind = "out_of_memory"
    elif _breaks_the_device(error):
        kind = "crashed"
    text = f"{error.message} {error.hint}" if isinstance(error, UserError) else describe(error)
    return Raised(kind, text, user_line(error), traceback.format_exc()[-_TRACEBACK_CHARACTERS:], step)


def _breaks_the_device(error: Exception) -> bool:
    """CUDA errors after which the process can do nothing more on the device."""
    kind = getattr(torch, "AcceleratorError", None)
    return (kind is not None and isinstance(error, kind)) or "CUDA error" in str(error)


def as_failure(outcome: Raised, target: Target) -> Failure:
    """The record of an exception under a policy."""
    message = f"{outcome.text} at step {outcome.step}."
    if target.cuda_rules and "not implemented for" in outcome.text:
        message += " The CPU that stands in for the GPU has no such kernel; a GPU may."
    return Failure(kind=outcome.kind, message=message, step=outcome.step, traceback=outcome.traceback)


def is_plain_fp32(policy: Policy) -> bool:
    """Whether a policy changes nothing that could make a sound model raise."""
    plain = policy.execution == "eager" and not policy.padding.layers and policy.padding.data_axis_multiple is None
    return plain and set(policy.precisions().values()) | {policy.default} == {"fp32"}


def _eager(policy: Policy) -> Policy:
    return policy.model_copy(update={"execution": "eager"})


def _with_layer(failure: Failure, run: TrainingRun) -> Failure:
    """Repeats a failed window, watching, to name the layer; the failure as it was where that shows nothing."""
    if failure.kind not in ("diverged", "unsupported") or failure.step is None or failure.step > _MOST_STEPS_REPEATED:
        return failure
    culprit: Culprit | None = None
    try:
        with run.active():
            run.build()
            culprit = _who_raised(run, failure.step) if failure.kind == "unsupported" else _who_diverged(run, failure.step)
    except Exception:  # a repeat that fails in yet another way names nobody; the first failure stands
        culprit = None
    finally:
        shut(run)
    if culprit is None:
        return failure
    what = "Raised by" if failure.kind == "unsupported" else "First not finite:"
    return failure.model_copy(update={"layer": culprit.layer, "message": f"{failure.message} {what} {culprit.describe()}."})


def _who_raised(run: TrainingRun, step: int) -> Culprit | None:
    for _ in range(step):
        run.step(timed=False)
    assert run.model is not None
    return who_raised(run.model, lambda: run.step(timed=False))


def _who_diverged(run: TrainingRun, last_step: int) -> Culprit | None:
    assert run.model is not None
    watch = Watch(run.model, values=True)
    for _ in range(last_step + 1):
        watch.forget()
        weights = first_bad_parameter(run.model)
        if weights is not None:
            return Culprit(weights, "an update of the weights", "float32")
        with watch.watching():
            run.step(timed=False)
        if run.check() is not None:
            return watch.first_bad
    return None
