"""Several policies timed against each other in one process, A B A B, so that drift cancels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from autoprec.bench.data import Start
from autoprec.bench.failures import failure_of
from autoprec.bench.nvml import is_throttled
from autoprec.bench.target import Target
from autoprec.bench.timing import StepClock
from autoprec.bench.training import Training, free_memory, undisturbed
from autoprec.bench.window import finished, look_at, run_step
from autoprec.bench.workload import Workload
from autoprec.errors import PolicyMismatch, WorkloadError
from autoprec.policy import Policy
from autoprec.records import Failure, Measurement, Outcome, Window
from autoprec.runtime.backend import set_flags

# Rounds in which every arm gets one block of steps. Own choice: enough that a drift of the clocks hits every arm alike.
BLOCKS = 6
# Untimed steps at the start of a block on CUDA. Source: ResNet-50 in fp16 on an H200 took 23 ms a step in a long row and up to
# 30 ms in the first steps after the device had been waited for, because the host needs about as long to issue one.
LEAD_STEPS = 3


class _Arm:
    """One policy's training, its clock, and what ended it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.training: Training | None = None
        self.clock: StepClock | None = None
        self.failure: Failure | None = None
        self.step = 0
        self.dropped = 0

    def guard(self, action: Callable[[], None]) -> None:
        """Runs a part of the arm's work; what it raises ends this arm only."""
        if self.failure is not None:
            return
        try:
            action()
        except (WorkloadError, PolicyMismatch):
            raise
        except Exception as error:
            self.failure = failure_of(error, self.policy, self.training.model if self.training else None, self.step)


def interleave(workload: Workload, target: Target, policies: Sequence[Policy], window: Window, start: Start) -> list[Outcome]:
    """Trains every policy from the window's seed, in blocks of steps whose order is drawn anew each round.

    Warm-up steps (compiling included) are untimed. An arm that fails gives a Failure, and the others go on. Peak memory is not
    known per arm and is 0. Samples taken while heat or power held the clocks down are dropped and counted in the note.
    """
    arms = [_Arm(policy) for policy in policies]
    # The outermost flags undo what every arm sets, whatever order the arms end in.
    with undisturbed(target), _own_flags(policies[0]):
        try:
            for arm in arms:
                with _own_flags(arm.policy):
                    arm.guard(lambda arm=arm: _warm_up(arm, workload, target, window, start))  # type: ignore[misc]
            _run_blocks(arms, target, window)
            return [_outcome(arm, target) for arm in arms]
        finally:
            # In reverse order, so that flags and layouts unwind as they were set.
            for arm in reversed(arms):
                if arm.training is not None:
                    arm.training.close()
                    arm.training = None
            free_memory(target, compiled=any(policy.execution != "eager" for policy in policies))


@contextmanager
def _own_flags(policy: Policy) -> Iterator[None]:
    """Process-wide flags of one arm, for its block only."""
    undo = set_flags(policy.backend)
    try:
        yield
    finally:
        undo()


def _warm_up(arm: _Arm, workload: Workload, target: Target, window: Window, start: Start) -> None:
    arm.training = Training(workload, target, arm.policy, window, start)
    arm.clock = StepClock(target.device)
    _run_steps(arm, max(window.warmup_steps, 1), window)


def _run_blocks(arms: Sequence[_Arm], target: Target, window: Window) -> None:
    order = list(arms)
    shuffle = random.Random(window.seed)
    timed = max(window.steps - window.warmup_steps, BLOCKS)
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if target.device == "cuda" else ""
    for block in range(BLOCKS):
        steps = timed * (block + 1) // BLOCKS - timed * block // BLOCKS
        shuffle.shuffle(order)
        for arm in order:
            with _own_flags(arm.policy):
                arm.guard(lambda arm=arm, steps=steps: _run_block(arm, steps, window, uuid))  # type: ignore[misc]


def _run_block(arm: _Arm, steps: int, window: Window, uuid: str) -> None:
    """One arm's block. On CUDA its first steps are untimed, until the host is ahead of the device again, and the device is only
    waited for at the end."""
    assert arm.training is not None and arm.clock is not None
    lead = LEAD_STEPS if uuid and steps > 2 * LEAD_STEPS else 0
    for _ in range(lead):
        arm.training.step(arm.training.prepare(arm.step))
        arm.step += 1
    _run_steps(arm, steps - lead, window)
    if uuid:
        torch.cuda.synchronize()
        if is_throttled(uuid):
            arm.dropped += arm.clock.drop_last(steps - lead)
    arm.failure = look_at(arm.training)


def _run_steps(arm: _Arm, steps: int, window: Window) -> None:
    assert arm.training is not None and arm.clock is not None
    for _ in range(steps):
        run_step(arm.training, arm.clock, arm.step, window)
        arm.step += 1


def _outcome(arm: _Arm, target: Target) -> Outcome:
    if arm.failure is not None:
        return arm.failure
    assert arm.training is not None and arm.clock is not None
    outcome = finished(arm.training, arm.clock, target)
    if not isinstance(outcome, Measurement):
        return outcome
    if not outcome.step_times_s:
        return Failure(kind="unsupported", message="heat or power held the clocks down in every block, so no sample counts")
    note = f"{arm.dropped} steps dropped: heat or power held the clocks down" if arm.dropped else ""
    return outcome.model_copy(update={"note": note})
